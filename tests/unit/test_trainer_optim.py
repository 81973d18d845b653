"""The learning rate over time."""

from __future__ import annotations

import pytest

from megarl.config.schema import OptimConfig
from megarl.job import build_optimizer_options
from megarl.trainer.optim import LRSchedule


def rates(decay: str, steps: int, floor: float = 0.2) -> list[float]:
    schedule = LRSchedule(peak=1.0, floor=floor, warmup_steps=4, decay=decay, decay_steps=8)
    return [schedule.at(step) for step in range(steps)]


def test_warm_up_rises_linearly_and_is_never_zero() -> None:
    assert rates("constant", 7) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1])


def test_linear_decay_ends_at_the_floor_and_stays() -> None:
    assert rates("linear", 11)[4:] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_decay_is_half_way_at_half_time() -> None:
    assert rates("cosine", 10)[4:] == pytest.approx([1, 0.8828427, 0.6, 0.3171573, 0.2, 0.2])


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert LRSchedule(3e-5, 0.0, 0, "linear", 10).at(0) == 3e-5


@pytest.mark.parametrize(("steps", "ratio", "expected"), [(0, 0.1, 5), (3, 0.0, 3), (0, 0.0, 0)])
def test_the_warm_up_may_be_a_share_of_the_run(steps: int, ratio: float, expected: int) -> None:
    optim = OptimConfig(lr_warmup_steps=steps, lr_warmup_steps_ratio=ratio)
    assert build_optimizer_options(optim, 50)[1].warmup_steps == expected
