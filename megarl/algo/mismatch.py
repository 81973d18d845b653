"""The gap between the policy that samples (the engine) and the one that learns (the trainer), and what to do about it.

The two run other kernels, perhaps in another precision, so the same weights give a token slightly different log-probs.
With r = exp(old - rollout) of one token, an answer of ratios 2 and 0.5 has

    level token      ratios 2, 0.5       truncate at 1.5: 1.5, 0.5      mask outside [0.4, 1.5]: 0, 0.5
    level sequence   ratio  1 (product)  on both tokens
    level geometric  ratio  1 (mean of the logs)  on both tokens
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.algo.segments import count_policy_tokens, sequence_of_token

Level = Literal["token", "sequence", "geometric"]
Bound = Literal["truncate", "mask"]

_MAX_LOG_RATIO = 20.0


@torch.no_grad()
def compute_importance(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: Level,
    bound: Bound,
    lower: float,
    upper: float,
) -> Tensor:
    """How much each token's policy loss counts, so that samples of the engine stand for the trainer's policy.

    Truncated importance sampling (Yao et al. 2025) holds ratios at `upper` (and, unusual, at `lower`); masked (Zhao et
    al. 2025, IcePop) leaves out what lies outside the bounds, without touching the weights of the rest.

    Args:
        old_logprobs: [T] float, the trainer's policy before the update.
        rollout_logprobs: [T] float, the engine's.
        mask: [T] bool.
        cu_seqlens: [B+1] int.
        level: ratios of single tokens, their product over the answer, or their geometric mean.
        bound: hold at the bounds, or give 0 outside them.
        lower, upper: the bounds.

    Returns:
        [T] fp32, 0 outside the mask.
    """
    assert 0 <= lower < 1 < upper, f"lower={lower} and upper={upper} must lie around 1"
    log_ratio = torch.where(mask, old_logprobs.double() - rollout_logprobs.double(), 0.0)
    if level != "token":
        owner = sequence_of_token(cu_seqlens, mask.numel())
        totals = log_ratio.new_zeros(cu_seqlens.numel() - 1).index_add(0, owner, log_ratio)
        if level == "geometric":
            totals = totals / count_policy_tokens(mask, cu_seqlens).clamp(min=1)
        log_ratio = totals[owner]
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    if bound == "truncate":
        ratio = ratio.clamp(lower, upper)
    else:
        ratio = torch.where((ratio >= lower) & (ratio <= upper), ratio, 0.0)
    return torch.where(mask, ratio, 0.0).float()


@torch.no_grad()
def describe_mismatch(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, importance: Tensor | None = None
) -> dict[str, float]:
    """Metrics of the gap, logged at every step whether it is corrected or not.

    Args:
        old_logprobs, rollout_logprobs: [T] float.
        mask: [T] bool.
        importance: [T] fp32, as `compute_importance` gave it.

    Returns:
        `rollout/logprob_gap` and `_max`: mean and largest absolute difference. `rollout/kl`: KL(engine || trainer) by
        k1, and `rollout/k3_kl`. `rollout/ratio_mean|max|min`, of tokens. `rollout/ess`: effective sample size over
        sample size, 1 = no gap. With `importance`: its mean, and the share of tokens it leaves out. Empty when nothing
        is policy.
    """
    if not bool(mask.any()):
        return {}
    log_ratio = (old_logprobs - rollout_logprobs)[mask].double()
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    metrics = {
        "rollout/logprob_gap": log_ratio.abs().mean(),
        "rollout/logprob_gap_max": log_ratio.abs().max(),
        "rollout/kl": -log_ratio.mean(),
        "rollout/k3_kl": (ratio - 1.0 - log_ratio).mean(),
        "rollout/ratio_mean": ratio.mean(),
        "rollout/ratio_max": ratio.max(),
        "rollout/ratio_min": ratio.min(),
        "rollout/ess": ratio.sum().square() / (ratio.numel() * ratio.square().sum()),
    }
    if importance is not None:
        kept = importance[mask].double()
        metrics["rollout/importance_mean"] = kept.mean()
        metrics["rollout/importance_masked_share"] = (kept == 0).double().mean()
    return {name: float(value) for name, value in metrics.items()}
