"""The time line of a schedule for given costs: when each instruction runs, how long it all takes, who idles. Pure.

The lists run as in the executor (see `checker.py`): in order, sends never wait, a tensor arrives `costs.transfer` after
it was made, all stages meet at an optimizer step. Two stages, two micro-batches, forward 1 and backward 2:

    time     0 1 2 3 4 5 6 7 8 9
    stage 0  F F . B B . B B            makespan 9 (the last backward ends), 12 of 2 × 9 worked: a third is idle
    stage 1  . F B B F B B .
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from megarl.parallel.checker import check_schedule
from megarl.parallel.costs import Costs, cost_of
from megarl.parallel.schedule import COMPUTE, Instruction, Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """One computation of one stage."""

    start: float
    end: float
    step: Instruction


@dataclass(frozen=True)
class Timeline:
    """A schedule in time. `idle`: by stage, the share of the makespan without work; `peak_live`: see `Checked`."""

    stages: tuple[tuple[Span, ...], ...]
    makespan: float
    idle: tuple[float, ...]
    peak_live: tuple[float, ...]

    @property
    def idle_share(self) -> float:
        """Share of all stages' time without work."""
        return sum(self.idle) / len(self.idle)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs a schedule on paper; proves it first.

    Raises:
        AssertionError: the checker refuses the schedule.
    """
    checked = check_schedule(schedule)
    models = {model.name: model for model in schedule.models}
    num_stages = schedule.num_stages
    now, at = [0.0] * num_stages, [0] * num_stages
    spans: list[list[Span]] = [[] for _ in range(num_stages)]
    channels: dict[tuple[int, int], deque[float]] = {}

    def run(stage: int) -> bool:
        """Goes on until the stage waits or is at its end; whether anything was done."""
        steps, begin = schedule.stages[stage], at[stage]
        while at[stage] < len(steps):
            step = steps[at[stage]]
            model = models[step.model]
            if step.action == "STEP":
                break
            if step.action in ("RECV_F", "RECV_B"):
                channel = channels.get((model.source(step), stage))
                if not channel:
                    break
                now[stage] = max(now[stage], channel.popleft())
            elif step.action in ("SEND_F", "SEND_B"):
                channels.setdefault((stage, model.target(step)), deque()).append(now[stage] + costs.transfer)
            elif step.action in COMPUTE:
                end = now[stage] + cost_of(step, model, costs)
                spans[stage].append(Span(now[stage], end, step))
                now[stage] = end
            at[stage] += 1
        return at[stage] > begin

    def meet() -> bool:
        """All stages take the optimizer step they stand at together."""
        if any(at[stage] >= len(schedule.stages[stage]) for stage in range(num_stages)):
            return False
        step = schedule.stages[0][at[0]]
        begin = max(now)
        end = begin + cost_of(step, models[step.model], costs)
        for stage in range(num_stages):
            spans[stage].append(Span(begin, end, step))
            now[stage] = end
            at[stage] += 1
        return True

    while any([run(stage) for stage in range(num_stages)]) or meet():
        continue
    makespan = max(now)
    idle = tuple(1.0 - sum(span.end - span.start for span in stage) / makespan for stage in spans)
    return Timeline(tuple(map(tuple, spans)), makespan, idle, checked.peak_live)
