"""What one micro-batch adds to the loss of its mini-batch, and to the mini-batch's statistics.

Loss and statistics are weighted sums with weights from `reduce.compute_token_weights`: they add up over micro-batches
and data-parallel ranks and need no division afterwards. Inputs may be the whole packed micro-batch or only its policy
tokens; whatever lies outside `mask` reaches neither value nor gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algo.kl import KLKind, compute_kl
from megarl.algo.losses import LossInputs, TokenLosses, clip_loss, policy_log_ratio, value_loss


def policy_objective(
    logprobs: Tensor,
    entropy: Tensor | None,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    entropy_coeff: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_loss_coef: float = 0.0,
    kl_loss_type: KLKind = "k3",
    metric_weights: Tensor | None = None,
    policy_loss: Callable[[LossInputs], TokenLosses] = clip_loss,
    importance: Tensor | None = None,
    sequence: Tensor | None = None,
    num_sequences: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The actor's loss: sum(weights * (importance * policy loss - entropy_coeff * entropy + kl_loss_coef * kl)).

    Args:
        logprobs: [T] float, with gradient.
        entropy: [T] float, or None when neither wanted in the loss nor in the statistics.
        old_logprobs, advantages: [T] float.
        weights: [T] fp32.
        mask: [T] bool.
        clip_low, clip_high, clip_c, sequence, num_sequences: see `LossInputs`.
        entropy_coeff: weight of the entropy bonus.
        ref_logprobs: [T] float; given = the KL to the reference is reported and weighs `kl_loss_coef` in the loss.
        kl_loss_type: the estimator, see `compute_kl`.
        metric_weights: [T] fp32, token-mean weights for `actor/ppo_kl` and the clip fractions; None = `weights`.
            Needed where `weights` do not sum to 1 (seq-mean-token-sum).
        policy_loss: one of `losses.py`, or a user's.
        importance: [T] fp32, how much each token's policy loss counts beside its weight (`mismatch.py`); None = 1.

    Returns:
        loss: scalar fp32; 0, with a zero gradient, when nothing is policy.
        stats: detached scalars `actor/pg_loss`, `actor/ppo_kl`, `actor/pg_clipfrac`, `actor/pg_clipfrac_lower`,
            and `actor/entropy`, `actor/kl_loss` where their inputs are given.
    """
    assert entropy is not None or entropy_coeff == 0, f"entropy_coeff={entropy_coeff} needs entropy"
    assert ref_logprobs is not None or kl_loss_coef == 0, f"kl_loss_coef={kl_loss_coef} needs ref_logprobs"
    logprobs, old_logprobs, advantages = (_clean(x, mask) for x in (logprobs, old_logprobs, advantages))
    weights = _clean(weights, mask)
    shares = weights if metric_weights is None else _clean(metric_weights, mask)

    inputs = LossInputs(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, clip_c, sequence, num_sequences)
    losses = policy_loss(inputs)
    token_loss = losses.loss if importance is None else losses.loss * _clean(importance, mask)
    loss = (weights * token_loss).sum()
    stats = {
        "actor/pg_loss": loss,
        "actor/ppo_kl": -(shares * policy_log_ratio(logprobs, old_logprobs)).sum(),
        "actor/pg_clipfrac": (shares * losses.clipped).sum(),
        "actor/pg_clipfrac_lower": (shares * losses.dual_clipped).sum(),
    }
    if entropy is not None:
        stats["actor/entropy"] = (weights * _clean(entropy, mask)).sum()
    if entropy_coeff != 0:
        loss = loss - entropy_coeff * stats["actor/entropy"]
    if ref_logprobs is not None:
        kl = compute_kl(logprobs, _clean(ref_logprobs, mask), kl_loss_type)
        stats["actor/kl_loss"] = (weights * kl).sum()
        loss = loss + kl_loss_coef * stats["actor/kl_loss"]
    return loss, {name: value.detach() for name, value in stats.items()}


def value_objective(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    mask: Tensor,
    clip_range: float,
    metric_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss: sum(weights * value loss).

    Args:
        values: [T] float, with gradient.
        old_values, returns: [T] float.
        weights: [T] fp32.
        mask: [T] bool.
        clip_range: see `value_loss`.
        metric_weights: [T] fp32, token-mean weights for clip fraction and mean value; None = `weights`.

    Returns:
        loss: scalar fp32; 0, with a zero gradient, when nothing is policy.
        stats: detached scalars `critic/vf_loss`, `critic/vf_clipfrac`, `critic/vpred_mean`.
    """
    values, old_values, returns = (_clean(x, mask) for x in (values, old_values, returns))
    weights = _clean(weights, mask)
    shares = weights if metric_weights is None else _clean(metric_weights, mask)
    token_loss, clipped = value_loss(values, old_values, returns, clip_range)
    loss = (weights * token_loss).sum()
    stats = {
        "critic/vf_loss": loss,
        "critic/vf_clipfrac": (shares * clipped).sum(),
        "critic/vpred_mean": (shares * values).sum(),
    }
    return loss, {name: value.detach() for name, value in stats.items()}


def _clean(x: Tensor, mask: Tensor) -> Tensor:
    """`x` in at least fp32 with 0 outside the mask; the gradient outside is 0 whatever `x` holds there."""
    return torch.where(mask, x, 0.0).to(torch.promote_types(x.dtype, torch.float32))
