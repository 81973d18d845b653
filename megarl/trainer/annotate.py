"""Forward-only passes: log-probs of actor and reference, values of the critic, for every policy token of a batch;
scores of reward and cost models, one for each sequence.

    passes on the same ranks with as many stages ──> one stream of micro-batches, never drained between models

Each data-parallel replica of a role takes its share of the sequences, its last stage computes the scores, and all
ranks of the job get all of them. A rank outside the role only receives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl import device
from megarl.models.forward import compute_logprobs, compute_values, hidden_shape, run_stage
from megarl.models.micro_batch import MicroBatch, build_micro_batch, plan_replicas
from megarl.parallel.picker import pick_stream
from megarl.parallel.pipeline import StageModel, run_instructions
from megarl.parallel.schedule import ModelPlan
from megarl.parallel.transfer import share_token_scores
from megarl.records import PackedBatch
from megarl.trainer.measured_costs import PipelineRun, Profile
from megarl.trainer.roles import Role

Score = Callable[[Tensor, MicroBatch], Tensor]


@dataclass(frozen=True)
class Pass:
    """One model's pass over a batch. `name`: of the scores; `role`: None on a rank outside of it; `score`: last stage's
    hidden states -> [K] scores of the micro-batch's policy tokens; `batch`: where it is another one than the others'.
    """

    name: str
    role: Role | None
    score: Score
    batch: PackedBatch | None = None


def logprob_pass(name: str, role: Role | None, temperature: float) -> Pass:
    """The role's log-probs of the policy tokens at the sampling temperature."""

    def score(hidden: Tensor, micro: MicroBatch) -> Tensor:
        assert role is not None
        return compute_logprobs(role.model, hidden, micro, role.groups, temperature, role.num_ids)[0]

    return Pass(name, role, score)


def value_pass(name: str, role: Role | None, batch: PackedBatch | None = None) -> Pass:
    """The critic's values of the states before the policy tokens."""

    def score(hidden: Tensor, micro: MicroBatch) -> Tensor:
        assert role is not None
        return compute_values(role.model, hidden, micro, role.groups)

    return Pass(name, role, score, batch)


@torch.no_grad()
def annotate(
    passes: Sequence[Pass], batch: PackedBatch, profile: Profile | None = None
) -> tuple[dict[str, Tensor], list[PipelineRun]]:
    """Runs passes over a batch; a collective of the world.

    Returns:
        By name of the pass, [T] fp32 scores of its batch on every rank, 0 for tokens that are not the policy's; and
        how the streams ran that this rank is part of.
    """
    runs: list[PipelineRun] = []
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {each.name: [] for each in passes}
    for stream in group_streams(passes):
        runs.append(_run_stream(stream, batch, profile or Profile(), parts))
    shared: dict[str, Tensor] = {}
    for each in passes:
        own, index = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
        if parts[each.name] and each.role is not None and each.role.groups.at.tp == 0:
            own, index = (torch.cat(tensors) for tensors in zip(*parts[each.name], strict=True))
        shared |= share_token_scores({each.name: own}, index, (each.batch or batch).num_tokens)
    return shared, runs


def annotate_logprobs(role: Role | None, batch: PackedBatch, temperature: float) -> Tensor:
    """[T] fp32 on every rank: the role's log-probs of the policy tokens at the sampling temperature."""
    return annotate([logprob_pass("logprobs", role, temperature)], batch)[0]["logprobs"]


def annotate_values(role: Role | None, batch: PackedBatch) -> Tensor:
    """[T] fp32 on every rank: the critic's values of the states before the policy tokens."""
    return annotate([value_pass("values", role)], batch)[0]["values"]


def annotate_sequence_scores(role: Role | None, batch: PackedBatch) -> Tensor:
    """[B] fp32 on every rank: what a reward or cost model gives each sequence, read at its last token.

    That is the value of the state after the last token: of the state before a token that is put behind each sequence.
    """
    longer = append_end_tokens(batch)
    return read_sequence_scores(annotate_values(role, longer), longer)


def read_sequence_scores(values: Tensor, longer: PackedBatch) -> Tensor:
    """[B]: the scores of sequences, of a model's values [T] on `append_end_tokens(batch)`."""
    return values[longer.cu_seqlens[1:] - 1]


def append_end_tokens(batch: PackedBatch) -> PackedBatch:
    """The batch with one more policy token, of id 0, behind each sequence: nothing reads the token itself.

    The other policy tokens keep their mask, so that answers still share their prompt.
    """
    ends = batch.cu_seqlens[1:]
    steps = torch.arange(batch.num_sequences + 1)

    def put_behind(values: Tensor, value: float) -> Tensor:
        longer = values.new_full((batch.num_tokens + batch.num_sequences,), value)
        is_new = torch.zeros(longer.numel(), dtype=torch.bool)
        is_new[ends + steps[:-1]] = True
        longer[~is_new] = values
        return longer

    return PackedBatch(
        tokens=put_behind(batch.tokens, 0),
        cu_seqlens=batch.cu_seqlens + steps,
        response_mask=put_behind(batch.response_mask, True),
        rollout_logprobs=put_behind(batch.rollout_logprobs, 0.0),
        group=batch.group,
        is_finished=batch.is_finished,
    )


@torch.no_grad()
def score_share(one: Pass, batch: PackedBatch) -> Tensor:
    """[T] fp32: one model's scores of a batch that this rank's replica has to itself; called by all its ranks.

    Only the rank of the head knows them; on the others the result is zero, as it is outside the policy tokens.
    """
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {one.name: []}
    _run_stream([one], batch, Profile(), parts, alone=True)
    found = torch.zeros(batch.num_tokens)
    for scores, index in parts[one.name]:
        found[index] = scores.float()
    return found


def group_streams(passes: Sequence[Pass]) -> list[list[Pass]]:
    """This rank's passes that run as one stream: on the same ranks, with as many stages and as many chunks on each."""
    streams: dict[tuple[tuple[int, ...], int, int], list[Pass]] = {}
    for each in passes:
        if each.role is not None:
            topology = each.role.groups.topology
            streams.setdefault((topology.ranks, topology.pp_size, topology.num_chunks), []).append(each)
    return list(streams.values())


def _run_stream(
    passes: Sequence[Pass],
    batch: PackedBatch,
    profile: Profile,
    parts: dict[str, list[tuple[Tensor, Tensor]]],
    alone: bool = False,
) -> PipelineRun:
    """Runs passes as one stream and adds (scores, positions) of this rank to `parts`.

    Args:
        batch: of the passes that have none of their own.
        alone: this replica takes the whole batch; else each takes its share.
    """
    plans: list[ModelPlan] = []
    models: dict[str, StageModel] = {}
    work: dict[str, tuple[float, ...]] = {}
    for each in passes:
        role = each.role
        assert role is not None, f"{each.name}: the ranks of a stream have all its roles"
        topology = role.groups.topology
        read = each.batch or batch
        lengths = read.lengths.tolist()
        num_shares = 1 if alone else topology.dp_size
        cuts = plan_replicas(read, range(read.num_sequences), num_shares, role.max_tokens, role.max_sequences)
        own = cuts[0 if alone else role.groups.at.dp]
        micros = [build_micro_batch(read, rows, topology.tp_size) for rows in own]
        plans.append(ModelPlan(each.name, topology.chunk_stages, (len(micros),), trains=False))
        work[each.name] = tuple(
            max(1.0, *(float(sum(lengths[row] for row in rows)) for rows in parts_of))
            for parts_of in zip(*cuts, strict=True)
        )
        models[each.name] = _build_stage_model(each, role, micros, parts[each.name])
    picked = pick_stream(plans, profile.costs(plans, work))
    roles = [each.role for each in passes if each.role is not None]
    was_training = [chunk.training for role in roles for chunk in role.chunks]
    for chunk in (chunk for role in roles for chunk in role.chunks):
        chunk.eval()
    begin = time.perf_counter()
    stage = roles[0].groups.at.pp
    with device.megatron_scope():
        spans = run_instructions(picked.schedule, stage, models)
    seconds = time.perf_counter() - begin
    for chunk, before in zip((chunk for role in roles for chunk in role.chunks), was_training, strict=True):
        chunk.train(before)
    return PipelineRun(picked, stage, tuple(spans), work, seconds)


def _build_stage_model(
    each: Pass, role: Role, micros: Sequence[MicroBatch], parts: list[tuple[Tensor, Tensor]]
) -> StageModel:
    chunks = dict(zip(role.groups.chunks, role.chunks, strict=True))

    def forward(chunk: int, m: int, received: Tensor | None) -> Tensor:
        hidden = run_stage(chunks[chunk], micros[m], received)
        if chunk == role.groups.topology.num_chunks - 1:
            parts.append((each.score(hidden, micros[m]).cpu(), micros[m].token_index))
        return hidden

    shapes = [hidden_shape(micro, role.groups, role.spec.hidden_size) for micro in micros]
    return StageModel(forward, shapes, role.dtype, role.groups)
