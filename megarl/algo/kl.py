"""The KL divergence from the reference, per token, and the coefficient that weighs it.

logprobs, ref_logprobs [T] ──compute_kl──> kl [T] ──subtract_kl(coef)──> rewards [T]
mean kl of the step ──next_kl_coef──> coef of the next step        (a fixed coefficient simply stays)
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


def compute_kl(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """A one-sample estimate of KL(policy || reference) at each token (Schulman 2020, "Approximating KL divergence").

    With d = ref - policy: k1 = -d, k2 = d²/2, k3 = e^d - d - 1. For k3, d is clamped to ±20 and the estimate to at
    most 10, as verl does: beyond that (d > 2.6) the value is 10 and the gradient 0, so both stay finite for any d.

    Args:
        logprobs: [T] float, with gradient when the KL is part of the loss.
        ref_logprobs: [T] float.
        kind: the estimator.

    Returns:
        [T] fp32 (fp64 for fp64 input); means nothing outside the mask of the caller.
    """
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    log_ratio = ref_logprobs.to(dtype) - logprobs.to(dtype)
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return (torch.expm1(log_ratio) - log_ratio).clamp(max=_MAX_K3)
    raise ValueError(f"kind={kind!r} is not a KL estimator; use k1, k2 or k3")


def subtract_kl(rewards: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Token-level rewards with the KL penalty inside (Ouyang et al. 2022, section 3.4).

    Args:
        rewards: [T] float.
        kl: [T] float.
        mask: [T] bool; `kl` is not read outside it.
        coef: weight of the penalty.

    Returns:
        [T], `rewards` unchanged outside the mask.
    """
    return rewards - coef * torch.where(mask, kl, 0.0)


def next_kl_coef(coef: float, current_kl: float, target: float, horizon: int, num_steps: int) -> float:
    """The adaptive coefficient: grows while the KL lies above the target (Ziegler et al. 2019, section 2.2).

    coef * (1 + clip(kl/target - 1, ±0.2) * num_steps/horizon). More steps than the horizon count as the horizon, so
    the factor stays within 0.8 and 1.2 and the coefficient never changes sign.

    Args:
        coef: the coefficient of this step.
        current_kl: this step's mean KL per policy token.
        target: the KL to hold, in the same unit; positive.
        horizon: answers over which one full correction is spread; positive.
        num_steps: answers seen in this step.
    """
    assert math.isfinite(current_kl), f"current_kl={current_kl} would spoil the KL coefficient for good"
    assert target > 0 and horizon > 0, f"target={target} and horizon={horizon} must be positive"
    error = min(max(current_kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * min(num_steps / horizon, 1.0))
