"""The advantages by name: each takes everything that is known of a batch and gives a number for every policy token.

A function of your own has the same form (`algorithm.advantage=path/to/file.py:function`); it may return the bare
advantages:

    def my_advantage(x: AdvantageInputs) -> Tensor:      # x.scores [B], x.rewards [T], x.mask [T], x.batch, ...
        return spread(x.scores - x.scores.mean(), x.mask, x.batch.cu_seqlens)

What each needs is told in `algo/algorithms.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.advantages import compute_group_advantages
from megarl.algo.baselines import (
    adaptive_lam,
    leave_one_out,
    spread,
    subtract_greedy,
    subtract_group_mean,
    subtract_optimal_baseline,
    sum_to_go,
)
from megarl.algo.lagrange import combine_advantages
from megarl.algo.segments import count_policy_tokens
from megarl.config.schema import AlgorithmConfig
from megarl.ops.gae import gae
from megarl.ops.moments import whiten
from megarl.records import PackedBatch


@dataclass(frozen=True)
class AdvantageInputs:
    """What is known of B answers, T packed tokens, on the host.

    Attributes:
        batch: the answers themselves; `batch.group` [B] says which answer the same prompt.
        scores: [B] fp32, what each answer is worth, the prices of length and KL taken off; not to be read where
            `failed`.
        failed: [B] bool, no score: the answer has no token in `mask`.
        rewards: [T] fp32, the same per token: the score on the last policy token, the price of KL on each.
        mask: [T] bool, policy tokens.
        values: [T] fp32, the critic's; None without the need "values".
        greedy_scores: [B] fp32, the score of the greedy answer to the same prompt; None without the need "greedy".
        costs, cost_values: [T] fp32, as rewards and values; None without the need "costs".
        multiplier: of the costs.
        options: the section `algorithm`.
    """

    batch: PackedBatch
    scores: Tensor
    failed: Tensor
    rewards: Tensor
    mask: Tensor
    options: AlgorithmConfig
    values: Tensor | None = None
    greedy_scores: Tensor | None = None
    costs: Tensor | None = None
    cost_values: Tensor | None = None
    multiplier: float = 0.0

    @property
    def lengths(self) -> Tensor:
        """[B] int64: policy tokens of each answer."""
        return count_policy_tokens(self.mask, self.batch.cu_seqlens)


@dataclass(frozen=True)
class Advantages:
    """`advantages` [T] fp32, 0 outside the mask; `returns`, `cost_returns` [T] fp32: what the critics learn."""

    advantages: Tensor
    returns: Tensor | None = None
    cost_returns: Tensor | None = None


Estimator = Callable[[AdvantageInputs], Advantages]


def estimate_gae(x: AdvantageInputs) -> Advantages:
    """GAE; advantages and the critic's targets may have different decays (decoupled: VC-PPO, Yuan et al. 2025), and
    the advantages' one that grows with the length (VAPO, Yue et al. 2025)."""
    assert x.values is not None, "gae needs values"
    advantages, returns = _gae(x, x.rewards, x.values)
    return Advantages(_whiten(x, advantages), returns)


def estimate_gae_lagrangian(x: AdvantageInputs) -> Advantages:
    """GAE of rewards and GAE of costs, joined by the multiplier (Safe-RLHF, Dai et al. 2023)."""
    assert x.values is not None and x.costs is not None and x.cost_values is not None, "needs values and costs"
    rewards, returns = _gae(x, x.rewards, x.values)
    costs, cost_returns = _gae(x, x.costs, x.cost_values)
    return Advantages(_whiten(x, combine_advantages(rewards, costs, x.multiplier)), returns, cost_returns)


def estimate_grpo(x: AdvantageInputs) -> Advantages:
    """See `compute_group_advantages`; `norm_adv_by_std=false` is Dr. GRPO's."""
    cu_seqlens, by_std = x.batch.cu_seqlens, x.options.norm_adv_by_std
    return Advantages(compute_group_advantages(x.scores, x.batch.group, x.failed, x.mask, cu_seqlens, by_std)[0])


def estimate_rloo(x: AdvantageInputs) -> Advantages:
    """See `leave_one_out`."""
    return _spread(x, leave_one_out(x.scores, x.batch.group, x.failed))


def estimate_opo(x: AdvantageInputs) -> Advantages:
    """See `subtract_optimal_baseline`."""
    return _spread(x, subtract_optimal_baseline(x.scores, x.lengths, x.batch.group, x.failed))


def estimate_remax(x: AdvantageInputs) -> Advantages:
    """See `subtract_greedy`."""
    assert x.greedy_scores is not None, "remax needs greedy scores"
    return Advantages(subtract_greedy(x.rewards, x.greedy_scores, x.mask, x.batch.cu_seqlens))


def estimate_reinforce_plus_plus(x: AdvantageInputs) -> Advantages:
    """Discounted rewards to go, whitened over the batch (REINFORCE++, Hu 2025)."""
    return Advantages(whiten(sum_to_go(x.rewards, x.mask, x.batch.cu_seqlens, x.options.gamma), x.mask))


def estimate_reinforce_plus_plus_baseline(x: AdvantageInputs) -> Advantages:
    """Scores minus their group's mean, whitened over the batch (REINFORCE++-baseline, Hu 2025)."""
    centred = _spread(x, subtract_group_mean(x.scores, x.batch.group, x.failed))
    return Advantages(whiten(centred.advantages, x.mask))


ESTIMATORS: dict[str, Estimator] = {
    "gae": estimate_gae,
    "gae_lagrangian": estimate_gae_lagrangian,
    "grpo": estimate_grpo,
    "rloo": estimate_rloo,
    "opo": estimate_opo,
    "remax": estimate_remax,
    "reinforce_plus_plus": estimate_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": estimate_reinforce_plus_plus_baseline,
}


def wrap_user_estimator(function: Callable[[AdvantageInputs], Tensor | Advantages], spec: str) -> Estimator:
    """A user's function as an estimator; what it returns is checked at each call.

    Raises:
        ValueError: from the estimator: something else than [T] numbers came back, or one that is not finite.
    """

    def estimate(x: AdvantageInputs) -> Advantages:
        result = function(x)
        found = result if isinstance(result, Advantages) else Advantages(result)
        values = found.advantages
        if not isinstance(values, Tensor) or values.shape != x.mask.shape:
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"algorithm.advantage={spec} returned {shape}; it must be a tensor {list(x.mask.shape)}")
        if not bool(values[x.mask].isfinite().all()):
            raise ValueError(f"algorithm.advantage={spec} returned advantages that are not finite")
        advantages = torch.where(x.mask, values.detach().float(), 0.0)
        returns = found.returns
        if returns is None and x.values is not None:
            returns = torch.where(x.mask, advantages + x.values, 0.0)
        return Advantages(advantages, returns)

    return estimate


def _gae(x: AdvantageInputs, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    options, cu_seqlens = x.options, x.batch.cu_seqlens
    lam = adaptive_lam(x.lengths, options.lam_alpha) if options.lam_alpha else options.lam
    critic_lam = options.lam if options.lam_critic is None else options.lam_critic
    advantages, returns = gae(rewards, values, x.mask, cu_seqlens, options.gamma, lam)
    if options.lam_alpha or critic_lam != options.lam:
        returns = gae(rewards, values, x.mask, cu_seqlens, options.gamma, critic_lam)[1]
    return advantages, returns


def _whiten(x: AdvantageInputs, advantages: Tensor) -> Tensor:
    return whiten(advantages, x.mask) if x.options.whiten_advantages else advantages


def _spread(x: AdvantageInputs, per_answer: Tensor) -> Advantages:
    return Advantages(spread(per_answer, x.mask, x.batch.cu_seqlens))
