"""The one-forward-one-backward schedule, simulated: it ends, in order, within its memory, on any number of stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.parallel.schedule import Instruction, plan_1f1b, plan_forward_only


def simulate(plans: list[list[Instruction]]) -> list[int]:
    """Runs every stage's list, each instruction as soon as what it receives was sent.

    Returns:
        The most micro-batches whose activations each stage held at a time. Raises AssertionError on a dead-lock.
    """
    num_stages = len(plans)
    at = [0] * num_stages
    done: set[tuple[str, int, int]] = set()
    held, most = [0] * num_stages, [0] * num_stages
    while any(at[stage] < len(plans[stage]) for stage in range(num_stages)):
        moved = False
        for stage in range(num_stages):
            if at[stage] == len(plans[stage]):
                continue
            step = plans[stage][at[stage]]
            m = step.micro_batch
            if step.action == "F":
                is_ready = stage == 0 or ("F", m, stage - 1) in done
            else:
                is_ready = ("F", m, stage) in done and (stage == num_stages - 1 or ("B", m, stage + 1) in done)
            if is_ready:
                done.add((step.action, m, stage))
                held[stage] += 1 if step.action == "F" else -1
                most[stage] = max(most[stage], held[stage])
                at[stage] += 1
                moved = True
        assert moved, f"dead-lock at {[str(plan[i]) for plan, i in zip(plans, at, strict=True) if i < len(plan)]}"
    return most


@given(num_stages=st.integers(1, 16), num_micro_batches=st.integers(1, 40))
def test_1f1b_ends_with_every_micro_batch_done_once_within_its_memory(num_stages: int, num_micro_batches: int) -> None:
    plans = [plan_1f1b(num_stages, stage, num_micro_batches) for stage in range(num_stages)]
    most = simulate(plans)
    for stage, plan in enumerate(plans):
        expected = [Instruction(action, m) for action in ("B", "F") for m in range(num_micro_batches)]
        assert sorted(plan, key=str) == sorted(expected, key=str)
        assert most[stage] <= num_stages - stage


def test_the_drawn_example() -> None:
    assert [" ".join(map(str, plan_1f1b(2, stage, 3))) for stage in range(2)] == [
        "F0 F1 B0 F2 B1 B2",
        "F0 B0 F1 B1 F2 B2",
    ]


def test_the_simulation_finds_a_dead_lock() -> None:
    with pytest.raises(AssertionError, match="dead-lock"):
        simulate([[Instruction("F", 0), Instruction("B", 0)], [Instruction("B", 0), Instruction("F", 0)]])


def test_forward_only_is_every_micro_batch_in_order() -> None:
    assert [str(step) for step in plan_forward_only(3)] == ["F0", "F1", "F2"]
