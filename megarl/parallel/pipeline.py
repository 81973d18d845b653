"""Runs one rank's list of pipeline instructions over one or several models: receive, compute, send.

    spans = run_instructions(schedule, stage, {"actor": actor_stage, "critic": critic_stage})

The lists are proved beforehand (`checker.py`), and the shapes that travel are known to every stage, so there is no
handshake. Receives are posted ahead of need, in the order in which the neighbour sends, and waited for by the
computation that uses them; sends are posted and never waited for before the end. Nothing here knows models: a
`StageModel` computes, the executor moves tensors, keeps the graph between forward and backward, and takes the time.

What is held: of a chunk's forward only its place in the autograd graph, so the sent tensor is freed once it has
left; the received input until its gradient is sent; weight gradients that were put aside until WGRAD.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megarl import device
from megarl.parallel.groups import RoleGroups
from megarl.parallel.schedule import Instruction, ModelPlan, Schedule

POSTED_AHEAD = 4  # tensors that a rank makes room for before it needs them

Key = tuple[str, int, int]  # model, micro-batch, chunk


class PipelineStalled(RuntimeError):
    """A tensor from another stage did not arrive in time, or its sender is gone."""


@dataclass(frozen=True)
class StageModel:
    """What one model computes on this rank.

    Attributes:
        forward: (chunk, micro-batch, received hidden states or None for the first chunk) -> hidden states to pass on,
            or for the last chunk a scalar loss, already divided by the weight of the whole mini-batch; where the model
            does not train, anything.
        shapes: of the hidden states of each micro-batch. dtype: theirs.
        groups: this rank's place in the role.
        take_weight_gradients: chunk -> what the last backward of that chunk put aside, as a function that computes it;
            None = backwards put nothing aside.
        sync: chunk -> begins to add its gradients up over replicas; they are complete on this rank.
        step: number of the mini-batch -> takes the optimizer step, together with all ranks of the role.
    """

    forward: Callable[[int, int, Tensor | None], Tensor]
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    groups: RoleGroups
    take_weight_gradients: Callable[[int], Callable[[], None]] | None = None
    sync: Callable[[int], None] | None = None
    step: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One computation as it ran: seconds from the beginning of the run."""

    start: float
    end: float
    step: Instruction


@dataclass
class _Run:
    """What is under way on this rank."""

    plans: Mapping[str, ModelPlan]
    models: Mapping[str, StageModel]
    receives: list[Instruction]  # all RECVs of the list, in order
    num_posted: int = 0
    num_reached: int = 0
    num_used: int = 0
    arriving: dict[Instruction, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    leaving: dict[Key, Tensor] = field(default_factory=dict)  # made for another stage, until the SEND comes up
    sends: dict[Instruction, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    handed_over: dict[tuple[str, Key], Tensor] = field(default_factory=dict)  # from chunk to chunk on this rank
    leaves: dict[Key, Tensor] = field(default_factory=dict)  # inputs, until a backward has given their gradient
    outputs: dict[Key, GradientEdge | Tensor] = field(default_factory=dict)
    put_aside: dict[Key, Callable[[], None]] = field(default_factory=dict)
    unproved: list[tuple[dist.Work, Instruction, int]] = field(default_factory=list)  # GPU: not known to have ended


def run_instructions(schedule: Schedule, stage: int, models: Mapping[str, StageModel]) -> list[Measured]:
    """Runs `stage`'s part of a proved schedule on this rank. Every rank of the roles runs its own.

    Args:
        schedule: what all stages do.
        stage: this rank's.
        models: by the names of the schedule.

    Returns:
        When each computation and optimizer step ran.

    Raises:
        PipelineStalled: see there; the message names peer, instruction and micro-batch.
    """
    steps = schedule.stages[stage]
    plans = {model.name: model for model in schedule.models}
    run = _Run(plans, models, [step for step in steps if step.action in ("RECV_F", "RECV_B")])
    watch = device.Stopwatch()
    watch.mark()
    marks: list[tuple[int, int, Instruction]] = []
    for step in steps:
        model = models[step.model]
        if step.action in ("RECV_F", "RECV_B"):
            run.num_reached += 1
        elif step.action in ("SEND_F", "SEND_B"):
            _send(run, step)
        elif step.action == "GRAD_SYNC":
            if model.sync is not None:
                model.sync(step.chunk)
        else:
            _post_receives(run)
            given = _take_input(run, step)
            begin = watch.mark()
            _compute(run, step, given)
            marks.append((begin, watch.mark(), step))
            if step.action == "STEP":  # all stages are done with the mini-batch: what was sent has arrived
                _finish_sends(run, step.model)
    for name in plans:
        _finish_sends(run, name)
    seconds = watch.read() if not run.unproved else _read_when_all_ended(run, watch)
    return [Measured(seconds[begin], seconds[end], step) for begin, end, step in marks]


def _post_receives(run: _Run) -> None:
    """Makes room for what the list has come to, and for some tensors more, and lets them arrive."""
    goal = max(run.num_reached, run.num_used + POSTED_AHEAD)
    while run.num_posted < min(goal, len(run.receives)):
        step = run.receives[run.num_posted]
        model, source = run.models[step.model], run.plans[step.model].source(step)
        buffer = torch.empty(model.shapes[step.micro_batch], dtype=model.dtype, device=device.device())
        work = dist.irecv(
            buffer, src=model.groups.peer(source), group=_channel(model.groups, source, model.groups.at.pp)
        )
        assert work is not None, f"{step.describe()}: not part of the group"
        run.arriving[step] = work, buffer
        run.num_posted += 1


def _channel(groups: RoleGroups, source: int, target: int) -> dist.ProcessGroup:
    return groups.up_pp if target > source else groups.down_pp


def _send(run: _Run, step: Instruction) -> None:
    """Lets a tensor leave that a chunk has just made."""
    model, target = run.models[step.model], run.plans[step.model].target(step)
    tensor = run.leaving.pop(_key(step))
    shape = tuple(model.shapes[step.micro_batch])
    assert tuple(tensor.shape) == shape, (
        f"{step.describe()}: made {tuple(tensor.shape)}, the next stage expects {shape}"
    )
    work = dist.isend(tensor, dst=model.groups.peer(target), group=_channel(model.groups, model.groups.at.pp, target))
    assert work is not None, f"{step.describe()}: not part of the group"
    run.sends[step] = work, tensor
    if device.has_gpu():  # gloo knows only by waiting whether a transfer has ended
        for sent in [sent for sent, (each, _) in run.sends.items() if each.is_completed()]:
            del run.sends[sent]


def _finish_sends(run: _Run, model: str) -> None:
    """Waits for the transfers of a model and lets go of what was sent."""
    for step in [step for step in run.sends if step.model == model]:
        _wait(run, run.sends.pop(step)[0], step, run.plans[model].target(step))


def _key(step: Instruction) -> Key:
    return step.model, step.micro_batch, step.chunk


def _take_input(run: _Run, step: Instruction) -> Tensor | None:
    """What a computation works on: received, or handed over by the chunk beside it; None where there is nothing."""
    if step.action in ("WGRAD", "STEP"):
        return None
    needed = Instruction("RECV_F" if step.action == "FORWARD" else "RECV_B", *_key(step))
    if needed not in run.arriving:
        return run.handed_over.pop((step.action, _key(step)), None)
    work, tensor = run.arriving.pop(needed)
    plan = run.plans[step.model]
    _wait(run, work, step, plan.source(needed))
    run.num_used += 1
    if step.action == "BACKWARD":  # its gradient came back, so the activation has arrived: the wait ends at once
        sent = run.sends.pop(Instruction("SEND_F", *_key(step)), None)
        if sent is not None:
            _wait(run, sent[0], step, plan.source(needed))
    return tensor


def _wait(run: _Run, work: dist.Work, step: Instruction, peer_stage: int) -> None:
    """Waits for a transfer; on a GPU it is the device's queue that waits, and the host looks at the end."""
    if device.has_gpu():
        work.wait()
        run.unproved.append((work, step, peer_stage))
        return
    groups = run.models[step.model].groups
    try:
        work.wait(datetime.timedelta(seconds=groups.timeout_s))
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise PipelineStalled(f"{_describe_stall(groups, step, peer_stage)}: {cause}") from error


def _describe_stall(groups: RoleGroups, step: Instruction, peer_stage: int) -> str:
    return (
        f"rank {groups.peer(groups.at.pp)} ({step.model} {groups.at}) waited at {step.describe()} for rank "
        f"{groups.peer(peer_stage)} (stage {peer_stage}), which did not answer within {groups.timeout_s:g} s or is gone"
    )


def _read_when_all_ended(run: _Run, watch: device.Stopwatch) -> list[float]:
    """On a GPU: waits for all transfers to end, and names the first that does not."""
    work, step, peer_stage = run.unproved[0]
    groups = run.models[step.model].groups
    deadline = time.monotonic() + groups.timeout_s
    for work, step, peer_stage in run.unproved:
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise PipelineStalled(_describe_stall(run.models[step.model].groups, step, peer_stage))
            time.sleep(0.0005)
    return watch.read()


def _compute(run: _Run, step: Instruction, given: Tensor | None) -> None:
    if step.action == "FORWARD":
        _forward(run, step, given)
    elif step.action == "BACKWARD":
        _backward(run, step, given)
    elif step.action == "WGRAD":
        run.put_aside.pop(_key(step))()
    else:
        take_step, plan = run.models[step.model].step, run.plans[step.model]
        assert take_step is not None, f"{step.describe()}: this model takes no steps"
        take_step(sorted(plan.last_of_mini_batch).index(step.micro_batch))


def _forward(run: _Run, step: Instruction, given: Tensor | None) -> None:
    model, plan, key = run.models[step.model], run.plans[step.model], _key(step)
    if given is not None and plan.trains:
        run.leaves[key] = given.requires_grad_()
    output = model.forward(step.chunk, step.micro_batch, given)
    is_last = step.chunk == plan.num_chunks - 1
    if plan.trains:
        run.outputs[key] = output if is_last else get_gradient_edge(output)
    if not is_last:
        _pass_on(run, plan, step, step.chunk + 1, output.detach())


def _backward(run: _Run, step: Instruction, given: Tensor | None) -> None:
    model, plan, key = run.models[step.model], run.plans[step.model], _key(step)
    torch.autograd.backward(run.outputs.pop(key), given)
    if model.take_weight_gradients is not None:
        run.put_aside[key] = model.take_weight_gradients(step.chunk)
        if not plan.splits:
            run.put_aside.pop(key)()
    leaf = run.leaves.pop(key, None)
    if leaf is not None:
        assert leaf.grad is not None, f"{step.describe()}: the input got no gradient"
        _pass_on(run, plan, step, step.chunk - 1, leaf.grad)


def _pass_on(run: _Run, plan: ModelPlan, step: Instruction, chunk: int, tensor: Tensor) -> None:
    """Keeps a result for the SEND that follows, or for the chunk beside it on this rank."""
    if plan.chunk_stages[chunk] == plan.chunk_stages[step.chunk]:
        run.handed_over[step.action, (step.model, step.micro_batch, chunk)] = tensor
    else:
        run.leaving[_key(step)] = tensor.contiguous()
