"""Every generator's schedules end, in order, within their memory, on any number of stages, chunks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.parallel.checker import check_schedule
from megarl.parallel.costs import Costs, ModelCosts, ratio_costs_of
from megarl.parallel.generators import (
    plan_1f1b,
    plan_fused,
    plan_gpipe,
    plan_in_turn,
    plan_interleaved,
    plan_stream,
    plan_zero_bubble,
)
from megarl.parallel.schedule import (
    Instruction,
    ModelPlan,
    Orders,
    Schedule,
    build_schedule,
    interleaved,
    linear,
    reversed_linear,
    reversed_v,
    v_shape,
)

SIZES = {"stages": st.integers(1, 16), "count": st.integers(1, 64)}
SLOW = settings(max_examples=40, deadline=None)


def pair(stages: int, chunks: int, *counts: int, steps: bool = False, splits: bool = False) -> list[ModelPlan]:
    """An actor and a critic in the opposite direction, `chunks` a stage."""
    forth = v_shape(stages) if chunks == 2 else interleaved(stages, chunks)
    back = reversed_v(stages) if chunks == 2 else reversed_linear(stages) * chunks
    return [
        ModelPlan(name, at, counts, steps=steps, splits=splits) for name, at in (("actor", forth), ("critic", back))
    ]


def actions(schedule: Schedule, stage: int) -> str:
    return " ".join(map(str, schedule.stages[stage]))


@given(**SIZES, chunks=st.integers(1, 4), steps=st.booleans())
@SLOW
def test_gpipe_is_proved_and_holds_every_micro_batch(stages: int, count: int, chunks: int, steps: bool) -> None:
    models = pair(stages, chunks, count, steps=steps)
    assert check_schedule(plan_in_turn("gpipe", models, plan_gpipe)).peak_live == pytest.approx([count] * stages)


@given(**SIZES)
@SLOW
def test_1f1b_is_proved_and_holds_fewer_on_later_stages(stages: int, count: int) -> None:
    schedule = plan_in_turn("1f1b", [ModelPlan("actor", linear(stages), (count,))], plan_1f1b)
    assert check_schedule(schedule).peak_live == tuple(min(count, stages - stage) for stage in range(stages))


@given(**SIZES, chunks=st.integers(1, 4))
@SLOW
def test_interleaved_is_proved_for_numbers_that_stages_do_not_divide(stages: int, count: int, chunks: int) -> None:
    model = ModelPlan("actor", interleaved(stages, chunks), (count, count), steps=True)
    peak = max(check_schedule(plan_in_turn("interleaved", [model], plan_interleaved)).peak_live)
    assert peak <= (2 if chunks > 1 else 1) * stages


@given(**SIZES, chunks=st.integers(1, 4))
@SLOW
def test_zero_bubble_is_proved(stages: int, count: int, chunks: int) -> None:
    model = pair(stages, chunks, count, splits=True)[0]
    costs = ratio_costs_of([model])
    peak = max(check_schedule(plan_in_turn("zb", [model], lambda model: plan_zero_bubble(model, costs))).peak_live)
    assert peak <= stages + (0 if chunks == 1 else 1)


@given(**SIZES, chunks=st.integers(1, 4), splits=st.booleans(), data=st.data())
@SLOW
def test_fused_is_proved_for_any_costs(stages: int, count: int, chunks: int, splits: bool, data: st.DataObject) -> None:
    other = data.draw(st.integers(1, 64), "the critic's micro-batches")
    actor, critic = pair(stages, chunks, count, splits=splits)
    models = [actor, replace(critic, mini_batches=(other,))]
    draw = st.floats(0.1, 3.0)

    def costs(model: ModelPlan) -> ModelCosts:
        forward, inputs, weights = (data.draw(st.tuples(*[draw] * model.num_chunks)) for _ in range(3))
        work = data.draw(st.lists(draw, min_size=model.num_micro_batches, max_size=model.num_micro_batches))
        return ModelCosts(forward, inputs, weights, work=tuple(work))

    check_schedule(plan_fused(models, Costs({model.name: costs(model) for model in models}, transfer=0.05)))


@given(stages=st.integers(1, 16), counts=st.lists(st.integers(1, 16), min_size=1, max_size=4), chunks=st.integers(1, 4))
@SLOW
def test_fused_mini_batches_take_their_steps_in_order(stages: int, counts: list[int], chunks: int) -> None:
    models = pair(stages, chunks, *counts, steps=True, splits=True)
    schedule = plan_fused(models, ratio_costs_of(models))
    check_schedule(schedule)
    steps = [[step for step in stage if step.action == "STEP"] for stage in schedule.stages]
    assert all(each == steps[0] for each in steps) and len(steps[0]) == 2 * len(counts)


@given(**SIZES, chunks=st.integers(1, 4), num_models=st.integers(1, 4), turned=st.integers(0, 3))
@SLOW
def test_a_stream_is_proved(stages: int, count: int, chunks: int, num_models: int, turned: int) -> None:
    forth, back = (model.chunk_stages for model in pair(stages, chunks, 1))
    models = [
        ModelPlan(f"model {n}", back if n == turned else forth, (count + n,), trains=False) for n in range(num_models)
    ]
    check_schedule(plan_stream(models, ratio_costs_of(models)))


def test_the_drawn_example() -> None:
    schedule = plan_in_turn("1f1b", [ModelPlan("actor", linear(2), (3,))], plan_1f1b)
    assert actions(schedule, 0) == "F0 >F0 F1 >F1 <B0 B0 F2 >F2 <B1 B1 <B2 B2 S2"
    assert actions(schedule, 1) == "<F0 F0 B0 >B0 <F1 F1 B1 >B1 <F2 F2 B2 >B2 S2"


def test_the_turn_of_a_v_needs_no_transfer() -> None:
    schedule = plan_in_turn("v", [ModelPlan("actor", v_shape(2), (1,))], plan_gpipe)
    assert actions(schedule, 1) == "<F0 F0 F0 >F0 <B0 B0 S0 B0 >B0 S0"


ORDER = plan_1f1b(ModelPlan("a", linear(2), (2,)))
F, B = (
    (lambda m, chunk: Instruction("FORWARD", "a", m, chunk)),
    (lambda m, chunk: Instruction("BACKWARD", "a", m, chunk)),
)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ([[F(0, 0), B(0, 0), F(1, 0), B(1, 0)], [F(0, 1), F(1, 1), B(0, 1), B(1, 1)]], "dead-lock"),
        ([ORDER[0], [F(0, 1), F(1, 1), B(1, 1), B(0, 1)]], "not its turn"),
        ([ORDER[0], [*ORDER[1], F(2, 1)]], "nobody sends what it needs"),
        ([ORDER[0], ORDER[1][:-1]], "nobody sends what it needs"),
    ],
    ids=["backward before the next forward", "backwards turned round", "one too many", "one missing"],
)
def test_a_wrong_order_is_refused(orders: Orders, message: str) -> None:
    model = ModelPlan("a", linear(2), (2,))
    with pytest.raises(AssertionError, match=message):
        check_schedule(build_schedule("wrong", [model], orders))


def broken(change: Callable[[list[list[Instruction]]], object]) -> Schedule:
    """The fused schedule of two stages with one thing changed."""
    models = pair(2, 2, 4, splits=True)
    schedule = plan_fused(models, ratio_costs_of(models))
    lists = [list(stage) for stage in schedule.stages]
    change(lists)
    return replace(schedule, stages=tuple(map(tuple, lists)))


def swap(lists: list[list[Instruction]], action: str) -> None:
    """Turns the first two instructions of this kind and chunk round."""
    found = [i for i, step in enumerate(lists[0]) if step.action == action]
    alike = [
        i
        for i in found
        if (lists[0][i].model, lists[0][i].chunk) == (lists[0][found[0]].model, lists[0][found[0]].chunk)
    ]
    first, second = (alike if len(alike) > 1 else found)[:2]
    lists[0][first], lists[0][second] = lists[0][second], lists[0][first]


@pytest.mark.parametrize("action", ["SEND_F", "RECV_F", "SEND_B", "RECV_B", "WGRAD", "GRAD_SYNC"])
def test_instructions_out_of_order_are_refused(action: str) -> None:
    with pytest.raises(AssertionError):
        check_schedule(broken(lambda lists: swap(lists, action)))


@pytest.mark.parametrize("action", ["SEND_F", "RECV_F", "FORWARD", "BACKWARD", "WGRAD", "GRAD_SYNC"])
def test_an_instruction_that_is_missing_is_found(action: str) -> None:
    def drop(lists: list[list[Instruction]]) -> None:
        del lists[0][max(i for i, step in enumerate(lists[0]) if step.action == action)]

    with pytest.raises(AssertionError):
        check_schedule(broken(drop))
