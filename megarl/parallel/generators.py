"""The schedules by name: for given models, the order in which every stage computes. Pure.

    plan_stream          forward passes of several models back to back
    plan_gpipe           all forwards, then all backwards
    plan_1f1b            one forward, one backward
    plan_interleaved     1F1B over several chunks a stage
    plan_zero_bubble     weight gradients fill the gaps; one chunk a stage (ZB-H1) or two in a V (ZB-V)
    plan_fused           several models at once: in opposite directions, or in V and reversed V

Where models are not fused they run one after the other (`plan_in_turn`), mini-batch by mini-batch. The zero-bubble and
fused orders come from the list scheduler and follow the costs they are given; the others know no costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megarl.parallel.costs import Costs, ModelCosts
from megarl.parallel.list_schedule import search
from megarl.parallel.schedule import Action, Instruction, ModelPlan, Orders, Schedule, build_schedule, concatenate
from megarl.parallel.simulate import simulate


def plan_in_turn(name: str, models: Sequence[ModelPlan], plan: Callable[[ModelPlan], Orders]) -> Schedule:
    """Models one after the other on every stage, each by its own plan."""
    return build_schedule(name, models, concatenate(models[0].num_stages, [plan(model) for model in models]))


def plan_gpipe(model: ModelPlan) -> Orders:
    """All forwards, then all backwards (Huang et al. 2019)."""

    def order(model: ModelPlan, stage: int, first: int, count: int) -> list[Instruction]:
        chunks, batches = model.chunks_of(stage), range(first, first + count)
        forwards = [Instruction("FORWARD", model.name, m, chunk) for chunk in chunks for m in batches]
        return forwards + [Instruction("BACKWARD", model.name, m, chunk) for chunk in reversed(chunks) for m in batches]

    return _by_mini_batch(model, order)


def plan_1f1b(model: ModelPlan) -> Orders:
    """One forward, one backward (Narayanan et al. 2021); a stage holds at most `stages - stage` micro-batches."""
    assert model.chunks_per_stage == 1, f"{model.name}: 1f1b runs one chunk a stage, not {model.chunks_per_stage}"

    def order(model: ModelPlan, stage: int, first: int, count: int) -> list[Instruction]:
        chunk = model.chunk_stages.index(stage)
        warm_up = min(model.num_stages - chunk - 1, count)
        return _one_by_one(
            [Instruction("FORWARD", model.name, first + m, chunk) for m in range(count)],
            [Instruction("BACKWARD", model.name, first + m, chunk) for m in range(count)],
            warm_up,
        )

    return _by_mini_batch(model, order)


def plan_interleaved(model: ModelPlan) -> Orders:
    """1F1B over chunks that go round the stages (Narayanan et al. 2021).

    The published order wants a multiple of the stages; for other numbers it is made for the next multiple, and the
    micro-batches that do not exist are left out of it.
    """
    stages, per_stage = model.num_stages, model.chunks_per_stage
    assert model.chunk_stages == tuple(range(stages)) * per_stage, f"{model.name}: chunks lie {model.chunk_stages}"

    def order(model: ModelPlan, stage: int, first: int, count: int) -> list[Instruction]:
        chunks = model.chunks_of(stage)
        padded = -(-count // stages) * stages

        def in_groups(action: Action, sequence: Sequence[int]) -> list[Instruction]:
            return [
                Instruction(action, model.name, first + group + m, chunk)
                for group in range(0, padded, stages)
                for chunk in sequence
                for m in range(stages)
            ]

        forwards, backwards = in_groups("FORWARD", chunks), in_groups("BACKWARD", chunks[::-1])
        ahead = (stages - stage - 1) * (2 if per_stage > 1 else 1) + (per_stage - 1) * stages
        steps = _one_by_one(forwards, backwards, min(ahead, len(forwards)))
        return [step for step in steps if step.micro_batch < first + count]

    return _by_mini_batch(model, order)


def _one_by_one(forwards: list[Instruction], backwards: list[Instruction], warm_up: int) -> list[Instruction]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    steps = forwards[:warm_up]
    for m in range(warm_up, len(forwards)):
        steps += [forwards[m], backwards[m - warm_up]]
    return steps + backwards[len(forwards) - warm_up :]


def _by_mini_batch(model: ModelPlan, order: Callable[[ModelPlan, int, int, int], list[Instruction]]) -> Orders:
    """`order(model, stage, first micro-batch, number of micro-batches)` for each mini-batch, and a STEP after it."""
    assert model.trains and not model.splits, f"{model.name}: this order trains and splits no gradients"
    orders: Orders = [[] for _ in range(model.num_stages)]
    first = 0
    for count in model.mini_batches:
        for stage in range(model.num_stages):
            orders[stage] += order(model, stage, first, count)
            if model.steps:
                orders[stage].append(Instruction("STEP", model.name, first + count - 1, model.num_chunks - 1))
        first += count
    return orders


def plan_stream(models: Sequence[ModelPlan], costs: Costs) -> Schedule:
    """Forward passes of all micro-batches of all models, never drained in between.

    With every model down the stages one chunk each, they follow each other; else the list scheduler places them.
    """
    assert not any(model.trains for model in models), "a stream is forward only"
    stages = models[0].num_stages
    if len({model.chunk_stages for model in models}) == 1 and models[0].chunks_per_stage == 1:
        orders: Orders = [
            [
                Instruction("FORWARD", model.name, m, model.chunk_stages.index(stage))
                for model in models
                for m in range(model.num_micro_batches)
            ]
            for stage in range(stages)
        ]
        return build_schedule("stream", models, orders)
    joined, joined_costs, parts = _join_alike(models, costs)
    orders = search(joined, joined_costs, max_live=1.0).orders
    return build_schedule("stream", models, [[_undo(parts, step) for step in order] for order in orders])


Parts = dict[str, list[tuple[str, int]]]  # joined model -> by its micro-batch, the model and micro-batch it stands for


def _join_alike(models: Sequence[ModelPlan], costs: Costs) -> tuple[list[ModelPlan], Costs, Parts]:
    """Models on the same placement and of the same costs as one long model: they are one stream."""
    parts: Parts = {}
    joined: dict[tuple[tuple[int, ...], tuple[float, ...]], ModelPlan] = {}
    work: dict[str, tuple[float, ...]] = {}
    for model in models:
        own = costs.models[model.name]
        key = (model.chunk_stages, own.forward)
        count = model.num_micro_batches
        before = joined.get(key)
        name = model.name if before is None else before.name
        total = count + (0 if before is None else before.num_micro_batches)
        joined[key] = replace(model, name=name, mini_batches=(total,))
        parts.setdefault(name, []).extend((model.name, m) for m in range(count))
        work[name] = work.get(name, ()) + (own.work or (1.0,) * count)
    plans = list(joined.values())
    by_name: dict[str, ModelCosts] = {
        plan.name: replace(costs.models[plan.name], work=work[plan.name]) for plan in plans
    }
    return plans, Costs(by_name, costs.transfer, costs.are_seconds), parts


def _undo(parts: Parts, step: Instruction) -> Instruction:
    model, micro_batch = parts[step.model][step.micro_batch]
    return Instruction(step.action, model, micro_batch, step.chunk)


def plan_zb_h1(model: ModelPlan) -> Orders:
    """ZB-H1 (Qi et al. 2023): 1F1B with each weight gradient as many micro-batches late as the stage is from the first,
    so that every stage holds what the first one does."""
    assert model.splits and model.chunks_per_stage == 1, f"{model.name}: ZB-H1 splits gradients, one chunk a stage"
    orders = plan_1f1b(replace(model, splits=False))
    for stage, order in enumerate(orders):
        late = model.chunk_stages.index(stage)
        delayed: list[Instruction] = []
        waiting: list[Instruction] = []
        for step in order:
            if step.action == "STEP":
                delayed += waiting
                waiting = []
            delayed.append(step)
            if step.action == "BACKWARD":
                waiting.append(Instruction("WGRAD", step.model, step.micro_batch, step.chunk))
                if len(waiting) > late:
                    delayed.append(waiting.pop(0))
        orders[stage] = delayed + waiting
    return orders


def plan_zero_bubble(model: ModelPlan, costs: Costs, max_live: float | None = None) -> Orders:
    """The better of ZB-H1, where it applies, and what the list scheduler finds; on a V that is ZB-V (Qi et al. 2024).

    Args:
        max_live: micro-batches' activations on a stage; None = as many as 1F1B holds on its first stage.
    """
    cap = float(model.num_stages) if max_live is None else max_live
    found = search([model], costs, cap, num_tasks=20_000)
    if model.chunks_per_stage > 1:
        return found.orders
    by_rule = plan_zb_h1(model)
    seconds = simulate(build_schedule("zero_bubble", [model], by_rule), costs).makespan
    return by_rule if seconds <= found.makespan else found.orders


def plan_fused(models: Sequence[ModelPlan], costs: Costs, max_live: float | None = None) -> Schedule:
    """All models at once; each fills the other's gaps. Their `splits` are taken as they are.

    Args:
        max_live: micro-batches' activations on a stage for all models together; None = stages + 1.
    """
    cap = models[0].num_stages + 1.0 if max_live is None else max_live
    return build_schedule("fused", models, search(models, costs, cap).orders)
