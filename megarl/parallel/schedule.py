"""What each pipeline stage does, as a list of instructions. Pure: no tensors, no ranks.

A model is cut into chunks, and `chunk_stages` says which stage runs each of them: one chunk a stage in order, several
(interleaved), down the stages and back up (V), or the other way round. A generator (`generators.py`) gives every stage
the order in which it computes; `build_schedule` adds what follows from that order: transfers, and the reduction of
gradients. Two stages, one chunk each, three micro-batches, one-forward-one-backward (Narayanan et al. 2021):

    stage 0:  F0 >F0 F1 >F1 <B0 B0 F2 >F2 <B1 B1 <B2 B2 S          F forward, B backward, W weight gradient
    stage 1:  <F0 F0 B0 >B0 <F1 F1 B1 >B1 <F2 F2 B2 >B2 S          < receive, > send, S gradients are complete

Every pair of stages has one channel in each direction, and what goes through it arrives in the order it was sent; so
a list receives in its neighbours' order of sending. Chunks of one model that follow each other on one stage hand over
without a transfer. A model with more than one mini-batch takes an optimizer step (`STEP`) after each; all stages meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Action = Literal["RECV_F", "FORWARD", "SEND_F", "RECV_B", "BACKWARD", "SEND_B", "WGRAD", "GRAD_SYNC", "STEP"]
COMPUTE: tuple[Action, ...] = ("FORWARD", "BACKWARD", "WGRAD")
SHORT: dict[Action, str] = {
    "RECV_F": "<F",
    "FORWARD": "F",
    "SEND_F": ">F",
    "RECV_B": "<B",
    "BACKWARD": "B",
    "SEND_B": ">B",
    "WGRAD": "W",
    "GRAD_SYNC": "S",
    "STEP": "O",
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action of one stage for one model.

    `chunk`: of a SEND the chunk that made the tensor, of a RECV the chunk that will use it, of a STEP the last one.
    `micro_batch`: of GRAD_SYNC and STEP the last micro-batch of the mini-batch.
    """

    action: Action
    model: str
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"{SHORT[self.action]}{self.micro_batch}"

    def describe(self) -> str:
        """For messages: every field by name."""
        return f"{self.action} of {self.model}, micro-batch {self.micro_batch}, chunk {self.chunk}"


@dataclass(frozen=True)
class ModelPlan:
    """One model's part in a schedule.

    Attributes:
        name: unique within the schedule.
        chunk_stages: the stage that runs each chunk, in the model's order; every stage runs as many chunks.
        mini_batches: number of micro-batches of each optimizer step; micro-batches are counted through.
        trains: False = forward only.
        splits: BACKWARD computes the input's gradient and a WGRAD later the weights' (zero bubble, Qi et al. 2023).
        steps: an optimizer step closes each mini-batch; needed where there is more than one.
    """

    name: str
    chunk_stages: tuple[int, ...]
    mini_batches: tuple[int, ...]
    trains: bool = True
    splits: bool = False
    steps: bool = False

    def __post_init__(self) -> None:
        counts = [self.chunk_stages.count(stage) for stage in range(self.num_stages)]
        assert len(set(counts)) == 1, f"{self.name}: stages run {counts} chunks"
        assert self.mini_batches and min(self.mini_batches) >= 1, f"{self.name}: mini-batches {self.mini_batches}"
        assert self.steps or not self.trains or len(self.mini_batches) == 1, (
            f"{self.name}: no step between mini-batches"
        )

    @cached_property
    def num_stages(self) -> int:
        return max(self.chunk_stages) + 1

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_stages)

    @property
    def chunks_per_stage(self) -> int:
        return self.num_chunks // self.num_stages

    @cached_property
    def num_micro_batches(self) -> int:
        return sum(self.mini_batches)

    @cached_property
    def last_of_mini_batch(self) -> frozenset[int]:
        """The micro-batches that close a mini-batch."""
        ends: list[int] = []
        for count in self.mini_batches:
            ends.append((ends[-1] if ends else -1) + count)
        return frozenset(ends)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that `stage` runs, first to last."""
        return tuple(chunk for chunk, at in enumerate(self.chunk_stages) if at == stage)

    def source(self, step: Instruction) -> int:
        """The stage that the tensor of this RECV comes from."""
        return self.chunk_stages[step.chunk - 1 if step.action == "RECV_F" else step.chunk + 1]

    def target(self, step: Instruction) -> int:
        """The stage that the tensor of this SEND goes to."""
        return self.chunk_stages[step.chunk + 1 if step.action == "SEND_F" else step.chunk - 1]


Orders = list[list[Instruction]]  # by stage, only FORWARD, BACKWARD, WGRAD and STEP


@dataclass(frozen=True)
class Schedule:
    """Everything every stage does, by stage."""

    name: str
    models: tuple[ModelPlan, ...]
    stages: tuple[tuple[Instruction, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def model(self, name: str) -> ModelPlan:
        return next(model for model in self.models if model.name == name)


def linear(num_stages: int) -> tuple[int, ...]:
    """One chunk a stage, in order."""
    return tuple(range(num_stages))


def reversed_linear(num_stages: int) -> tuple[int, ...]:
    """One chunk a stage, the first on the last stage."""
    return tuple(reversed(range(num_stages)))


def interleaved(num_stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """Round and round the stages."""
    return tuple(range(num_stages)) * chunks_per_stage


def v_shape(num_stages: int) -> tuple[int, ...]:
    """Two chunks a stage: down the stages and back up, so first and last chunk meet on stage 0."""
    return linear(num_stages) + reversed_linear(num_stages)


def reversed_v(num_stages: int) -> tuple[int, ...]:
    """Two chunks a stage: up the stages and back down, so first and last chunk meet on the last stage."""
    return reversed_linear(num_stages) + linear(num_stages)


def concatenate(num_stages: int, parts: Iterable[Orders]) -> Orders:
    """One after the other on every stage."""
    joined: Orders = [[] for _ in range(num_stages)]
    for part in parts:
        for stage, order in enumerate(part):
            joined[stage] += order
    return joined


def build_schedule(name: str, models: Sequence[ModelPlan], orders: Orders) -> Schedule:
    """Adds transfers and gradient reductions to orders of computation.

    A tensor is sent right after it was made, and received right before it is used; where the neighbour sends something
    else first that is used later, that is received first.
    """
    by_name = {model.name: model for model in models}
    sent: dict[tuple[int, int], list[Instruction]] = {}  # the RECVs that answer a channel's SENDs, in order
    for stage, order in enumerate(orders):
        for step in order:
            answer = _answer(by_name[step.model], step)
            if answer is not None:
                target = by_name[step.model].chunk_stages[answer.chunk]
                sent.setdefault((stage, target), []).append(answer)
    return Schedule(
        name, tuple(models), tuple(tuple(_with_transfers(by_name, sent, s, o)) for s, o in enumerate(orders))
    )


def _answer(model: ModelPlan, step: Instruction) -> Instruction | None:
    """What the neighbour receives after this computation; None when nothing leaves the stage."""
    if step.action == "FORWARD":
        chunk, action = step.chunk + 1, "RECV_F"
    elif step.action == "BACKWARD":
        chunk, action = step.chunk - 1, "RECV_B"
    else:
        return None
    if not 0 <= chunk < model.num_chunks or model.chunk_stages[chunk] == model.chunk_stages[step.chunk]:
        return None
    return Instruction(action, step.model, step.micro_batch, chunk)


def _needs(model: ModelPlan, step: Instruction) -> Instruction | None:
    """What must be received before this computation; None when everything is on the stage."""
    if step.action == "FORWARD":
        chunk, action = step.chunk - 1, "RECV_F"
    elif step.action == "BACKWARD":
        chunk, action = step.chunk + 1, "RECV_B"
    else:
        return None
    if not 0 <= chunk < model.num_chunks or model.chunk_stages[chunk] == model.chunk_stages[step.chunk]:
        return None
    return Instruction(action, step.model, step.micro_batch, step.chunk)


def _with_transfers(
    models: dict[str, ModelPlan],
    sent: dict[tuple[int, int], list[Instruction]],
    stage: int,
    order: Sequence[Instruction],
) -> Iterable[Instruction]:
    arrived: set[Instruction] = set()
    taken: dict[int, int] = {}  # by source stage, how much of its channel has been received
    for step in order:
        model = models[step.model]
        needed = _needs(model, step)
        if needed is not None and needed not in arrived:
            source = model.source(needed)
            channel = sent.get((source, stage), [])
            while needed not in arrived:
                position = taken.get(source, 0)
                assert position < len(channel), f"stage {stage}: {step.describe()}: nobody sends what it needs"
                message = channel[position]
                taken[source] = taken.get(source, 0) + 1
                arrived.add(message)
                yield message
        yield step
        if _answer(model, step) is not None:
            action: Action = "SEND_F" if step.action == "FORWARD" else "SEND_B"
            yield Instruction(action, step.model, step.micro_batch, step.chunk)
        closes = step.action == ("WGRAD" if model.splits else "BACKWARD")
        if closes and step.micro_batch in model.last_of_mini_batch:
            yield Instruction("GRAD_SYNC", step.model, step.micro_batch, step.chunk)
