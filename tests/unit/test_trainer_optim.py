"""The learning rate over time."""

from __future__ import annotations

import pytest

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
