"""Safe-RLHF (Dai et al. 2023): reward to be raised, cost to be kept under a limit, and the multiplier between them.

reward and reward critic ──GAE──> A_r ┐
cost   and cost critic   ──GAE──> A_c ┴─> (A_r - λ A_c) / (1 + λ) ──> policy loss
mean cost of the answers ─────────────> λ of the next step: up while the cost is over its limit, else down
"""

from __future__ import annotations

import math

from torch import Tensor


def combine_advantages(reward_advantages: Tensor, cost_advantages: Tensor, multiplier: float) -> Tensor:
    """(A_r - λ A_c) / (1 + λ) (Dai et al. 2023, appendix B): the scale of the gradient stays, whatever λ.

    Args:
        reward_advantages, cost_advantages: [T] float.
        multiplier: λ, 0 or more.
    """
    return (reward_advantages - multiplier * cost_advantages) / (1.0 + multiplier)


def next_multiplier(
    multiplier: float, mean_cost: float, cost_limit: float, lr: float, lower: float, upper: float
) -> float:
    """ln λ += lr · λ · (mean cost - limit), held within the bounds (Dai et al. 2023, appendix B).

    Args:
        multiplier: λ of this step, positive.
        mean_cost: mean cost of this step's answers.
        cost_limit: what the mean cost may be.
        lr: rate of the multiplier's own gradient ascent.
        lower, upper: bounds; the lower one is positive, because λ could never leave 0.
    """
    assert math.isfinite(mean_cost), f"mean_cost={mean_cost} would spoil the multiplier for good"
    assert 0 < lower <= upper, f"lower={lower} and upper={upper} must be positive and in order"
    log_multiplier = math.log(multiplier) + lr * multiplier * (mean_cost - cost_limit)
    return math.exp(min(max(log_multiplier, math.log(lower)), math.log(upper)))
