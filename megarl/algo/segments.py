"""Which token belongs to which sequence of a packed batch.

cu_seqlens          0 3 5          two sequences, of 3 and 2 tokens
sequence_of_token   0 0 0 1 1
mask                F T T T F
last_policy_token   2 3            -1 where a sequence has no policy token
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence that each packed token belongs to.

    Args:
        cu_seqlens: [B+1] int, first entry 0, last entry `num_tokens`.
        num_tokens: T.

    Returns:
        [T] int64, ascending.
    """
    sequences = torch.arange(cu_seqlens.numel() - 1, device=cu_seqlens.device)
    return sequences.repeat_interleave(cu_seqlens.diff().long(), output_size=num_tokens)


def count_policy_tokens(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Policy tokens of each sequence: [B] int64, from `mask` [T] bool and `cu_seqlens` [B+1] int."""
    counts = torch.zeros(mask.numel() + 1, dtype=torch.int64, device=mask.device)
    counts[1:] = mask.cumsum(0)
    return counts[cu_seqlens.long()].diff()


def policy_token_before(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The last policy token at or before each token, in the same sequence.

    Args:
        mask: [T] bool.
        cu_seqlens: [B+1] int.

    Returns:
        [T] int64, -1 where the sequence has no policy token yet.
    """
    if not mask.numel():
        return torch.empty(0, dtype=torch.int64, device=mask.device)
    positions = torch.arange(mask.numel(), device=mask.device)
    before = torch.where(mask, positions, -1).cummax(0).values
    starts = cu_seqlens.long()[sequence_of_token(cu_seqlens, mask.numel())]
    return torch.where(before >= starts, before, -1)


def last_policy_token(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The position of each sequence's last policy token.

    Args:
        mask: [T] bool.
        cu_seqlens: [B+1] int.

    Returns:
        [B] int64, -1 for a sequence without policy tokens.
    """
    counts = count_policy_tokens(mask, cu_seqlens)
    last = torch.full_like(counts, -1)
    has_policy = counts > 0
    last[has_policy] = mask.nonzero().squeeze(1)[counts.cumsum(0)[has_policy] - 1]
    return last


def mask_sequences(mask: Tensor, keep: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Masks every token of the sequences that are not kept, for example those whose reward failed.

    Args:
        mask: [T] bool.
        keep: [B] bool.
        cu_seqlens: [B+1] int.

    Returns:
        [T] bool.
    """
    return mask & keep[sequence_of_token(cu_seqlens, mask.numel())]
