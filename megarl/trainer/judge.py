"""From what is known of a batch to the advantages of its tokens.

    scores [B], turn rewards [T] ─ price of length ─ place ─ minus KL ──> rewards [T] ─┬─ estimator ─> advantages [T],
    costs [B] ────────────────────────────────────── place ─ plus KL ───> costs [T] ───┘               returns [T]
    old and rollout log-probs [T] ──> importance [T], and the metrics of their gap

Every rank holds the whole batch and computes the same numbers, so statistics over the batch need no collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.advantages import place_rewards
from megarl.algo.groups import summarise_groups
from megarl.algo.kl import compute_kl, next_kl_coef, subtract_kl
from megarl.algo.lagrange import next_multiplier
from megarl.algo.mismatch import compute_importance, describe_mismatch
from megarl.algo.segments import count_policy_tokens, mask_sequences, sequence_of_token
from megarl.algo.shaping import overlong_penalty
from megarl.config.schema import AlgorithmConfig, CorrectionLevel, KLController
from megarl.records import PackedBatch, Scores
from megarl.trainer.estimators import AdvantageInputs, Estimator


@dataclass(frozen=True)
class Evidence:
    """What was found out about B answers, T tokens; what the algorithm does not need is None.

    `rewards` [B] fp32 and `is_failed` [B] bool: answers without a score leave the batch, they do not count as zero.
    `turn_rewards` [T] fp32: the part of the rewards that single turns of an answer have earned, on their last tokens.
    `greedy_scores`, `costs` [B] fp32. `old_logprobs`, `ref_logprobs`, `values`, `cost_values` [T] fp32.
    """

    rewards: Tensor
    is_failed: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    greedy_scores: Tensor | None = None
    costs: Tensor | None = None
    cost_values: Tensor | None = None
    turn_rewards: Tensor | None = None


@dataclass(frozen=True)
class Coefficients:
    """What moves from step to step beside the weights: weight of the KL in the reward, and the costs' multiplier."""

    kl_coef: float
    multiplier: float


@dataclass(frozen=True)
class Judged:
    """A batch with everything the losses need.

    `mask` [T] bool: policy tokens that count in them. `not_finite`: what of the evidence holds NaN or inf on a policy
    token, and where first; the gradient will not be finite either, and no weight changes.
    """

    scores: Scores
    mask: Tensor
    metrics: dict[str, float]
    not_finite: tuple[str, ...] = ()


def first_coefficients(algorithm: AlgorithmConfig, kept: Mapping[str, float]) -> Coefficients:
    """The coefficients that a run begins with, or those that its checkpoint has kept, by field."""
    return Coefficients(
        kl_coef=kept.get("kl_coef", algorithm.kl_ctrl.kl_coef),
        multiplier=kept.get("multiplier", algorithm.lagrange.init),
    )


def judge(
    algorithm: AlgorithmConfig,
    batch: PackedBatch,
    evidence: Evidence,
    coefficients: Coefficients,
    estimate: Estimator,
    max_response_length: int,
) -> Judged:
    """Turns scores of answers into advantages of tokens.

    Args:
        estimate: the algorithm's advantage.
        max_response_length: the limit that answers are cut at.
    """
    failed, cu_seqlens = evidence.is_failed, batch.cu_seqlens
    policy = mask_sequences(batch.response_mask, ~failed, cu_seqlens)
    metrics = describe("critic/score", evidence.rewards[~failed])
    scores = evidence.rewards
    if algorithm.overlong_buffer_len:
        lengths = count_policy_tokens(batch.response_mask, cu_seqlens)
        price = overlong_penalty(
            lengths, max_response_length, algorithm.overlong_buffer_len, algorithm.overlong_penalty
        )
        metrics["reward/overlong_penalty"] = masked_mean(price, ~failed)
        scores = scores + price
    if evidence.turn_rewards is None:
        rewards = place_rewards(scores, policy, cu_seqlens)
    else:
        earned = torch.where(policy, evidence.turn_rewards, 0.0)
        rewards = place_rewards(scores - sum_answers(earned, cu_seqlens), policy, cu_seqlens) + earned
    costs = None if evidence.costs is None else place_rewards(evidence.costs, policy, cu_seqlens)
    if evidence.ref_logprobs is not None:
        kl = compute_kl(evidence.old_logprobs, evidence.ref_logprobs, algorithm.kl_penalty.value)
        metrics["actor/reward_kl_penalty"] = masked_mean(kl, policy)
        if algorithm.use_kl_in_reward:
            # half to the rewards and half to the costs: its weight in the joint advantage is then the same for any λ
            share = coefficients.kl_coef if costs is None else coefficients.kl_coef / 2
            rewards = subtract_kl(rewards, kl, policy, share)
            costs = None if costs is None else subtract_kl(costs, kl, policy, -share)
            scores = scores - share * sum_answers(torch.where(policy, kl, 0.0), cu_seqlens)
            metrics["actor/reward_kl_penalty_coeff"] = coefficients.kl_coef
    metrics |= describe("critic/rewards", scores[~failed])
    found = estimate(
        AdvantageInputs(
            batch=batch,
            scores=scores,
            failed=failed,
            rewards=rewards,
            mask=policy,
            options=algorithm,
            values=evidence.values,
            greedy_scores=evidence.greedy_scores,
            costs=costs,
            cost_values=evidence.cost_values,
            multiplier=coefficients.multiplier,
        )
    )
    importance = _correct(algorithm, batch, evidence.old_logprobs, policy)
    mask = mask_sequences(policy, batch.is_finished, cu_seqlens) if algorithm.mask_truncated else policy
    metrics |= describe("critic/advantages", found.advantages[mask])
    metrics |= describe_critic("critic", evidence.values, found.returns, policy)
    metrics |= describe_critic("cost_critic", evidence.cost_values, found.cost_returns, policy)
    metrics |= _describe_scores(evidence, batch, coefficients, algorithm.lagrange.cost_limit)
    metrics |= describe_mismatch(evidence.old_logprobs, batch.rollout_logprobs, policy, importance)
    known = Scores(
        old_logprobs=evidence.old_logprobs,
        ref_logprobs=evidence.ref_logprobs,
        values=evidence.values,
        rewards=rewards,
        advantages=found.advantages,
        returns=found.returns,
        cost_values=evidence.cost_values,
        cost_returns=found.cost_returns,
        importance=importance,
    )
    return Judged(known, mask, metrics, find_not_finite(evidence, policy, cu_seqlens))


def find_not_finite(evidence: Evidence, mask: Tensor, cu_seqlens: Tensor) -> tuple[str, ...]:
    """Which scores of policy tokens are not finite: their name, how many, and the first one's answer."""
    owner = sequence_of_token(cu_seqlens, mask.numel())
    found: list[str] = []
    for name in ("old_logprobs", "ref_logprobs", "values", "cost_values"):
        values: Tensor | None = getattr(evidence, name)
        bad = torch.zeros_like(mask) if values is None else mask & ~values.isfinite()
        if bool(bad.any()):
            first = int(owner[bad][0])
            found.append(f"{name} on {int(bad.sum())} tokens, first in answer {first}")
    return tuple(found)


def advance(
    algorithm: AlgorithmConfig, now: Coefficients, metrics: Mapping[str, float], num_answers: int, step: int
) -> Coefficients:
    """The coefficients of the next step, from the metrics of this one; a metric that is not finite moves nothing."""
    kl, multiplier = now.kl_coef, now.multiplier
    control, lagrange = algorithm.kl_ctrl, algorithm.lagrange
    paid, cost = metrics.get("actor/reward_kl_penalty", math.nan), metrics.get("cost/mean", math.nan)
    if control.type is KLController.adaptive and math.isfinite(paid):
        kl = next_kl_coef(kl, paid, control.target_kl, control.horizon, num_answers)
    if math.isfinite(cost) and step > lagrange.delay_steps:
        multiplier = next_multiplier(multiplier, cost, lagrange.cost_limit, lagrange.lr, lagrange.min, lagrange.max)
    return Coefficients(kl, multiplier)


def _correct(algorithm: AlgorithmConfig, batch: PackedBatch, old_logprobs: Tensor, mask: Tensor) -> Tensor | None:
    correction = algorithm.rollout_correction
    if correction.level is CorrectionLevel.none:
        return None
    return compute_importance(
        old_logprobs,
        batch.rollout_logprobs,
        mask,
        batch.cu_seqlens,
        level=correction.level.value,
        bound=correction.bound.value,
        lower=correction.lower,
        upper=correction.upper,
    )


def _describe_scores(
    evidence: Evidence, batch: PackedBatch, coefficients: Coefficients, cost_limit: float
) -> dict[str, float]:
    """Groups, greedy answers and costs, where there are any."""
    kept = ~evidence.is_failed
    metrics: dict[str, float] = {}
    groups = summarise_groups(evidence.rewards, batch.group, evidence.is_failed)
    if groups.count.numel() < batch.num_sequences:
        metrics["critic/flat_group_share"] = groups.flat_share
        metrics["critic/skipped_groups"] = float(groups.num_skipped)
    if evidence.greedy_scores is not None:
        metrics["critic/greedy_score/mean"] = masked_mean(evidence.greedy_scores, kept)
    if evidence.costs is not None and bool(kept.any()):
        metrics |= describe("cost", evidence.costs[kept])
        metrics["lagrange/multiplier"] = coefficients.multiplier
        metrics["lagrange/cost_limit"] = cost_limit
    return metrics


def describe_critic(name: str, values: Tensor | None, returns: Tensor | None, mask: Tensor) -> dict[str, float]:
    """What a critic said before the update, and how much of its targets that explains; nothing without a critic."""
    if values is None or returns is None:
        return {}
    values, returns = values[mask], returns[mask]
    metrics = describe(f"{name}/values", values) | describe(f"{name}/returns", returns)
    return metrics | {f"{name}/vf_explained_var": explained_variance(values, returns)}


def sum_answers(per_token: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B]: numbers [T] of tokens summed over each sequence."""
    owner = sequence_of_token(cu_seqlens, per_token.numel())
    return per_token.new_zeros(cu_seqlens.numel() - 1).index_add(0, owner, per_token)


def describe(name: str, values: Tensor) -> dict[str, float]:
    """Mean, largest and smallest of some numbers; nothing for none."""
    if values.numel() == 0:
        return {}
    return {
        f"{name}/mean": float(values.double().mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Mean over the mask; 0 for an empty one."""
    return float(values[mask].double().mean()) if bool(mask.any()) else 0.0


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 = the critic knows everything, 0 = as good as a constant."""
    if returns.numel() < 2 or float(returns.var()) == 0.0:
        return 0.0
    return float(1.0 - (returns - values).var() / returns.var())
