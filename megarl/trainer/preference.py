"""Training on preferences: the losses as functions of hidden states, one optimizer step a batch, and the same numbers
without a gradient for held-out pairs.

    answers packed, pairs as neighbours ──reference──> ref log-probs [T] ─┐
    micro-batch with whole pairs ──policy──> log-probs of all its tokens ─┴─> loss of its pairs ──> gradient, step
    one more token behind each answer ──value head──> a score of each answer ──> Bradley-Terry     (a reward model)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.algorithms import PREFERENCES
from megarl.algo.preference import (
    PairLosses,
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_baseline,
    kto_loss,
    simpo_loss,
    sum_by_sequence,
)
from megarl.algo.segments import sequence_of_token
from megarl.config.schema import PreferenceConfig, PreferenceLoss
from megarl.models.forward import compute_values, run_policy_head
from megarl.models.micro_batch import MicroBatch
from megarl.records import PackedBatch
from megarl.trainer.annotate import annotate_logprobs, annotate_values
from megarl.trainer.measured_costs import PipelineRun, Profile
from megarl.trainer.roles import Role
from megarl.trainer.update import Objective, PipelineOptions, Task, TokenWeights, UpdateResult, update_roles


@dataclass(frozen=True)
class Preferences:
    """B judged answers and what their loss needs; for a reward model with a token put behind each sequence, from whose
    state the score is read (`append_end_tokens`).

    `ref_logprobs` [T] fp32 or None. `is_desirable` [B] bool. `baseline`: KTO's estimate of the KL.
    """

    batch: PackedBatch
    is_desirable: Tensor
    ref_logprobs: Tensor | None = None
    baseline: float = 0.0


def estimate_baseline(actor: Role | None, ref: Role | None, mismatched: PackedBatch) -> float:
    """KTO's baseline from answers to other prompts; a collective of the world, the same on every rank."""
    log_ratios = annotate_logprobs(actor, mismatched, 1.0) - annotate_logprobs(ref, mismatched, 1.0)
    return kto_baseline(_sum_answers(log_ratios, mismatched))


def update_on_preferences(
    role: Role,
    options: PreferenceConfig,
    data: Preferences,
    step: int,
    pipeline: PipelineOptions,
    profile: Profile,
) -> tuple[UpdateResult, PipelineRun]:
    """One optimizer step on a whole batch; all ranks of the role call it with the same arguments.

    Args:
        step: optimizer steps taken before, for the learning rate.
        pipeline, profile: see `update_roles`.
    """
    batch, facts = data.batch, PREFERENCES[options.loss.value]
    rows = list(range(batch.num_sequences))
    objective = build_preference_objective(role, options, data)
    task = Task(role, [rows], objective, "token-mean", step, together=2 if facts.is_pairwise else 1)
    results, run = update_roles([task], batch, batch.response_mask, pipeline, profile)
    done = results[role.name]
    stats = {name.replace(f"{role.name}/", "preference/", 1): value for name, value in done.stats.items()}
    return dataclasses.replace(done, stats=stats), run


def build_preference_objective(role: Role, options: PreferenceConfig, data: Preferences) -> Objective:
    """The loss of a micro-batch's answers, a share of the mean over the batch; whole pairs in each micro-batch."""
    count = data.batch.num_sequences // (2 if PREFERENCES[options.loss.value].is_pairwise else 1)
    owner = sequence_of_token(data.batch.cu_seqlens, data.batch.num_tokens)
    ends = data.batch.cu_seqlens[1:] - 1

    def objective(hidden: Tensor, micro: MicroBatch, weights: TokenWeights) -> tuple[Tensor, Mapping[str, Tensor]]:
        rows, place = owner[micro.token_index].unique(return_inverse=True)
        if options.loss is PreferenceLoss.reward_model:
            at_end = (micro.token_index == ends[owner[micro.token_index]]).nonzero().flatten()
            order = at_end[owner[micro.token_index[at_end]].argsort()]
            values = compute_values(role.model, hidden, micro, role.groups)
            scores = values[order.to(values.device)]
            return _weigh(bradley_terry_loss(scores, options.center_coeff), count)
        where = micro.targets.device
        sequence, mask = place.to(where), torch.ones_like(micro.targets, dtype=torch.bool)
        ref = 0.0 if data.ref_logprobs is None else data.ref_logprobs[micro.token_index].to(where)

        def loss(logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
            mean = options.loss in (PreferenceLoss.ipo, PreferenceLoss.simpo)
            per_answer = sum_by_sequence(logprobs - ref, mask, sequence, rows.numel(), mean)
            return score_answers(options, per_answer, data.is_desirable[rows].to(where), data.baseline, count)

        arguments = role.model, hidden, micro, role.groups, 1.0, role.num_ids
        return run_policy_head(*arguments, loss, whole=True)

    return objective


def score_answers(
    options: PreferenceConfig, per_answer: Tensor, is_desirable: Tensor, baseline: float, count: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and statistics of some answers, as shares of the mean over `count` pairs (KTO: answers).

    Args:
        per_answer: [n] log-ratios of policy to reference; ipo: averaged over tokens; simpo: averaged log-probs.
        is_desirable: [n] bool.
    """
    if options.loss is PreferenceLoss.kto:
        weights = options.desirable_weight, options.undesirable_weight
        loss = kto_loss(per_answer, is_desirable, baseline, options.beta, *weights)
        right = (per_answer.detach() > baseline) == is_desirable
        return loss.sum() / count, {
            "preference/loss": (loss.sum() / count).detach(),
            "preference/accuracy": right.double().sum() / count,
        }
    if options.loss is PreferenceLoss.dpo:
        return _weigh(dpo_loss(per_answer, options.beta, options.label_smoothing), count)
    if options.loss is PreferenceLoss.ipo:
        return _weigh(ipo_loss(per_answer, options.beta), count)
    assert options.loss is PreferenceLoss.simpo, f"no preference loss {options.loss}"
    return _weigh(simpo_loss(per_answer, options.beta, options.simpo_gamma, options.label_smoothing), count)


@torch.no_grad()
def evaluate_preferences(role: Role | None, options: PreferenceConfig, data: Preferences) -> dict[str, float]:
    """The statistics of `update_on_preferences` without learning; a collective of the world, the same on every rank."""
    batch, facts = data.batch, PREFERENCES[options.loss.value]
    count = batch.num_sequences // (2 if facts.is_pairwise else 1)
    if options.loss is PreferenceLoss.reward_model:
        scores = annotate_values(role, batch)[batch.cu_seqlens[1:] - 1]
        _, stats = _weigh(bradley_terry_loss(scores, options.center_coeff), count)
    else:
        logprobs = annotate_logprobs(role, batch, 1.0)
        ref = 0.0 if data.ref_logprobs is None else data.ref_logprobs
        mean = options.loss in (PreferenceLoss.ipo, PreferenceLoss.simpo)
        per_answer = _sum_answers(logprobs - ref, batch, mean)
        _, stats = score_answers(options, per_answer, data.is_desirable, data.baseline, count)
    return {name: float(value) for name, value in stats.items()}


def _sum_answers(per_token: Tensor, batch: PackedBatch, mean: bool = False) -> Tensor:
    owner = sequence_of_token(batch.cu_seqlens, batch.num_tokens)
    return sum_by_sequence(per_token, batch.response_mask, owner, batch.num_sequences, mean)


def _weigh(losses: PairLosses, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The pairs' share of the mean over `count` pairs."""
    loss = losses.loss.sum() / count
    stats = {
        "preference/loss": loss.detach(),
        "preference/accuracy": (losses.chosen > losses.rejected).double().sum() / count,
        "preference/chosen": losses.chosen.double().sum() / count,
        "preference/rejected": losses.rejected.double().sum() / count,
        "preference/margin": (losses.chosen - losses.rejected).double().sum() / count,
    }
    return loss, stats
