"""In which order a stage takes what is ready: policies of the list scheduler, and which of them to try. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.parallel.schedule import Action, ModelPlan


@dataclass(frozen=True)
class Policy:
    """Which of several ready tasks of one kind a stage takes, and when it takes none.

    Attributes:
        plain: of forwards a later chunk before an earlier one; else the least (micro-batch + lag * chunk / chunks) /
            micro-batches, so that models of different length end together. Of backwards the lower micro-batch.
        taper: a chunk has at most taper * (chunks from here to the model's end) micro-batches between forward and
            backward, as 1F1B has; 0 = only `max_live` counts.
        patience: rather idle than take a forward or weight gradient when a backward is ready within this share of it.
        stagger: each model lags so many micro-batches, as a share of the stages, behind the one before it: their
            optimizer steps then come at different times, and each fills the other's drain.
        noise, seed: shifts the score of each chunk by up to so many micro-batches.
    """

    plain: bool = True
    taper: float = 0.0
    patience: float = 0.0
    lag: float = 0.0
    stagger: float = 0.0
    noise: float = 0.0
    seed: int = 0

    def scores(self, models: Sequence[ModelPlan]) -> dict[tuple[str, Action, int], tuple[float, float]]:
        """(model, action, chunk) -> (a, b): micro-batch m scores a + b * m among the tasks of its kind."""
        draw = random.Random(f"policy/{self.seed}")
        found: dict[tuple[str, Action, int], tuple[float, float]] = {}
        for number, model in enumerate(models):
            count, chunks = model.num_micro_batches, model.num_chunks
            late = number * (1e-4 + 0.9 * self.stagger * model.num_stages / count)
            for chunk in range(chunks):
                noise = self.noise * draw.random() / count
                if self.plain:
                    forward = (1 - (chunk + 1) / (chunks + 1)) * 0.8 + noise, 0.1 / ((chunks + 1) * count)
                else:
                    forward = 0.4 + 0.2 * self.lag * chunk / (chunks * count) + 0.2 * noise, 0.2 / count
                backward = 0.05 + (chunks - chunk) * 1e-5 + self.noise * draw.random() / count, 0.9 / count
                found[model.name, "FORWARD", chunk] = forward[0] + late, forward[1]
                found[model.name, "BACKWARD", chunk] = backward[0] + late, backward[1]
                found[model.name, "WGRAD", chunk] = 0.05 + (chunks - chunk) * 1e-5 + late, 0.9 / count
        return found


def list_policies(seed: int, trains: bool) -> Iterator[Policy]:
    """The ones that do best on equal stages, then random ones without end."""
    if not trains:
        yield from _stream_policies(seed)
    yield from (Policy(), Policy(taper=0.75), Policy(taper=0.6, patience=0.5), Policy(taper=0.9))
    yield from (Policy(stagger=0.58), Policy(stagger=0.5), Policy(stagger=0.5, taper=0.75))
    yield from (Policy(plain=False, lag=lag) for lag in (-8.0, 8.0, 0.0))
    draw = random.Random(f"policies/{seed}")
    for number in itertools.count(1):
        yield Policy(
            plain=draw.random() < 0.5,
            taper=draw.choice((0.0, 0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 1.0)),
            patience=draw.choice((0.0, 0.0, 0.5)),
            lag=draw.uniform(-12, 12),
            stagger=draw.choice((0.0, draw.uniform(0, 0.75))),
            noise=draw.choice((0.0, 0.3, 1.0, 3.0)),
            seed=number,
        )


def _stream_policies(seed: int) -> Iterator[Policy]:
    """For forward passes only: models side by side at the same progress, later chunks of a model held back a little."""
    yield from (Policy(plain=False, lag=lag) for lag in (8.0, 4.0, 0.0))
    draw = random.Random(f"stream/{seed}")
    for number in itertools.count(1):
        yield Policy(plain=False, lag=draw.uniform(2, 12), noise=draw.choice((1.0, 2.0, 3.0)), seed=number)
