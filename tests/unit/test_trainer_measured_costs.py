"""Measured costs: what the next schedule is picked with."""

from __future__ import annotations

import pytest

from megarl.parallel.schedule import ModelPlan, v_shape
from megarl.trainer.measured_costs import Profile

ACTOR = ModelPlan("actor", v_shape(1), (2,), splits=True)
CRITIC = ModelPlan("critic", v_shape(1), (2,), splits=True)
ROWS = ((1.0, 2.0, 0.5, 0.0), (3.0, 0.0, 0.0, 5.0))  # the second chunk was only run unsplit


def test_what_is_measured_is_used_per_token() -> None:
    costs = Profile({"actor": ROWS}, {"actor": 7.0}).costs([ACTOR], {"actor": (10.0, 20.0)}).models["actor"]
    assert costs.forward == (1.0, 3.0) and costs.work == (10.0, 20.0) and costs.step == 7.0
    assert costs.input_grad == (2.0, 2.5) and costs.weight_grad == (0.5, 2.5), "an unsplit backward is halved"


def test_a_model_that_was_not_measured_makes_all_equal() -> None:
    costs = Profile({"actor": ROWS}).costs([ACTOR, CRITIC], {"actor": (10.0, 20.0), "critic": (30.0, 60.0)})
    assert costs.models["actor"].forward == costs.models["critic"].forward
    actor, critic = costs.models["actor"].work, costs.models["critic"].work
    assert [three / one for one, three in zip(actor, critic, strict=True)] == pytest.approx([3.0, 3.0])
