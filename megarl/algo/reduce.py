"""What each token weighs in the loss, settled for the whole mini-batch before it is cut into micro-batches.

The loss of a mini-batch is sum(weights * token_losses): a plain sum, so any split into micro-batches and data-parallel
ranks adds up to the same number. Two sequences, of 1 and 3 policy tokens with token losses 2 and 1 1 1:

    token-mean            1/4 | 1/4 1/4 1/4    ->  (2 + 3) / 4  = 1.25
    seq-mean-token-mean   1/2 | 1/6 1/6 1/6    ->  (2 + 1) / 2  = 1.5
    seq-mean-token-sum    1/2 | 1/2 1/2 1/2    ->  (2 + 3) / 2  = 2.5
    seq-mean-token-sum-norm, horizon 4: each divided by 4     ->  2.5 / 4      = 0.625
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.algo.segments import count_policy_tokens, sequence_of_token

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def compute_token_weights(
    mask: Tensor, cu_seqlens: Tensor, mode: AggregationMode, horizon: int | None = None
) -> Tensor:
    """The weight of every token of a mini-batch.

    Args:
        mask: [T] bool, the whole mini-batch over all micro-batches and data-parallel ranks.
        cu_seqlens: [B+1] int.
        mode: token-mean (DAPO, Yu et al. 2025), seq-mean-token-mean (GRPO, Shao et al. 2024), seq-mean-token-sum, or
            seq-mean-token-sum-norm: the sum over a constant length (Dr. GRPO, Liu et al. 2025).
        horizon: that constant, the longest answer possible; needed for seq-mean-token-sum-norm, else not read.

    Returns:
        [T] fp32, 0 outside the mask. The weights sum to 1 (seq-mean-token-sum: to the mean number of policy tokens;
        -norm: to that over the horizon), or to 0 when nothing is policy. Sequences without policy tokens do not count
        as sequences.
    """
    counts = count_policy_tokens(mask, cu_seqlens).double()
    num_sequences = (counts > 0).sum().clamp(min=1)
    if mode == "token-mean":
        per_sequence = torch.ones_like(counts) / counts.sum().clamp(min=1)
    elif mode == "seq-mean-token-mean":
        per_sequence = 1.0 / (counts.clamp(min=1) * num_sequences)
    elif mode == "seq-mean-token-sum":
        per_sequence = torch.ones_like(counts) / num_sequences
    elif mode == "seq-mean-token-sum-norm":
        assert horizon is not None and horizon > 0, f"horizon={horizon}: seq-mean-token-sum-norm needs a length"
        per_sequence = torch.ones_like(counts) / (num_sequences * horizon)
    else:
        raise ValueError(
            f"mode={mode!r}: use token-mean, seq-mean-token-mean, seq-mean-token-sum or seq-mean-token-sum-norm"
        )
    per_token = per_sequence[sequence_of_token(cu_seqlens, mask.numel())]
    return torch.where(mask, per_token, 0.0).float()
