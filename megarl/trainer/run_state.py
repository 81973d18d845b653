"""The small state of a run beside weights and optimizers: counters, and whatever steers itself from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class RunState:
    """What the main loop carries from step to step; a checkpoint holds it as JSON.

    step: finished steps.
    weights_version: the step whose actor the engines hold.
    updates: optimizer steps begun, by role, those left out included; the place in the learning-rate schedule.
    controllers: numbers that steer themselves, by name: `kl_coef`, multipliers of constraints.
    skipped_in_a_row: last steps whose gradients were not finite.
    """

    step: int = 0
    weights_version: int = 0
    updates: dict[str, int] = field(default_factory=dict)
    controllers: dict[str, float] = field(default_factory=dict)
    skipped_in_a_row: int = 0

    def to_plain(self) -> dict[str, Any]:
        """As numbers, texts and dictionaries. Floats keep every bit through JSON."""
        return asdict(self)


def run_state_from(plain: Mapping[str, Any]) -> RunState:
    """The inverse of `RunState.to_plain`."""
    return RunState(**dict(plain))


def finish_step(state: RunState, num_skipped: int, max_skipped_steps: int) -> None:
    """Counts a step.

    Args:
        num_skipped: its updates whose gradients were not finite.
        max_skipped_steps: so many such steps in a row are borne.

    Raises:
        RuntimeError: one more than that.
    """
    state.step += 1
    state.skipped_in_a_row = state.skipped_in_a_row + 1 if num_skipped else 0
    if state.skipped_in_a_row > max_skipped_steps:
        raise RuntimeError(
            f"{state.skipped_in_a_row} steps in a row had gradients that are not finite (trainer.max_skipped_steps="
            f"{max_skipped_steps}); the weights are those of step {state.step - state.skipped_in_a_row}"
        )
