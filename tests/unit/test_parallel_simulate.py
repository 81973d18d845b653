"""Simulated idle shares: equal to the formulas where these are exact, within the goals where they are bounds."""

from __future__ import annotations

import time

import pytest

from megarl.parallel import bounds
from megarl.parallel.costs import Costs, ModelCosts, ratio_costs, ratio_costs_of
from megarl.parallel.generators import (
    plan_1f1b,
    plan_fused,
    plan_gpipe,
    plan_in_turn,
    plan_interleaved,
    plan_stream,
    plan_zb_h1,
)
from megarl.parallel.list_schedule import lower_bound
from megarl.parallel.picker import pick_update, plan_chunk_stages
from megarl.parallel.schedule import ModelPlan, interleaved, linear, reversed_v, v_shape
from megarl.parallel.simulate import Timeline, simulate

PAIRS = [(stages, count) for stages in (1, 2, 4, 8, 16) for count in (4, 8, 16, 64)]


def one(stages: int, count: int, chunks: int = 1, splits: bool = False) -> ModelPlan:
    return ModelPlan("actor", interleaved(stages, chunks), (count,), splits=splits)


def fused(stages: int, count: int, weight_grad: float = 1.0) -> Timeline:
    models = [
        ModelPlan("actor", v_shape(stages), (count,), splits=True),
        ModelPlan("critic", reversed_v(stages), (count,), splits=True),
    ]
    costs = ratio_costs_of(models, weight_grad)
    return simulate(plan_fused(models, costs), costs)


@pytest.mark.parametrize(("stages", "count"), PAIRS)
def test_1f1b_and_gpipe_idle_as_the_formula_says(stages: int, count: int) -> None:
    model = one(stages, count)
    for plan in (plan_1f1b, plan_gpipe):
        line = simulate(plan_in_turn("x", [model], plan), ratio_costs_of([model]))
        assert line.idle_share == pytest.approx(bounds.idle_1f1b(stages, count))


@pytest.mark.parametrize(("stages", "count"), [(s, c) for s, c in PAIRS if c % s == 0])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_idles_as_the_formula_says(stages: int, count: int, chunks: int) -> None:
    model = one(stages, count, chunks)
    line = simulate(plan_in_turn("x", [model], plan_interleaved), ratio_costs_of([model]))
    assert line.idle_share == pytest.approx(bounds.idle_interleaved(stages, count, chunks))


@pytest.mark.parametrize(("stages", "count"), [(s, c) for s, c in PAIRS if c >= s])
def test_zb_h1_idles_as_the_formula_says_and_holds_what_1f1b_holds(stages: int, count: int) -> None:
    model = one(stages, count, splits=True)
    line = simulate(plan_in_turn("x", [model], plan_zb_h1), ratio_costs_of([model]))
    assert line.idle_share == pytest.approx(bounds.idle_zero_bubble(stages, count))
    assert max(line.peak_live) == stages


@pytest.mark.parametrize(
    ("stages", "count", "goal"), [(4, 8, 0.015), (8, 8, 0.04), (16, 16, 0.045), (8, 16, 0.02), (16, 64, 0.015)]
)
def test_v_and_reversed_v_reach_the_goal_with_one_activation_more_than_stages(
    stages: int, count: int, goal: float
) -> None:
    begin = time.process_time()
    line = fused(stages, count)
    assert time.process_time() - begin < 1.0
    assert bounds.idle_fused(stages, count) - 1e-9 <= line.idle_share <= goal
    assert max(line.peak_live) <= stages + 1


@pytest.mark.parametrize(("stages", "count", "goal"), [(4, 8, 0.015), (8, 8, 0.04), (16, 16, 0.055)])
def test_cheaper_weight_gradients_cost_little(stages: int, count: int, goal: float) -> None:
    line = fused(stages, count, weight_grad=0.75)
    assert line.idle_share <= goal and max(line.peak_live) <= stages + 1


@pytest.mark.parametrize(("stages", "count", "goal"), [(8, 8, 0.135), (4, 8, 0.05), (16, 16, 0.2)])
def test_three_models_pass_as_one_stream_from_both_ends(stages: int, count: int, goal: float) -> None:
    shapes = {"old": v_shape(stages), "ref": v_shape(stages), "values": reversed_v(stages)}
    models = [ModelPlan(name, shape, (count,), trains=False) for name, shape in shapes.items()]
    costs = ratio_costs_of(models)
    share = simulate(plan_stream(models, costs), costs).idle_share
    assert bounds.idle_stream_v(stages, count, 3) - 1e-9 <= share <= goal


def test_a_stream_down_the_stages_fills_and_drains_once() -> None:
    models = [ModelPlan(name, linear(8), (8,), trains=False) for name in ("old", "ref", "values")]
    costs = ratio_costs_of(models)
    assert simulate(plan_stream(models, costs), costs).idle_share == pytest.approx(bounds.idle_stream(8, 8, 3))


def test_mini_batches_that_lag_fill_each_others_drain() -> None:
    """Four mini-batches one after the other would each idle 3 %; staggered, all together do less than 2."""
    models = [
        ModelPlan("actor", v_shape(8), (8,) * 4, steps=True, splits=True),
        ModelPlan("critic", reversed_v(8), (8,) * 4, steps=True, splits=True),
    ]
    costs = ratio_costs_of(models)
    line = simulate(plan_fused(models, costs), costs)
    assert line.idle_share < 0.02 and max(line.peak_live) <= 9


def test_the_drawn_time_line() -> None:
    model = one(2, 2)
    line = simulate(plan_in_turn("x", [model], plan_1f1b), ratio_costs_of([model]))
    assert [[(span.start, span.end, str(span.step)) for span in stage] for stage in line.stages] == [
        [(0, 1, "F0"), (1, 2, "F1"), (4, 6, "B0"), (7, 9, "B1")],
        [(1, 2, "F0"), (2, 4, "B0"), (4, 5, "F1"), (5, 7, "B1")],
    ]
    assert line.makespan == 9 and line.idle_share == pytest.approx(1 / 3)


def test_a_transfer_delays_what_waits_for_it_and_nothing_else() -> None:
    model = one(2, 1)
    costs = Costs({"actor": ratio_costs(model)}, transfer=0.5)
    assert simulate(plan_in_turn("x", [model], plan_1f1b), costs).makespan == 1 + 0.5 + 1 + 2 + 0.5 + 2


def test_no_schedule_beats_the_lower_bound_for_uneven_micro_batches() -> None:
    models = [ModelPlan("actor", v_shape(4), (6,), splits=True), ModelPlan("critic", reversed_v(4), (5,), splits=True)]
    work = {"actor": (3.0, 1.0, 1.0, 2.0, 0.5, 1.0), "critic": (1.0, 1.0, 4.0, 1.0, 1.0)}
    costs = Costs({
        name: ModelCosts((1.0,) * 8, (1.2,) * 8, (0.7,) * 8, work=sizes) for name, sizes in work.items()
    })  # fmt: skip
    line = simulate(plan_fused(models, costs), costs)
    assert lower_bound(models, costs) <= line.makespan <= 1.25 * lower_bound(models, costs)


def test_auto_takes_the_fastest_that_fits_the_memory() -> None:
    models = [ModelPlan("actor", v_shape(8), (8,)), ModelPlan("critic", reversed_v(8), (8,))]
    costs = ratio_costs_of(models)
    picked = pick_update("auto", models, costs)
    assert picked.schedule.name == "fused" and set(picked.considered) == {"fused", "zero_bubble"}
    assert "predicted idle 3.0 %" in str(picked)
    assert pick_update("zero_bubble", models, costs).seconds > picked.seconds
    assert pick_update("auto", models, costs, max_live=5.0).peak_live <= 5.0


def test_one_stage_has_nothing_to_fill() -> None:
    models = [ModelPlan("actor", (0,), (4,))]
    assert pick_update("auto", models, ratio_costs_of(models)).schedule.name == "1f1b"


def test_a_schedule_that_does_not_fit_the_placement_is_refused() -> None:
    models = [ModelPlan("actor", v_shape(2), (4,))]
    with pytest.raises(ValueError, match=r"pipeline.schedule=1f1b does not fit"):
        pick_update("1f1b", models, ratio_costs_of(models))


def test_placements() -> None:
    assert plan_chunk_stages("auto", 2, 8) == (0, 1, 1, 0)
    assert plan_chunk_stages("fused", 2, 8, is_reversed=True) == (1, 0, 0, 1)
    assert plan_chunk_stages("fused", 2, 3, is_reversed=True) == (1, 0)
    assert plan_chunk_stages("interleaved", 2, 8) == (0, 1, 0, 1)
    assert plan_chunk_stages("1f1b", 2, 8) == (0, 1)
    with pytest.raises(ValueError, match=r"pipeline.schedule=interleaved"):
        plan_chunk_stages("interleaved", 2, 3)
