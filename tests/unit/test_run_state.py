"""The small state of a run: JSON keeps every bit of it, and too many steps without an update end the run."""

from __future__ import annotations

import json

import pytest

from megarl.trainer.run_state import RunState, finish_step, run_state_from


def test_json_keeps_every_bit() -> None:
    state = RunState(7, 6, {"actor": 28, "critic": 29}, {"kl_coef": 0.1 + 0.2, "lagrange": 1e-310}, 1)
    assert run_state_from(json.loads(json.dumps(state.to_plain()))) == state


def test_so_many_steps_without_an_update_are_borne_and_no_more() -> None:  # case H5
    state = RunState()
    for num_skipped in (0, 1, 2, 0, 1, 1):
        finish_step(state, num_skipped, max_skipped_steps=2)
    assert (state.step, state.skipped_in_a_row) == (6, 2)
    with pytest.raises(RuntimeError, match=r"3 steps in a row .* the weights are those of step 4"):
        finish_step(state, 1, max_skipped_steps=2)
