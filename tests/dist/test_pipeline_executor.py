"""The executor with stages that only sleep: every kind of schedule runs as processes, in the time that was simulated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megarl.parallel.costs import Costs, ratio_costs
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.picker import Choice, pick_stream, pick_update
from megarl.parallel.pipeline import PipelineStalled, run_instructions
from megarl.parallel.schedule import ModelPlan, interleaved, linear, reversed_linear, reversed_v, v_shape
from megarl.parallel.simulate import simulate
from megarl.parallel.synthetic import build_sleeping_model
from megarl.parallel.topology import Topology
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(600)

MS = 1e-3


def plan_models(stages: int, kind: str) -> list[ModelPlan]:
    """Actor and critic, three and five micro-batches in two mini-batches each."""
    actor, critic = {
        "linear": (linear(stages), linear(stages)),
        "opposite": (linear(stages), reversed_linear(stages)),
        "interleaved": (interleaved(stages, 2),) * 2,
        "v": (v_shape(stages), reversed_v(stages)),
    }[kind]
    return [ModelPlan("actor", actor, (3, 5), steps=True), ModelPlan("critic", critic, (5, 3), steps=True)]


def run_one(models: list[ModelPlan], choice: Choice, cache: GroupCache, unit_s: float) -> tuple[float, float]:
    """Seconds that a schedule takes on these ranks (the least of three: others may use the machine), and seconds that
    were simulated."""
    ranks = tuple(range(dist.get_world_size()))
    costs = Costs({model.name: ratio_costs(model, unit_s, unit_s, unit_s, step=unit_s) for model in models})
    trains = models[0].trains
    picked = pick_update(choice, models, costs) if trains else pick_stream(models, costs)
    stages = {}
    for model in picked.schedule.models:
        groups = build_groups(Topology(ranks, pp_size=len(ranks), chunk_stages=model.chunk_stages), cache)
        assert groups is not None
        stages[model.name] = build_sleeping_model(model, costs, groups)
    took = float("inf")
    spans = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        spans = run_instructions(picked.schedule, dist.get_rank(), stages)
        dist.barrier()
        took = min(took, time.perf_counter() - begin)
    computed = [step for step in picked.schedule.stages[dist.get_rank()] if step.action in ("FORWARD", "BACKWARD")]
    assert len([span for span in spans if span.step.action in ("FORWARD", "BACKWARD")]) == len(computed)
    return took, simulate(picked.schedule, costs).makespan


KINDS: list[tuple[str, Choice]] = [
    ("linear", "1f1b"),
    ("linear", "zero_bubble"),
    ("opposite", "fused"),
    ("interleaved", "interleaved"),
    ("v", "zero_bubble"),
    ("v", "fused"),
]


def run_all(rank: int, world_size: int) -> list[tuple[float, float]]:
    cache = GroupCache(60)
    times = [run_one(plan_models(world_size, kind), choice, cache, 4 * MS) for kind, choice in KINDS]
    shapes = {"old": v_shape(world_size), "ref": v_shape(world_size), "values": reversed_v(world_size)}
    stream = [ModelPlan(name, shape, (4,), trains=False) for name, shape in shapes.items()]
    return [*times, run_one(stream, "auto", cache, 4 * MS)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_schedule_runs_in_about_the_simulated_time(world_size: int) -> None:
    for times in zip(*run_ranks(run_all, world_size), strict=True):
        for took, simulated in times:
            assert simulated * 0.95 < took < simulated * 1.6 + 0.1, times


def run_with_a_hung_stage(rank: int, world_size: int) -> str:
    cache = GroupCache(3)
    plan = ModelPlan("actor", linear(world_size), (4,))
    costs = Costs({"actor": ratio_costs(plan, MS, MS, MS)})
    groups = build_groups(Topology(tuple(range(world_size)), pp_size=world_size), cache)
    assert groups is not None
    schedule = pick_update("1f1b", [plan], costs).schedule
    model = build_sleeping_model(plan, costs, groups)
    if rank == 1:
        lists = list(schedule.stages)
        stop = next(i for i, step in enumerate(lists[1]) if step.action == "FORWARD" and step.micro_batch == 2)
        hung = schedule.stages[:1] + (lists[1][:stop],) + schedule.stages[2:]
        try:
            run_instructions(replace(schedule, stages=hung), rank, {"actor": model})
        except PipelineStalled:
            return "noticed"
        time.sleep(8)
        return "hung"
    begin = time.perf_counter()
    try:
        run_instructions(schedule, rank, {"actor": model})
    except PipelineStalled as error:
        assert time.perf_counter() - begin < 8, "told too late"
        return str(error)
    return "no error"


def test_a_hung_peer_is_named_with_instruction_and_micro_batch() -> None:
    first, _, last = run_ranks(run_with_a_hung_stage, 3, timeout_s=60)
    assert "rank 0 (actor tp0 pp0 dp0) waited at BACKWARD of actor, micro-batch" in first
    assert "for rank 1 (stage 1)" in first and "within 3 s" in first
    assert "rank 2 (actor tp0 pp2 dp0) waited at FORWARD of actor, micro-batch 2, chunk 2 for rank 1" in last


def watch_sent_activations(rank: int, world_size: int) -> tuple[int, int]:
    """How often an activation was still held when its backward was over, and how many are left at the end."""
    cache = GroupCache(60)
    plan = ModelPlan("actor", linear(world_size), (6,))
    costs = Costs({"actor": ratio_costs(plan, MS, MS, MS)})
    groups = build_groups(Topology(tuple(range(world_size)), pp_size=world_size), cache)
    assert groups is not None
    sleeping = build_sleeping_model(plan, costs, groups, size=1000)
    made: list[StorageWeakRef] = []
    num_backwards = held = 0

    def forward(chunk: int, micro_batch: int, received: Tensor | None) -> Tensor:
        output = sleeping.forward(chunk, micro_batch, received)
        made.append(StorageWeakRef(output.untyped_storage()))
        return output

    def after_backward(chunk: int) -> Callable[[], None]:
        nonlocal held, num_backwards
        num_backwards += 1
        held += len([each for each in made if each.expired()]) < num_backwards
        return lambda: None

    model = replace(sleeping, forward=forward, take_weight_gradients=after_backward)
    run_instructions(pick_update("1f1b", [plan], costs).schedule, rank, {"actor": model})
    return held, len([each for each in made if not each.expired()])


def test_a_sent_activation_is_freed_before_its_backward_ends() -> None:
    held, left = run_ranks(watch_sent_activations, 2)[0]
    assert held == 0 and left == 0
