"""What the computations of a run cost, measured while it runs; the next schedule is picked with it.

    PipelineRun of each rank ──> `merge_profile`, a collective of the world ──> Profile, the same on every rank

Seconds are kept for each model and chunk as seconds per token, so they carry over to micro-batches of other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megarl.parallel.costs import Costs, ModelCosts, ratio_costs
from megarl.parallel.picker import Picked
from megarl.parallel.pipeline import Measured
from megarl.parallel.schedule import Action, ModelPlan

KINDS: tuple[Action | str, ...] = ("FORWARD", "BACKWARD", "WGRAD", "WHOLE")  # WHOLE: a backward that is not split


@dataclass(frozen=True)
class PipelineRun:
    """How a schedule ran on one rank. `work`: tokens of each micro-batch, by model; `seconds`: from begin to end."""

    picked: Picked
    stage: int
    spans: tuple[Measured, ...]
    work: Mapping[str, tuple[float, ...]]
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Seconds per token, by model and chunk, for each of `KINDS` (0 = not measured); `steps`: of an optimizer step."""

    chunks: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)

    def costs(self, models: Sequence[ModelPlan], work: Mapping[str, tuple[float, ...]]) -> Costs:
        """Costs of these models; while one has not been measured, all are taken to cost the same.

        Args:
            work: tokens of each micro-batch, by model.
        """
        by_name = {model.name: self._model_costs(model, work[model.name]) for model in models}
        known = {name: costs for name, costs in by_name.items() if costs is not None}
        if len(known) == len(models):
            return Costs(known, are_seconds=True)
        tokens = sum(sum(sizes) for sizes in work.values()) / sum(len(sizes) for sizes in work.values())
        return Costs({
            model.name: ModelCosts(
                guess.forward, guess.input_grad, guess.weight_grad, 0.0, tuple(w / tokens for w in work[model.name])
            )
            for model in models
            for guess in [ratio_costs(model)]
        })  # fmt: skip

    def _model_costs(self, model: ModelPlan, work: tuple[float, ...]) -> ModelCosts | None:
        rows = self.chunks.get(model.name)
        if rows is None or len(rows) != model.num_chunks or not all(row[0] for row in rows):
            return None
        if not model.trains:
            nothing = (0.0,) * model.num_chunks
            return ModelCosts(tuple(row[0] for row in rows), nothing, nothing, work=work)
        if not all(row[1] or row[3] for row in rows):
            return None
        inputs = tuple(row[1] or row[3] / 2 for row in rows)
        weights = tuple(row[2] or row[3] / 2 for row in rows)
        return ModelCosts(tuple(row[0] for row in rows), inputs, weights, self.steps.get(model.name, 0.0), work)


def merge_profile(
    profile: Profile, runs: Sequence[PipelineRun], num_chunks: Mapping[str, int]
) -> tuple[Profile, float | None]:
    """Adds what the ranks have measured to the profile; a collective of the world.

    Args:
        runs: of this rank since the last time, maybe none.
        num_chunks: of every model that can appear in a run, the same on every rank.

    Returns:
        The profile with what is new, and the idle share of the runs over all ranks: of the time from a run's begin to
        its end, what was neither computation nor optimizer step. None when nothing ran.
    """
    names = sorted(num_chunks)
    seconds = {name: torch.zeros(num_chunks[name], len(KINDS), dtype=torch.float64) for name in names}
    tokens = {name: torch.zeros(num_chunks[name], len(KINDS), dtype=torch.float64) for name in names}
    stepped = dict.fromkeys(names, 0.0)
    busy = 0.0
    for run in runs:
        for span in run.spans:
            name, took = span.step.model, span.end - span.start
            if span.step.action == "STEP":
                stepped[name] += took
                continue
            is_whole = span.step.action == "BACKWARD" and not run.picked.schedule.model(name).splits
            kind = KINDS.index("WHOLE" if is_whole else span.step.action)
            seconds[name][span.step.chunk, kind] += took
            tokens[name][span.step.chunk, kind] += run.work[name][span.step.micro_batch]
            busy += took
    num_steps = {
        name: sum(s.step.action == "STEP" and s.step.model == name for r in runs for s in r.spans) for name in names
    }
    never = float("inf")
    quickest = torch.tensor([stepped[name] / num_steps[name] if num_steps[name] else never for name in names])
    dist.all_reduce(quickest, op=dist.ReduceOp.MIN)  # the last rank to come to a step does not wait in it
    busy += sum(float(quickest[i]) * num_steps[name] for i, name in enumerate(names) if num_steps[name])
    total = torch.tensor([busy, sum(run.seconds for run in runs)], dtype=torch.float64)
    joined = torch.cat([total, *(table[name].flatten() for table in (seconds, tokens) for name in names)])
    dist.all_reduce(joined)
    busy, elapsed = joined[:2].tolist()
    half = (joined.numel() - 2) // 2
    rates = (joined[2 : 2 + half] / joined[2 + half :].clamp(min=1e-9)).split([s.numel() for s in seconds.values()])
    chunks = dict(profile.chunks)
    for name, rate in zip(names, rates, strict=True):
        if bool(rate.any()):
            rows = rate.view(num_chunks[name], len(KINDS)).tolist()
            old = profile.chunks.get(name, ((0.0,) * len(KINDS),) * num_chunks[name])
            chunks[name] = tuple(
                tuple(new or before for new, before in zip(row, kept, strict=True))
                for row, kept in zip(rows, old, strict=True)
            )
    steps = {name: float(quickest[i]) for i, name in enumerate(names) if quickest[i] < never}
    return Profile(chunks, {**profile.steps, **steps}), 1.0 - busy / elapsed if elapsed else None
