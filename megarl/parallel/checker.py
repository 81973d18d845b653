"""Proves a schedule before it runs: it ends, in order, within its memory. Pure.

`check_schedule` runs the lists as the executor does: a stage takes its instructions one after the other; a SEND never
waits; a RECV waits for the next tensor of its channel (one channel for each ordered pair of stages, first in, first
out), which must be the one it names; a STEP waits until every stage has come to it. What the executor relies on is
asserted on the way:

1. It ends: no stage waits for ever.
2. Every chunk runs every micro-batch once: FORWARD; and where the model trains BACKWARD after it, and WGRAD after that.
3. Micro-batches of a chunk come in rising order in each of these, so gradients add up in one order in every schedule.
4. What a computation needs is there: received, or made on the same stage.
5. Gradients are declared complete (GRAD_SYNC) once a mini-batch and chunk, after the last of them; STEP after that on
   the same stage, and the next mini-batch's forwards after STEP.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from megarl.parallel.schedule import Instruction, ModelPlan, Schedule


@dataclass(frozen=True)
class Checked:
    """What a proof yields: by stage, the most micro-batches whose activations it holds (see `list_schedule.Found`)."""

    peak_live: tuple[float, ...]


@dataclass
class _Stage:
    at: int = 0
    live: float = 0.0
    peak: float = 0.0
    here: set[Instruction] = field(default_factory=set)  # tensors received or made here and not yet used
    done: dict[tuple[str, str, int], int] = field(default_factory=dict)  # (action, model, chunk) -> micro-batches


def check_schedule(schedule: Schedule) -> Checked:
    """Proves the schedule; see the rules above.

    Raises:
        AssertionError: a rule is broken; the message names stage, instruction and what every stage waits for.
    """
    stages = [_Stage() for _ in range(schedule.num_stages)]
    channels: dict[tuple[int, int], deque[Instruction]] = {}
    models = {model.name: model for model in schedule.models}
    moving = True
    while moving:
        moving = False
        for number, stage in enumerate(stages):
            steps = schedule.stages[number]
            while stage.at < len(steps) and _advance(number, stage, steps[stage.at], models, channels):
                stage.at += 1
                moving = True
        moving |= _meet(schedule, stages)
    waiting = [
        f"stage {number} waits at {schedule.stages[number][stage.at].describe()}"
        for number, stage in enumerate(stages)
        if stage.at < len(schedule.stages[number])
    ]
    assert not waiting, f"{schedule.name}: dead-lock: " + "; ".join(waiting)
    left = [message.describe() for channel in channels.values() for message in channel]
    assert not left, f"{schedule.name}: sent and never received: {left}"
    for model in schedule.models:
        for chunk, at in enumerate(model.chunk_stages):
            for action in _actions(model):
                count = stages[at].done.get((action, model.name, chunk), 0)
                assert count == model.num_micro_batches, f"{schedule.name}: {count} {action} of {model.name} {chunk}"
            synced = stages[at].done.get(("GRAD_SYNC", model.name, chunk), 0)
            assert synced == (len(model.mini_batches) if model.trains else 0), f"{schedule.name}: {synced} GRAD_SYNC"
    return Checked(tuple(stage.peak for stage in stages))


def _actions(model: ModelPlan) -> tuple[str, ...]:
    if not model.trains:
        return ("FORWARD",)
    return ("FORWARD", "BACKWARD", "WGRAD") if model.splits else ("FORWARD", "BACKWARD")


def _advance(
    number: int,
    stage: _Stage,
    step: Instruction,
    models: dict[str, ModelPlan],
    channels: dict[tuple[int, int], deque[Instruction]],
) -> bool:
    """Does one instruction; False when it has to wait."""
    model = models[step.model]
    where = f"stage {number}: {step.describe()}"
    assert model.chunk_stages[step.chunk] == number or step.action == "STEP", f"{where}: the chunk is not on this stage"
    if step.action == "STEP":
        return False  # `_meet` moves all stages on together
    if step.action in ("RECV_F", "RECV_B"):
        channel = channels.setdefault((model.source(step), number), deque())
        if not channel:
            return False
        message = channel.popleft()
        assert message == step, f"{where}: the channel's next tensor is for {message.describe()}"
        stage.here.add(step)
        return True
    if step.action in ("SEND_F", "SEND_B"):
        action, chunk = ("RECV_F", step.chunk + 1) if step.action == "SEND_F" else ("RECV_B", step.chunk - 1)
        message = Instruction(action, step.model, step.micro_batch, chunk)
        made = Instruction("FORWARD" if step.action == "SEND_F" else "BACKWARD", *_rest(step))
        assert made in stage.here, f"{where}: there is nothing to send"
        stage.here.discard(made)
        channels.setdefault((number, model.target(step)), deque()).append(message)
        return True
    if step.action == "GRAD_SYNC":
        _check_complete(where, stage, step, model)
        return True
    _compute(where, number, stage, step, model)
    return True


def _rest(step: Instruction) -> tuple[str, int, int]:
    return step.model, step.micro_batch, step.chunk


def _compute(where: str, number: int, stage: _Stage, step: Instruction, model: ModelPlan) -> None:
    """FORWARD, BACKWARD or WGRAD: its inputs are there, its turn has come."""
    key = (step.action, step.model, step.chunk)
    assert stage.done.get(key, 0) == step.micro_batch, f"{where}: not its turn, {stage.done.get(key, 0)} were done"
    assert step.action in _actions(model), f"{where}: this model has none"
    stage.done[key] = step.micro_batch + 1
    if step.action == "WGRAD":
        assert stage.done.get(("BACKWARD", step.model, step.chunk), 0) > step.micro_batch, f"{where}: before BACKWARD"
    else:
        is_forward = step.action == "FORWARD"
        before = step.chunk + (-1 if is_forward else 1)
        if 0 <= before < model.num_chunks:
            if model.chunk_stages[before] == number:
                needed = Instruction(step.action, step.model, step.micro_batch, before)
            else:
                needed = Instruction("RECV_F" if is_forward else "RECV_B", *_rest(step))
            assert needed in stage.here, f"{where}: its input is not there"
            stage.here.discard(needed)
        if not is_forward:
            assert stage.done.get(("FORWARD", step.model, step.chunk), 0) > step.micro_batch, f"{where}: before FORWARD"
        elif model.steps:
            began = _mini_batch_of(model, step.micro_batch)
            stepped = stage.done.get(("STEP", step.model, model.num_chunks - 1), 0)
            assert stepped == began, f"{where}: of mini-batch {began} after {stepped} optimizer steps"
        after = step.chunk + (1 if is_forward else -1)
        if 0 <= after < model.num_chunks:
            stage.here.add(step)
    share = 1.0 / model.chunks_per_stage
    if step.action == "FORWARD":
        stage.live += share if model.trains else 0.0
        stage.peak = max(stage.peak, stage.live)
    elif step.action == "WGRAD" or not model.splits:
        stage.live -= share


def _mini_batch_of(model: ModelPlan, micro_batch: int) -> int:
    return sum(last < micro_batch for last in model.last_of_mini_batch)


def _check_complete(where: str, stage: _Stage, step: Instruction, model: ModelPlan) -> None:
    assert step.micro_batch in model.last_of_mini_batch, f"{where}: closes no mini-batch"
    done = stage.done.get((_actions(model)[-1], step.model, step.chunk), 0)
    assert done == step.micro_batch + 1, f"{where}: after {done} micro-batches"
    key = ("GRAD_SYNC", step.model, step.chunk)
    stage.done[key] = stage.done.get(key, 0) + 1


def _meet(schedule: Schedule, stages: list[_Stage]) -> bool:
    """Where every stage stands at the same STEP, all go on."""
    lists = schedule.stages
    if any(stage.at >= len(steps) for stage, steps in zip(stages, lists, strict=True)):
        return False
    at = {steps[stage.at] for stage, steps in zip(stages, lists, strict=True)}
    step = next(iter(at))
    if len(at) > 1 or step.action != "STEP":
        return False
    model = schedule.model(step.model)
    assert step.micro_batch in model.last_of_mini_batch, f"{step.describe()}: closes no mini-batch"
    key = ("STEP", model.name, model.num_chunks - 1)
    for number, stage in enumerate(stages):
        count = stage.done.get(key, 0)
        for chunk in model.chunks_of(number):
            synced = stage.done.get(("GRAD_SYNC", model.name, chunk), 0)
            assert synced == count + 1, f"stage {number}: {step.describe()}: chunk {chunk} has {synced} GRAD_SYNCs"
        stage.done[key] = count + 1
        stage.at += 1
    return True
