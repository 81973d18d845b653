"""The objectives of actor and critics: from the last stage's hidden states to a loss and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.losses import (
    LossInputs,
    TokenLosses,
    cispo_loss,
    clip_loss,
    gmpo_loss,
    gspo_loss,
    pg_loss,
)
from megarl.algo.objective import policy_objective, value_objective
from megarl.algo.segments import sequence_of_token
from megarl.config.schema import ActorConfig, CriticConfig
from megarl.models.forward import compute_logprobs_of_logits, compute_values, run_policy_head
from megarl.models.micro_batch import MicroBatch
from megarl.ops.policy_head import TokenLoss
from megarl.records import PackedBatch, Scores
from megarl.trainer.roles import Role
from megarl.trainer.update import Objective, TokenWeights

PolicyLossFunction = Callable[[LossInputs], TokenLosses]

POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "clip": clip_loss,
    "pg": pg_loss,
    "cispo": cispo_loss,
    "gspo": gspo_loss,
    "gmpo": gmpo_loss,
}


@dataclass(frozen=True)
class PolicyLossRule:
    """A policy loss; `needs_whole`: it looks at all tokens of an answer together."""

    function: PolicyLossFunction
    needs_whole: bool


def wrap_user_loss(function: Callable[[LossInputs], Tensor | TokenLosses], spec: str) -> PolicyLossRule:
    """A user's function (`algorithm.loss`), which may return the bare loss of each token.

    Raises:
        ValueError: from the loss: something else than [K] numbers came back.
    """

    def loss(x: LossInputs) -> TokenLosses:
        result = function(x)
        nothing = torch.zeros_like(x.mask)
        found = result if isinstance(result, TokenLosses) else TokenLosses(result, nothing, nothing)
        if not isinstance(found.loss, Tensor) or found.loss.shape != x.mask.shape:
            shape = list(found.loss.shape) if isinstance(found.loss, Tensor) else type(found.loss).__name__
            raise ValueError(f"algorithm.loss={spec} returned {shape}; it must be a tensor {list(x.mask.shape)}")
        return found

    return PolicyLossRule(loss, needs_whole=True)


def build_actor_objective(
    role: Role,
    options: ActorConfig,
    temperature: float,
    batch: PackedBatch,
    scores: Scores,
    rule: PolicyLossRule,
    fused: bool = True,
) -> Objective:
    """The policy loss with entropy bonus and KL loss, as a function of the last stage's hidden states.

    Args:
        rule: the policy loss.
        fused: the head computes the loss and its gradients chunk by chunk; else all logits are held at once.
    """

    def objective(hidden: Tensor, micro: MicroBatch, weights: TokenWeights) -> tuple[Tensor, Mapping[str, Tensor]]:
        token_loss = _build_token_loss(options, batch, scores, micro, weights, rule)
        arguments = role.model, hidden, micro, role.groups, temperature, role.num_ids
        if fused:
            return run_policy_head(*arguments, token_loss, whole=rule.needs_whole)
        return token_loss(*compute_logprobs_of_logits(*arguments), slice(None))

    return objective


def _build_token_loss(
    options: ActorConfig,
    batch: PackedBatch,
    scores: Scores,
    micro: MicroBatch,
    weights: TokenWeights,
    rule: PolicyLossRule,
) -> TokenLoss:
    """`policy_objective` of some of the micro-batch's policy tokens."""
    assert scores.old_logprobs is not None and scores.advantages is not None

    def read(x: Tensor) -> Tensor:
        return x[micro.token_index].to(micro.targets.device)

    old_logprobs, advantages = read(scores.old_logprobs), read(scores.advantages)
    loss_weights, metric_weights, mask = read(weights.loss), read(weights.mean), read(weights.mask)
    ref_logprobs = read(scores.ref_logprobs) if scores.ref_logprobs is not None and options.use_kl_loss else None
    importance = None if scores.importance is None else read(scores.importance)
    sequence, num_sequences = None, 0
    if rule.needs_whole:
        owners = sequence_of_token(batch.cu_seqlens, batch.num_tokens)[micro.token_index]
        here, sequence = owners.unique(return_inverse=True)
        sequence, num_sequences = sequence.to(micro.targets.device), here.numel()

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
            policy_loss=rule.function,
            importance=None if importance is None else importance[part],
            sequence=None if sequence is None else sequence[part],
            num_sequences=num_sequences,
        )

    return token_loss


def build_critic_objective(role: Role, options: CriticConfig, old_values: Tensor, returns: Tensor) -> Objective:
    """The clipped value loss, as a function of the last stage's hidden states.

    Args:
        old_values, returns: [T] fp32, over the whole batch.

    Returns:
        An objective whose statistics are named after the role: `critic/vf_loss`, `cost_critic/vf_loss`.
    """

    def objective(hidden: Tensor, micro: MicroBatch, weights: TokenWeights) -> tuple[Tensor, Mapping[str, Tensor]]:
        values = compute_values(role.model, hidden, micro, role.groups)
        pick, where = micro.token_index, values.device
        loss, stats = value_objective(
            values,
            old_values[pick].to(where),
            returns[pick].to(where),
            weights.loss[pick].to(where),
            weights.mask[pick].to(where),
            clip_range=options.cliprange_value,
            metric_weights=weights.mean[pick].to(where),
        )
        return loss, {f"{role.name}/{name.removeprefix('critic/')}": value for name, value in stats.items()}

    return objective
