"""Per-token losses of policy and critic; `objective.py` weighs and sums them.

All inputs are finite; clean what is masked before calling.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0


def policy_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log(new/old) [T], clamped to ±20 as verl does, so that its exponential and the gradient stay finite."""
    return (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def ppo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_c: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped surrogate (Schulman et al. 2017, eq. 7) with the dual clip (Ye et al. 2020, eq. 5).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0, at most -A clip_c.

    Args:
        logprobs: [T] float, with gradient.
        old_logprobs: [T] float, the policy that the advantages belong to.
        advantages: [T] float.
        clip_low, clip_high: how far the ratio r may fall below and rise above 1.
        clip_c: bound on the ratio where the advantage is negative, above 1; 0 = no dual clip.

    Returns:
        loss: [T] float.
        clipped: [T] bool, the ratio's clip decided the loss.
        dual_clipped: [T] bool, the dual clip did.
    """
    assert clip_c == 0 or clip_c > 1, f"clip_c={clip_c} must be above 1, or 0 for no dual clip"
    ratio = policy_log_ratio(logprobs, old_logprobs).exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss
    if clip_c == 0:
        return loss, clipped, torch.zeros_like(clipped)
    bound = -advantages * clip_c
    dual_clipped = (advantages < 0) & (loss > bound)
    return torch.where(dual_clipped, bound, loss), clipped, dual_clipped


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """Half the larger of two squared errors: of the value, and of the value kept near the old one.

    0.5 max((V - R)², (clip(V, V_old ± clip_range) - R)²), the form of the PPO code of Schulman et al. 2017 and of verl.

    Args:
        values: [T] float, with gradient.
        old_values: [T] float, the critic before the update.
        returns: [T] float.
        clip_range: how far a value may move from the old one before the clip holds it.

    Returns:
        loss: [T] float.
        clipped: [T] bool, the clip decided the loss.
    """
    near_old = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    unclipped_loss = (values - returns).square()
    clipped_loss = (near_old - returns).square()
    return 0.5 * torch.maximum(unclipped_loss, clipped_loss), clipped_loss > unclipped_loss
