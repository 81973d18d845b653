"""Forward-only passes: log-probs of actor and reference, values of the critic, for every policy token of a batch.

Each data-parallel replica of the role takes its share of the sequences, its last stage computes the scores, and all
ranks of the job get all of them. A rank outside the role only receives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl import device
from megarl.models.forward import compute_logprobs, compute_values, hidden_shape, run_stage
from megarl.models.micro_batch import MicroBatch, build_micro_batch, plan_replicas
from megarl.parallel.pipeline import run_pipeline
from megarl.parallel.schedule import plan_forward_only
from megarl.parallel.transfer import share_token_scores
from megarl.records import PackedBatch
from megarl.trainer.roles import Role

Score = Callable[[Tensor, MicroBatch], Tensor]


def annotate_logprobs(role: Role | None, batch: PackedBatch, temperature: float) -> Tensor:
    """[T] fp32 on every rank: the role's log-probs of the policy tokens at the sampling temperature."""

    def score(hidden: Tensor, micro: MicroBatch) -> Tensor:
        assert role is not None
        return compute_logprobs(role.model, hidden, micro, role.groups, temperature, role.num_ids)[0]

    return _annotate(role, batch, score)


def annotate_values(role: Role | None, batch: PackedBatch) -> Tensor:
    """[T] fp32 on every rank: the critic's values of the states before the policy tokens."""

    def score(hidden: Tensor, micro: MicroBatch) -> Tensor:
        assert role is not None
        return compute_values(role.model, hidden, micro, role.groups)

    return _annotate(role, batch, score)


@torch.no_grad()
def _annotate(role: Role | None, batch: PackedBatch, score: Score) -> Tensor:
    own, index = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    if role is not None:
        scores, indices = _run_forward(role, batch, score)
        at = role.groups.at
        if scores and at.tp == 0:
            own, index = torch.cat(scores), torch.cat(indices)
    return share_token_scores({"scores": own}, index, batch.num_tokens)["scores"]


def _run_forward(role: Role, batch: PackedBatch, score: Score) -> tuple[list[Tensor], list[Tensor]]:
    """Scores and their packed positions by micro-batch; empty except on the last stage."""
    topology, at = role.groups.topology, role.groups.at
    everything = range(batch.num_sequences)
    plans = plan_replicas(batch, everything, topology.dp_size, role.max_tokens, role.max_sequences)
    micros = [build_micro_batch(batch, rows, topology.tp_size) for rows in plans[at.dp]]
    scores: list[Tensor] = []
    indices: list[Tensor] = []

    def forward(m: int, received: Tensor | None) -> Tensor:
        hidden = run_stage(role.model, micros[m], received)
        if role.groups.is_last_stage:
            scores.append(score(hidden, micros[m]).cpu())
            indices.append(micros[m].token_index)
        return hidden

    was_training = role.model.training
    role.model.eval()
    with device.megatron_scope():
        run_pipeline(
            plan_forward_only(len(micros)),
            forward,
            [hidden_shape(micro, role.groups, role.spec.hidden_size) for micro in micros],
            role.dtype,
            role.groups,
        )
    role.model.train(was_training)
    return scores, indices
