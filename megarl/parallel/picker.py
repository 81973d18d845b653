"""Which schedule a run uses: placements when models are built, then the best order for measured costs. Pure.

    plan_chunk_stages    once, before models are built: where the chunks of each model lie
    pick_update          before each update: the order of computation, by simulation with the costs measured so far
    pick_stream          before each annotation

A placement leaves a choice of orders. `auto` simulates those that fit it and takes the fastest that holds no more
activations than allowed; a name takes that one. Costs and micro-batches are the same on every rank, so is the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarl.parallel.costs import Costs
from megarl.parallel.generators import (
    plan_1f1b,
    plan_fused,
    plan_in_turn,
    plan_interleaved,
    plan_stream,
    plan_zero_bubble,
)
from megarl.parallel.schedule import ModelPlan, Schedule, interleaved, linear, reversed_linear, reversed_v, v_shape
from megarl.parallel.simulate import simulate

Choice = Literal["auto", "1f1b", "interleaved", "zero_bubble", "fused"]


@dataclass(frozen=True)
class Picked:
    """A schedule and what is expected of it. `considered`: predicted seconds of everything that was compared."""

    schedule: Schedule
    seconds: float
    idle_share: float
    peak_live: float
    considered: dict[str, float]

    def __str__(self) -> str:
        others = ", ".join(f"{name} {self.seconds / seconds:.2f}×" for name, seconds in self.considered.items())
        return (
            f"{self.schedule.name}: predicted idle {100 * self.idle_share:.1f} %, at most {self.peak_live:g} "
            f"micro-batches' activations a stage; speed beside it: {others}"
        )


def plan_chunk_stages(
    choice: Choice, num_stages: int, num_layers: int, is_reversed: bool = False, chunks_per_stage: int = 2
) -> tuple[int, ...]:
    """Where the chunks of a model lie.

    Args:
        is_reversed: the model runs fused with one that is not: its first chunk lies on the last stage.
        chunks_per_stage: of `interleaved`.

    Raises:
        ValueError: `interleaved` with fewer layers than chunks.
    """
    if num_stages == 1:
        return (0,)
    if choice == "interleaved":
        if num_layers < num_stages * chunks_per_stage:
            raise ValueError(
                f"pipeline.schedule=interleaved cuts a model of {num_layers} layers in {num_stages * chunks_per_stage} "
                f"chunks; use a smaller pp or pipeline.virtual_stages, or pipeline.schedule=1f1b"
            )
        return interleaved(num_stages, chunks_per_stage)
    if choice == "1f1b":
        return linear(num_stages)
    if num_layers < 2 * num_stages:
        return reversed_linear(num_stages) if is_reversed else linear(num_stages)
    return reversed_v(num_stages) if is_reversed else v_shape(num_stages)


def pick_update(choice: Choice, models: Sequence[ModelPlan], costs: Costs, max_live: float | None = None) -> Picked:
    """The order in which models train.

    Args:
        choice: a name, or `auto` = the fastest; with one stage there is no choice.
        models: on the same stages; their `splits` is set here.
        costs: measured or guessed.
        max_live: micro-batches' activations a stage may hold; None = stages + 1. A named schedule may exceed it.

    Raises:
        ValueError: the named schedule does not fit where the chunks lie.
    """
    num_stages = models[0].num_stages
    cap = num_stages + 1.0 if max_live is None else max_live
    names = [choice] if choice != "auto" and num_stages > 1 else _fitting(models)
    picked: list[Picked] = []
    for name in names:
        if name not in _fitting(models):
            raise ValueError(
                f"pipeline.schedule={name} does not fit chunks on stages {[model.chunk_stages for model in models]}; "
                f"use {', '.join(_fitting(models))} or auto"
            )
        schedule = _plan(name, models, costs, cap)
        line = simulate(schedule, costs)
        picked.append(Picked(schedule, line.makespan, line.idle_share, max(line.peak_live), {}))
    within = [each for each in picked if each.peak_live <= cap + 1e-9] or [min(picked, key=lambda each: each.peak_live)]
    best = min(within, key=lambda each: each.seconds * (1 + 1e-9))
    return replace(best, considered={each.schedule.name: each.seconds for each in picked})


def pick_stream(models: Sequence[ModelPlan], costs: Costs) -> Picked:
    """The forward-only passes of several models as one stream."""
    schedule = plan_stream(models, costs)
    line = simulate(schedule, costs)
    return Picked(schedule, line.makespan, line.idle_share, 0.0, {"stream": line.makespan})


def _fitting(models: Sequence[ModelPlan]) -> list[str]:
    """Names of the schedules that these placements allow, the simplest first."""
    stages, per_stage = models[0].num_stages, models[0].chunks_per_stage
    if stages == 1:
        return ["1f1b"]
    names: list[str] = []
    if all(model.chunks_per_stage == 1 for model in models):
        names.append("1f1b")
    elif all(model.chunk_stages == interleaved(stages, per_stage) for model in models):
        names.append("interleaved")
    return [*names, "zero_bubble", *(["fused"] if len(models) > 1 else [])]


def _plan(name: str, models: Sequence[ModelPlan], costs: Costs, max_live: float) -> Schedule:
    splits = name in ("zero_bubble", "fused")
    models = [replace(model, splits=splits) for model in models]
    if name == "fused":
        return plan_fused(models, costs, max_live)
    if name == "zero_bubble":
        return plan_in_turn(name, models, lambda model: plan_zero_bubble(model, costs, max_live))
    return plan_in_turn(name, models, plan_1f1b if name == "1f1b" else plan_interleaved)
