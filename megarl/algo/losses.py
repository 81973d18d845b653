"""Per-token losses of policy and critic; `objective.py` weighs and sums them.

    clip      min(r A, clip(r) A), r the ratio of one token          PPO; clip-higher by two different bounds
    pg        A log p                                                REINFORCE
    cispo     sg[clip(r)] A log p                                    every token keeps a gradient
    gspo      min(s A, clip(s) A), s = the geometric mean of r       one ratio an answer
    gmpo      geometric mean over the answer of clipped r, times A   one ratio an answer, clipped token by token

`sg` is "taken as a constant". The last two need all policy tokens of an answer together (`LossInputs.sequence`). All
inputs are finite; clean what is masked before calling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0
_MAX_LOG_SEQUENCE_RATIO = 10.0


@dataclass(frozen=True)
class LossInputs:
    """K tokens of a micro-batch, all on one device.

    Attributes:
        logprobs: [K] float, with gradient.
        old_logprobs: [K] float, the policy that the advantages belong to.
        advantages: [K] float.
        mask: [K] bool, tokens that count; the other fields are 0 elsewhere.
        clip_low, clip_high: how far a ratio may fall below and rise above 1.
        clip_c: see `ppo_policy_loss`.
        sequence: [K] int64, which answer each token belongs to, from 0 to `num_sequences` - 1; every policy token of
            an answer is here. None where the loss is one of single tokens.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    clip_low: float
    clip_high: float
    clip_c: float
    sequence: Tensor | None = None
    num_sequences: int = 0

    def mean_over_sequence(self, x: Tensor) -> Tensor:
        """[K]: the mean of `x` [K] over the policy tokens of the answer that each token belongs to."""
        assert self.sequence is not None, "this loss needs to know which answer each token belongs to"
        totals = x.new_zeros(self.num_sequences).index_add(0, self.sequence, torch.where(self.mask, x, 0.0))
        counts = x.new_zeros(self.num_sequences).index_add(0, self.sequence, self.mask.to(x.dtype))
        return (totals / counts.clamp(min=1))[self.sequence]


@dataclass(frozen=True)
class TokenLosses:
    """`loss` [K] float with gradient; `clipped`, `dual_clipped` [K] bool: which bound decided the loss of a token."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor


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


def clip_loss(x: LossInputs) -> TokenLosses:
    """`ppo_policy_loss`. Two different bounds are clip-higher (DAPO, Yu et al. 2025, section 3.1)."""
    return TokenLosses(*ppo_policy_loss(x.logprobs, x.old_logprobs, x.advantages, x.clip_low, x.clip_high, x.clip_c))


def pg_loss(x: LossInputs) -> TokenLosses:
    """-A log p: the plain policy gradient (Williams 1992); right while the sampled policy is the one that learns."""
    nothing = torch.zeros_like(x.mask)
    return TokenLosses(-x.advantages * x.logprobs, nothing, nothing)


def cispo_loss(x: LossInputs) -> TokenLosses:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p (CISPO, MiniMax 2025, eq. 4).

    The clipped ratio is a weight, so no token loses its gradient.
    """
    ratio = policy_log_ratio(x.logprobs, x.old_logprobs).detach().exp()
    weight = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    return TokenLosses(-weight * x.advantages * x.logprobs, weight != ratio, torch.zeros_like(x.mask))


def gspo_loss(x: LossInputs) -> TokenLosses:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = the geometric mean of an answer's ratios.

    GSPO in its token form (Zheng et al. 2025, section 4.3): s takes its value from the whole answer and its gradient
    from the token. With one advantage an answer and seq-mean-token-mean this is the gradient of the sequence form.
    """
    log_ratio = policy_log_ratio(x.logprobs, x.old_logprobs)
    log_mean = x.mean_over_sequence(log_ratio.detach())
    ratio = (x.logprobs - x.logprobs.detach() + log_mean).clamp(max=_MAX_LOG_SEQUENCE_RATIO).exp()
    unclipped_loss = -x.advantages * ratio
    clipped_loss = -x.advantages * ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    loss = torch.maximum(unclipped_loss, clipped_loss)
    return TokenLosses(loss, clipped_loss > unclipped_loss, torch.zeros_like(x.mask))


def gmpo_loss(x: LossInputs) -> TokenLosses:
    """-A times the geometric mean of an answer's ratios, each clipped to [exp(-clip_low), exp(clip_high)] on the side
    that its advantage would push it to (GMPO, Zhao et al. 2025).

    Every token carries the loss of its answer: seq-mean-token-mean makes it the mean over answers.
    """
    log_ratio = policy_log_ratio(x.logprobs, x.old_logprobs)
    bounded = log_ratio.clamp(-x.clip_low, x.clip_high)
    held = torch.where(x.advantages >= 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    ratio = x.mean_over_sequence(held).exp()
    loss = -x.mean_over_sequence(x.advantages) * ratio
    return TokenLosses(loss, held != log_ratio, torch.zeros_like(x.mask))
