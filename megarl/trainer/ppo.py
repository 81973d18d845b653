"""PPO's arithmetic between the forward passes and the updates: rewards per token, advantages, and the two objectives.

    scores [B] ─ place ─ minus KL ──> rewards [T] ── GAE with values ──> advantages, returns [T] ── whiten
                                                  or group baseline (GRPO), without a critic

Every rank holds the whole batch and computes the same numbers, so statistics over the batch need no collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.advantages import compute_group_advantages, place_rewards
from megarl.algo.kl import compute_kl, next_kl_coef, subtract_kl
from megarl.algo.objective import policy_objective, value_objective
from megarl.algo.segments import mask_sequences
from megarl.config.schema import ActorConfig, AdvEstimator, AlgorithmConfig, CriticConfig, KLController
from megarl.models.forward import compute_logprobs_of_logits, compute_values, run_policy_head
from megarl.models.micro_batch import MicroBatch
from megarl.ops.gae import gae
from megarl.ops.moments import whiten
from megarl.ops.policy_head import TokenLoss
from megarl.records import PackedBatch, Scores
from megarl.trainer.roles import Role
from megarl.trainer.update import Objective, TokenWeights


@dataclass(frozen=True)
class Judged:
    """A batch with everything the losses need. `mask` [T] bool: policy tokens of answers that have a reward."""

    scores: Scores
    mask: Tensor
    metrics: dict[str, float]


def judge(
    algorithm: AlgorithmConfig,
    batch: PackedBatch,
    rewards: Tensor,
    is_failed: Tensor,
    *,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    values: Tensor | None,
    kl_coef: float,
) -> Judged:
    """Turns scores of answers into advantages of tokens.

    Args:
        rewards: [B] fp32, one score an answer.
        is_failed: [B] bool, answers without a score: they leave the batch, they do not count as zero.
        old_logprobs, ref_logprobs, values: [T] fp32; reference and values where the algorithm needs them.
        kl_coef: weight of the KL in the reward.
    """
    mask = mask_sequences(batch.response_mask, ~is_failed, batch.cu_seqlens)
    metrics: dict[str, float] = {}
    token_rewards = place_rewards(rewards, mask, batch.cu_seqlens)
    if ref_logprobs is not None:
        kl = compute_kl(old_logprobs, ref_logprobs, algorithm.kl_penalty.value)
        metrics["actor/reward_kl_penalty"] = masked_mean(kl, mask)
        if algorithm.use_kl_in_reward:
            token_rewards = subtract_kl(token_rewards, kl, mask, kl_coef)
            metrics["actor/reward_kl_penalty_coeff"] = kl_coef
    returns = None
    if algorithm.adv_estimator is AdvEstimator.gae:
        assert values is not None, "GAE needs values"
        advantages, returns = gae(token_rewards, values, mask, batch.cu_seqlens, algorithm.gamma, algorithm.lam)
        metrics |= describe("critic/values", values[mask]) | describe("critic/returns", returns[mask])
        metrics["critic/vf_explained_var"] = explained_variance(values[mask], returns[mask])
    else:
        advantages, flat_share, num_skipped = compute_group_advantages(
            rewards, batch.group, is_failed, mask, batch.cu_seqlens, algorithm.norm_adv_by_std
        )
        metrics["critic/flat_group_share"] = flat_share
        metrics["critic/skipped_groups"] = float(num_skipped)
    metrics |= describe("critic/advantages", advantages[mask])
    if algorithm.adv_estimator is AdvEstimator.gae and algorithm.whiten_advantages:
        advantages = whiten(advantages, mask)
    metrics |= describe("critic/score", rewards[~is_failed])
    per_answer = torch.zeros(batch.num_sequences).index_add(
        0, torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths), token_rewards.where(mask, 0.0)
    )
    metrics |= describe("critic/rewards", per_answer[~is_failed])
    scores = Scores(old_logprobs, ref_logprobs, values, token_rewards, advantages, returns)
    return Judged(scores, mask, metrics)


def build_actor_objective(
    role: Role, options: ActorConfig, temperature: float, scores: Scores, fused: bool = True
) -> Objective:
    """The clipped policy loss with entropy bonus and KL loss, as a function of the last stage's hidden states.

    Args:
        fused: the head computes the loss and its gradients chunk by chunk; else all logits are held at once.
    """

    def objective(hidden: Tensor, micro: MicroBatch, weights: TokenWeights) -> tuple[Tensor, Mapping[str, Tensor]]:
        token_loss = _build_token_loss(options, scores, micro, weights)
        arguments = role.model, hidden, micro, role.groups, temperature, role.num_ids
        if fused:
            return run_policy_head(*arguments, token_loss)
        return token_loss(*compute_logprobs_of_logits(*arguments), slice(None))

    return objective


def _build_token_loss(options: ActorConfig, scores: Scores, micro: MicroBatch, weights: TokenWeights) -> TokenLoss:
    """`policy_objective` of some of the micro-batch's policy tokens."""
    assert scores.old_logprobs is not None and scores.advantages is not None
    pick, where = micro.token_index, micro.targets.device
    old_logprobs, advantages = scores.old_logprobs[pick].to(where), scores.advantages[pick].to(where)
    loss_weights, mask = weights.loss[pick].to(where), weights.mask[pick].to(where)
    metric_weights = weights.mean[pick].to(where)
    ref_logprobs = None
    if scores.ref_logprobs is not None and options.use_kl_loss:
        ref_logprobs = scores.ref_logprobs[pick].to(where)

    def token_loss(logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
        return policy_objective(
            logprobs,
            entropy,
            old_logprobs[part],
            advantages[part],
            loss_weights[part],
            mask[part],
            clip_low=options.clip_ratio if options.clip_ratio_low is None else options.clip_ratio_low,
            clip_high=options.clip_ratio if options.clip_ratio_high is None else options.clip_ratio_high,
            clip_c=options.clip_ratio_c,
            entropy_coeff=options.entropy_coeff,
            ref_logprobs=None if ref_logprobs is None else ref_logprobs[part],
            kl_loss_coef=options.kl_loss_coef if options.use_kl_loss else 0.0,
            kl_loss_type=options.kl_loss_type.value,
            metric_weights=metric_weights[part],
        )

    return token_loss


def build_critic_objective(role: Role, options: CriticConfig, scores: Scores) -> Objective:
    """The clipped value loss, as a function of the last stage's hidden states."""
    assert scores.values is not None and scores.returns is not None
    old_values, returns = scores.values, scores.returns

    def objective(hidden: Tensor, micro: MicroBatch, weights: TokenWeights) -> tuple[Tensor, Mapping[str, Tensor]]:
        values = compute_values(role.model, hidden, micro, role.groups)
        pick, where = micro.token_index, values.device
        return value_objective(
            values,
            old_values[pick].to(where),
            returns[pick].to(where),
            weights.loss[pick].to(where),
            weights.mask[pick].to(where),
            clip_range=options.cliprange_value,
            metric_weights=weights.mean[pick].to(where),
        )

    return objective


def advance_kl_coef(
    algorithm: AlgorithmConfig, kl_coef: float, metrics: Mapping[str, float], num_answers: int
) -> float:
    """The KL coefficient of the next step."""
    control = algorithm.kl_ctrl
    if control.type is not KLController.adaptive or "actor/reward_kl_penalty" not in metrics:
        return kl_coef
    kl = metrics["actor/reward_kl_penalty"]
    return next_kl_coef(kl_coef, kl, control.target_kl, control.horizon, num_answers)


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
