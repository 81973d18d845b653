"""The update of one role, or of several at once: mini-batches, each split into micro-batches over the replicas, one
optimizer step each, all in one schedule.

    mini-batches of each role ──> micro-batches ──> schedule (picked for their sizes and the measured costs) ──> run

The weight of every token in the loss is known before the first backward (`compute_token_weights` over the whole
mini-batch), gradients are added up in the order of the micro-batches, never averaged. So the step is the same for every
way to split the batch and for every schedule. Roles that share their ranks and number of stages run fused: the update
of one fills the gaps of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import device
from megarl.algo.reduce import AggregationMode, compute_token_weights
from megarl.models.forward import hidden_shape, run_stage
from megarl.models.micro_batch import MicroBatch, build_micro_batch, plan_replicas
from megarl.parallel.picker import Choice, pick_update
from megarl.parallel.pipeline import StageModel, run_instructions
from megarl.parallel.schedule import ModelPlan
from megarl.records import PackedBatch
from megarl.trainer.measured_costs import PipelineRun, Profile
from megarl.trainer.optim import apply_step, find_non_finite, reduce_gradients
from megarl.trainer.roles import Role

Objective = Callable[[Tensor, MicroBatch, "TokenWeights"], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class TokenWeights:
    """Weights over the whole `PackedBatch` for one mini-batch, 0 outside it.

    `loss` [T] fp32: sum(loss * per-token loss) is the mini-batch's loss. `mean` [T] fp32: token-mean weights, for
    statistics. `mask` [T] bool: the tokens that count.
    """

    loss: Tensor
    mean: Tensor
    mask: Tensor


@dataclass(frozen=True)
class UpdateResult:
    """What an update did: statistics averaged over its mini-batches, and how many steps were left out as not finite.

    `sources`: for each step left out, where the first numbers that are not finite came from.
    """

    stats: dict[str, float]
    num_steps: int
    num_skipped: int
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """What one role is to learn from a batch.

    Attributes:
        mini_batches: rows of each optimizer step.
        objective: last stage only: (hidden states, micro-batch, weights) -> loss (a share of the mini-batch's), stats.
        mode, horizon: how token losses become one number, see `compute_token_weights`.
        first_step: optimizer steps taken before, for the learning rate.
        together: so many neighbours of a mini-batch's rows share a micro-batch, see `plan_replicas`.
    """

    role: Role
    mini_batches: Sequence[Sequence[int]]
    objective: Objective
    mode: AggregationMode
    first_step: int
    horizon: int | None = None
    together: int = 1


@dataclass(frozen=True)
class PipelineOptions:
    """How schedules are chosen: see `pick_update`."""

    choice: Choice = "auto"
    max_live: float | None = None


@dataclass
class _Progress:
    """A role's work while it runs: its micro-batches, and what its mini-batches have given so far."""

    task: Task
    micros: list[MicroBatch]
    work: tuple[float, ...]
    mini_batch_of: list[int]
    weights: list[TokenWeights]
    totals: list[dict[str, float]]
    sums: dict[str, float] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)


def weigh_tokens(
    batch: PackedBatch, mask: Tensor, rows: Sequence[int], mode: AggregationMode, horizon: int | None = None
) -> TokenWeights:
    """Token weights of the mini-batch made of the sequences `rows`.

    Args:
        mask: [T] bool, the policy tokens that count (rows without a reward taken out).
        mode, horizon: see `compute_token_weights`.
    """
    in_batch = torch.zeros_like(mask)
    in_batch[batch.token_rows(rows)] = True
    counted = mask & in_batch
    mean = compute_token_weights(counted, batch.cu_seqlens, "token-mean")
    loss = mean if mode == "token-mean" else compute_token_weights(counted, batch.cu_seqlens, mode, horizon)
    return TokenWeights(loss=loss, mean=mean, mask=counted)


def update_role(
    role: Role,
    batch: PackedBatch,
    mask: Tensor,
    mini_batches: Sequence[Sequence[int]],
    objective: Objective,
    mode: AggregationMode,
    first_step: int,
    options: PipelineOptions | None = None,
) -> UpdateResult:
    """`update_roles` of one role."""
    task = Task(role, mini_batches, objective, mode, first_step)
    return update_roles([task], batch, mask, options or PipelineOptions(), Profile())[0][role.name]


def update_roles(
    tasks: Sequence[Task], batch: PackedBatch, mask: Tensor, options: PipelineOptions, profile: Profile
) -> tuple[dict[str, UpdateResult], PipelineRun]:
    """Trains roles on a batch, in one schedule; all ranks of the roles call it with the same arguments.

    Args:
        tasks: of roles on the same ranks with the same number of stages.
        mask: [T] bool, tokens that count.
        options: how the schedule is chosen.
        profile: costs measured so far.

    Returns:
        By role, statistics that are the same on each of its ranks; and how the schedule ran on this rank.
    """
    progress = {task.role.name: _prepare(task, batch, mask) for task in tasks}
    run = _run(progress, options, profile, steps=True)
    results: dict[str, UpdateResult] = {}
    for name, state in progress.items():
        count = max(1, len(state.task.mini_batches))
        stats = {key: value / count for key, value in state.sums.items()}
        results[name] = UpdateResult(stats, len(state.task.mini_batches), len(state.sources), tuple(state.sources))
    return results, run


def compute_gradients(
    role: Role, batch: PackedBatch, rows: Sequence[int], objective: Objective, weights: TokenWeights
) -> dict[str, float]:
    """Forward and backward of one mini-batch; afterwards the reduced gradients lie in the role's buffers.

    Returns:
        The statistics of the objective, summed over the mini-batch.
    """
    state = _prepare(Task(role, [rows], objective, "token-mean", 0), batch, weights.mask)
    state.weights = [weights]
    _run({role.name: state}, PipelineOptions(), Profile(), steps=False)
    return _finish_gradients(state)


def compute_gradients_together(
    tasks: Sequence[Task], batch: PackedBatch, mask: Tensor, options: PipelineOptions
) -> dict[str, dict[str, float]]:
    """`compute_gradients` of several roles in one schedule, one mini-batch each. Returns statistics by role."""
    progress = {task.role.name: _prepare(task, batch, mask) for task in tasks}
    _run(progress, options, Profile(), steps=False)
    return {name: _finish_gradients(state) for name, state in progress.items()}


def _finish_gradients(state: _Progress) -> dict[str, float]:
    role = state.task.role
    assert role.training is not None
    reduce_gradients(role.training.chunks, role.groups)
    return _join_stats(role, state.totals[0])


def _prepare(task: Task, batch: PackedBatch, mask: Tensor) -> _Progress:
    role = task.role
    assert role.training is not None, f"role {role.name} does not learn"
    topology, at = role.groups.topology, role.groups.at
    lengths = batch.lengths.tolist()
    micros: list[MicroBatch] = []
    work: list[float] = []
    mini_batch_of: list[int] = []
    for number, rows in enumerate(task.mini_batches):
        plans = plan_replicas(batch, rows, topology.dp_size, role.max_tokens, role.max_sequences, task.together)
        micros += [build_micro_batch(batch, part, topology.tp_size) for part in plans[at.dp]]
        mini_batch_of += [number] * len(plans[at.dp])
        # one schedule for all replicas: a micro-batch costs what it costs the replica where it is largest
        work += [
            max(1.0, *(float(sum(lengths[row] for row in part)) for part in parts))
            for parts in zip(*plans, strict=True)
        ]
    weights = [weigh_tokens(batch, mask, rows, task.mode, task.horizon) for rows in task.mini_batches]
    return _Progress(task, micros, tuple(work), mini_batch_of, weights, [{} for _ in task.mini_batches])


def _run(progress: Mapping[str, _Progress], options: PipelineOptions, profile: Profile, steps: bool) -> PipelineRun:
    """Picks a schedule for this work and runs this rank's part of it."""
    plans: list[ModelPlan] = []
    work = {name: state.work for name, state in progress.items()}
    for name, state in progress.items():
        role, task = state.task.role, state.task
        counts = tuple(state.mini_batch_of.count(number) for number in range(len(task.mini_batches)))
        plans.append(ModelPlan(name, role.groups.topology.chunk_stages, counts, steps=steps))
    picked = pick_update(options.choice, plans, profile.costs(plans, work), options.max_live)
    splits = picked.schedule.models[0].splits
    models = {name: _build_stage_model(state, splits, steps) for name, state in progress.items()}
    roles = [state.task.role for state in progress.values()]
    for role in roles:
        assert role.training is not None
        role.training.problems.clear()
        for chunk in role.training.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
    stage = roles[0].groups.at.pp
    begin = time.perf_counter()
    with device.megatron_scope():
        spans = run_instructions(picked.schedule, stage, models)
    seconds = time.perf_counter() - begin
    for role in roles:
        for chunk in role.chunks:
            chunk.put_aside.is_open = False
    return PipelineRun(picked, stage, tuple(spans), work, seconds)


def _build_stage_model(state: _Progress, splits: bool, steps: bool) -> StageModel:
    """What the executor needs of a role that learns."""
    role = state.task.role
    assert role.training is not None
    chunks = dict(zip(role.groups.chunks, role.training.chunks, strict=True))
    aside = {chunk: module.put_aside for chunk, module in zip(role.groups.chunks, role.chunks, strict=True)}
    for each in aside.values():
        each.is_open = splits
    is_last = role.groups.topology.num_chunks - 1

    def forward(chunk: int, m: int, received: Tensor | None) -> Tensor:
        hidden = run_stage(chunks[chunk], state.micros[m], received)
        if chunk != is_last:
            return hidden
        if state.micros[m].targets.numel() == 0:
            return hidden.float().sum() * 0.0  # nothing to learn here, yet the pipeline needs a gradient to send back
        number = state.mini_batch_of[m]
        loss, stats = state.task.objective(hidden, state.micros[m], state.weights[number])
        for name, value in stats.items():
            state.totals[number][name] = state.totals[number].get(name, 0.0) + float(value)
        return loss

    def sync(chunk: int) -> None:
        assert role.training is not None
        role.training.problems.extend(find_non_finite([chunks[chunk]]))
        chunks[chunk].start_grad_sync()

    def step(number: int) -> None:
        _take_step(state, number)
        if number + 1 < len(state.task.mini_batches):
            for chunk in chunks.values():
                chunk.zero_grad_buffer()

    return StageModel(
        forward=forward,
        shapes=[hidden_shape(micro, role.groups, role.spec.hidden_size) for micro in state.micros],
        dtype=role.dtype,
        groups=role.groups,
        take_weight_gradients=lambda chunk: aside[chunk].take(),
        sync=sync,
        step=step if steps else None,
    )


def _take_step(state: _Progress, number: int) -> None:
    """The optimizer step after a mini-batch; all ranks of the role come here together."""
    role, task = state.task.role, state.task
    assert role.training is not None
    waiting = [
        chunk for chunk in role.training.chunks if all(g.grad_reduce_handle is None for g in chunk.bucket_groups)
    ]
    role.training.problems.extend(find_non_finite(waiting))
    reduce_gradients(role.training.chunks, role.groups)
    stats = _join_stats(role, state.totals[number])
    lr = role.training.schedule.at(task.first_step + number)
    result = apply_step(role.training.optimizer, lr, role.training.adam)
    if not result.was_applied:
        state.sources.append(name_sources(role))
    role.training.problems.clear()
    for name, value in {**stats, f"{role.name}/grad_norm": result.grad_norm, f"{role.name}/lr": lr}.items():
        state.sums[name] = state.sums.get(name, 0.0) + value


def _join_stats(role: Role, totals: dict[str, float]) -> dict[str, float]:
    """Sums over the replicas, known on every rank of the role. Names come from the last stage of replica 0."""
    last = role.groups.topology.rank_at(tp=0, dp=0, pp=role.groups.topology.last_stage)
    names: list[list[str]] = [sorted(totals)]
    dist.broadcast_object_list(names, src=last, group=role.groups.everyone)
    counts = role.groups.is_last_stage and role.groups.at.tp == 0
    own = [totals.get(name, 0.0) if counts else 0.0 for name in names[0]]
    vector = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(vector, group=role.groups.everyone)
    return dict(zip(names[0], vector.tolist(), strict=True))


def name_sources(role: Role) -> str:
    """Which ranks had gradients that are not finite before ranks added them up; a collective of the role."""
    assert role.training is not None
    own = [f"rank {dist.get_rank()} ({role.groups.at}): {problem}" for problem in dict.fromkeys(role.training.problems)]
    everywhere: list[list[str]] = [[] for _ in role.groups.topology.ranks]
    dist.all_gather_object(everywhere, own, group=role.groups.everyone)
    named = [problem for each in everywhere for problem in each]
    return f"{role.name}: {'; '.join(named) or 'every rank was finite, their sum is not'}"
