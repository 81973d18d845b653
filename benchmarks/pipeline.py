"""Pipeline schedules: idle shares by simulation, and the executor as processes.

    python -m benchmarks.pipeline [--no-runs] [--draw docs/pipeline]

Simulated, one forward, input gradient and weight gradient costing one each (or 1.25 and 0.75): actor and critic one
after the other by 1F1B, interleaved 1F1B and zero bubble, and fused (V and reversed V); forward passes of three models.
Run: stages that only sleep, 4 and 8 processes, 1F1B one after the other against fused; and a small model on two ranks,
the same update by both. `executor_share_of_simulated` compares speed-ups: measured, and simulated with the costs that
the run itself measured. Idle shares are fractions.
"""

from __future__ import annotations

import argparse
import functools
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.measure import report
from megarl.obs.time_line import Block, draw_time_line
from megarl.parallel import bounds
from megarl.parallel.costs import Costs, ModelCosts, ratio_costs, ratio_costs_of
from megarl.parallel.generators import (
    plan_1f1b,
    plan_fused,
    plan_gpipe,
    plan_in_turn,
    plan_interleaved,
    plan_stream,
    plan_zero_bubble,
)
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.partition import plan_micro_batches
from megarl.parallel.picker import plan_chunk_stages
from megarl.parallel.pipeline import Measured, run_instructions
from megarl.parallel.schedule import (
    ModelPlan,
    Schedule,
    interleaved,
    linear,
    reversed_linear,
    reversed_v,
    v_shape,
)
from megarl.parallel.simulate import Timeline, simulate
from megarl.parallel.synthetic import build_sleeping_model
from megarl.parallel.topology import Topology, plan_topology
from tests.ranks import run_ranks

Figures = dict[str, float | int | str]
UNIT_S = 0.02  # a sleeping stage's forward


def pair(shape: tuple[int, ...], other: tuple[int, ...], count: int, splits: bool) -> list[ModelPlan]:
    return [ModelPlan(name, at, (count,), splits=splits) for name, at in (("actor", shape), ("critic", other))]


def build_schedules(stages: int, count: int, weight_grad: float = 1.0) -> dict[str, tuple[Schedule, Costs]]:
    """Every way to train an actor and a critic, by name."""
    found: dict[str, tuple[Schedule, Costs]] = {}
    line, v = linear(stages), v_shape(stages)
    plain = pair(line, line, count, False)
    found["1f1b"] = plan_in_turn("1f1b", plain, plan_1f1b), ratio_costs_of(plain, weight_grad)
    chunks = pair(interleaved(stages, 2), interleaved(stages, 2), count, False)
    found["interleaved"] = plan_in_turn("interleaved", chunks, plan_interleaved), ratio_costs_of(chunks, weight_grad)
    for name, shape in (("zb_h1", line), ("zb_v", v)):
        models = pair(shape, shape, count, True)
        costs = ratio_costs_of(models, weight_grad)
        found[name] = plan_in_turn(name, models, functools.partial(plan_zero_bubble, costs=costs)), costs
    opposite = pair(line, reversed_linear(stages), count, True)
    costs = ratio_costs_of(opposite, weight_grad)
    found["bidirectional"] = plan_fused(opposite, costs), costs
    both = pair(v, reversed_v(stages), count, True)
    costs = ratio_costs_of(both, weight_grad)
    found["fused"] = plan_fused(both, costs), costs
    return found


def simulate_table(figures: Figures) -> None:
    """Idle shares of all schedules, and what the formulas say."""
    print(f"{'idle, %':>9} {'1F1B':>13} {'interleaved':>13} {'ZB-H1':>13} {'ZB-V':>8} {'opposite':>13} {'fused':>13}")
    print(f"{'P/m':>9} {'':>13} {'(formula)':>13}")
    for stages in (2, 4, 8, 16):
        for count in (4, 8, 16, 32, 64):
            lines = {name: simulate(*each) for name, each in build_schedules(stages, count).items()}
            formulas = {
                "1f1b": bounds.idle_1f1b(stages, count),
                "interleaved": bounds.idle_interleaved(stages, count, 2),
                "zb_h1": bounds.idle_zero_bubble(stages, count),
                "bidirectional": bounds.idle_bidirectional(stages, count, splits=True),
                "fused": bounds.idle_fused(stages, count),
            }
            cells = []
            for name, line in lines.items():
                figures[f"idle_{name}_p{stages}_m{count}"] = line.idle_share
                formula = f" ({100 * formulas[name]:.1f})" if name in formulas else ""
                cells.append(f"{100 * line.idle_share:.1f}{formula}".rjust(8 if name == "zb_v" else 13))
            print(f"{stages:>6}/{count:<2} " + " ".join(cells))
            if (stages, count) == (8, 8):
                figures["live_activations_p8"] = max(lines["fused"].peak_live)
                figures["simulated_speedup_over_1f1b_p8_m8"] = lines["1f1b"].makespan / lines["fused"].makespan
                figures["simulated_speedup_over_zb_v_p8_m8"] = lines["zb_v"].makespan / lines["fused"].makespan


def simulate_variants(figures: Figures) -> None:
    """Cheaper weight gradients, critics of other sizes, staggered mini-batches, streams, and the time of a search."""
    for stages, count in ((4, 8), (8, 8), (16, 16)):
        for name, each in build_schedules(stages, count, weight_grad=0.75).items():
            figures[f"idle_{name}_w075_p{stages}_m{count}"] = simulate(*each).idle_share
    for size, name in ((0.5, "half"), (2.0, "double")):
        models = pair(v_shape(8), reversed_v(8), 8, True)
        costs = Costs({"actor": ratio_costs(models[0]), "critic": ratio_costs(models[1], size, size, size)})
        figures[f"idle_fused_{name}_critic_p8_m8"] = simulate(plan_fused(models, costs), costs).idle_share
    staggered = [
        replace(model, mini_batches=(8,) * 4, steps=True) for model in pair(v_shape(8), reversed_v(8), 8, True)
    ]
    costs = ratio_costs_of(staggered)
    figures["idle_fused_4_mini_batches_p8_m8"] = simulate(plan_fused(staggered, costs), costs).idle_share
    for stages, count in ((4, 8), (8, 8), (16, 16)):
        figures[f"idle_forward_p{stages}_m{count}"] = simulate(*build_stream(stages, count)).idle_share
        figures[f"idle_forward_bound_p{stages}_m{count}"] = bounds.idle_stream_v(stages, count, 3)
    slowest = 0.0
    for stages, count in ((4, 8), (8, 8), (8, 64), (16, 16), (16, 64)):
        for weight_grad in (1.0, 0.75):
            models = pair(v_shape(stages), reversed_v(stages), count, True)
            begin = time.perf_counter()
            plan_fused(models, ratio_costs_of(models, weight_grad))
            slowest = max(slowest, time.perf_counter() - begin)
    figures["search_s"] = slowest


def build_stream(stages: int, count: int) -> tuple[Schedule, Costs]:
    """Old log-probs, reference and values as one stream."""
    shapes = {"old": v_shape(stages), "ref": v_shape(stages), "values": reversed_v(stages)}
    models = [ModelPlan(name, shape, (count,), trains=False) for name, shape in shapes.items()]
    costs = ratio_costs_of(models)
    return plan_stream(models, costs), costs


def simulate_uneven(figures: Figures) -> None:
    """Long-tailed lengths: micro-batches under a token budget against as many of a fixed number of sequences."""
    draw = random.Random(1)
    lengths = [min(8192, int(draw.lognormvariate(6.5, 1.0)) + 16) for _ in range(256)]
    budgeted = [sum(lengths[row] for row in rows) for rows in plan_micro_batches(lengths, max_tokens=16384)]
    size = -(-len(lengths) // len(budgeted))
    counted = [sum(lengths[first : first + size]) for first in range(0, len(lengths), size)]
    seconds: dict[str, float] = {}
    for name, work in (("budget", budgeted), ("count", counted)):
        mean = sum(work) / len(work)
        models = pair(v_shape(8), reversed_v(8), len(work), True)
        shares = tuple(each / mean for each in work)
        costs = Costs({model.name: replace(ratio_costs(model), work=shares) for model in models})
        line = simulate(plan_fused(models, costs), costs)
        seconds[name] = line.makespan * mean
        figures[f"idle_uneven_{name}_p8"] = line.idle_share
        figures[f"uneven_{name}_micro_batches"] = len(work)
        figures[f"uneven_{name}_largest_over_mean"] = max(work) / mean
    figures["uneven_speedup_of_budget"] = seconds["count"] / seconds["budget"]


def run_sleeping(rank: int, world_size: int, count: int) -> dict[str, tuple[float, list[Measured]]]:
    """Seconds and measured computations of 1F1B one after the other and of the fused schedule, on this rank."""
    cache = GroupCache(120)
    results: dict[str, tuple[float, list[Measured]]] = {}
    schedules = build_schedules(world_size, count)
    for name in ("1f1b", "fused"):
        schedule, costs = schedules[name]
        costs = scale(costs, UNIT_S)
        models = {}
        for model in schedule.models:
            topology = Topology(tuple(range(world_size)), pp_size=world_size, chunk_stages=model.chunk_stages)
            groups = build_groups(topology, cache)
            assert groups is not None
            models[model.name] = build_sleeping_model(model, costs, groups, size=4096)
        best: tuple[float, list[Measured]] | None = None
        for _ in range(2):
            dist.barrier()
            begin = time.perf_counter()
            spans = run_instructions(schedule, rank, models)
            dist.barrier()
            took = time.perf_counter() - begin
            if best is None or took < best[0]:
                best = took, spans
            models = {  # fresh ones: they count their micro-batches
                each.name: build_sleeping_model(each, costs, models[each.name].groups, size=4096)
                for each in schedule.models
            }
        assert best is not None
        results[name] = best
    return results


def scale(costs: Costs, unit: float) -> Costs:
    def times(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value * unit for value in values)

    return Costs({
        name: ModelCosts(times(each.forward), times(each.input_grad), times(each.weight_grad), work=each.work)
        for name, each in costs.models.items()
    })  # fmt: skip


def measured_costs(schedule: Schedule, spans: Sequence[Measured]) -> Costs:
    """Mean seconds of each computation of each chunk, as the run measured them."""
    found: dict[str, ModelCosts] = {}
    for model in schedule.models:

        def mean(action: str, chunk: int, name: str = model.name) -> float:
            own = [
                s.end - s.start for s in spans if (s.step.action, s.step.model, s.step.chunk) == (action, name, chunk)
            ]
            return sum(own) / len(own) if own else 0.0

        chunks = range(model.num_chunks)
        kinds = ("FORWARD", "BACKWARD", "WGRAD")
        found[model.name] = ModelCosts(*(tuple(mean(kind, chunk) for chunk in chunks) for kind in kinds))
    return Costs(found)


def run_executor(figures: Figures) -> None:
    """Sleeping stages as processes: speed-up of fused over 1F1B, measured and simulated."""
    shares = []
    for stages in (4, 8):
        by_rank = run_ranks(run_sleeping, stages, 8, timeout_s=300)
        schedules = build_schedules(stages, 8)
        took, simulated = {}, {}
        for name in ("1f1b", "fused"):
            took[name] = max(result[name][0] for result in by_rank)
            spans = [span for result in by_rank for span in result[name][1]]
            simulated[name] = simulate(schedules[name][0], measured_costs(schedules[name][0], spans)).makespan
            figures[f"executor_{name}_run_over_simulated_p{stages}"] = took[name] / simulated[name]
        measured = took["1f1b"] / took["fused"]
        figures[f"run_speedup_sleeping_p{stages}"] = measured
        figures[f"simulated_speedup_sleeping_p{stages}"] = simulated["1f1b"] / simulated["fused"]
        shares.append(measured / (simulated["1f1b"] / simulated["fused"]))
    figures["executor_share_of_simulated"] = min(shares)


def run_model(rank: int, world_size: int, path: str, rounds: int, length: int) -> dict[str, float]:
    """One update of a small actor and critic, one after the other and fused: seconds, and how far apart they end."""
    from megarl.algo.objective import policy_objective, value_objective
    from megarl.models.build import BuildOptions
    from megarl.models.forward import compute_values, run_policy_head
    from megarl.models.registry import read_model_spec
    from megarl.parallel.picker import Choice
    from megarl.trainer.measured_costs import Profile, merge_profile
    from megarl.trainer.optim import AdamOptions, LRSchedule
    from megarl.trainer.roles import Role, build_role
    from megarl.trainer.update import PipelineOptions, Task, update_roles
    from megarl.weights.gather import gather_hf_tensors
    from tests.tiny import build_batch

    batch = build_batch([32] * 8, [length - 32] * 8)
    generator = torch.Generator().manual_seed(3)
    old, goal = (torch.randn(batch.num_tokens, generator=generator) for _ in range(2))
    learns = AdamOptions(0.0, (0.9, 0.99), 1e-8, 1.0), LRSchedule(1e-4, 0.0, 0, "constant", 1)
    cache = GroupCache(300)
    family, spec = read_model_spec(path)
    rows = [list(range(8))]
    seconds: dict[str, list[float]] = {"1f1b": [], "fused": []}
    weights: dict[str, list[torch.Tensor]] = {"1f1b": [], "fused": []}
    roles: dict[str, list[Role]] = {}
    topologies: dict[tuple[str, str], Topology] = {}

    def open_roles(choice: Choice) -> list[Role]:
        opened = []
        for name in ("actor", "critic"):
            stages = plan_chunk_stages(choice, world_size, spec.num_layers, is_reversed=name == "critic")
            topologies[choice, name] = replace(plan_topology(name, world_size, pp=world_size), chunk_stages=stages)
            options = BuildOptions(torch.float32, head="value" if name == "critic" else "policy")
            groups = build_groups(topologies[choice, name], cache)
            role = build_role(name, groups, path, options, max_tokens=512, max_sequences=1, learns=learns)
            assert role is not None
            opened.append(role)
        return opened

    def tasks(choice: str) -> list[Task]:
        actor, critic = roles[choice]

        def policy(hidden, micro, weights):
            pick = micro.token_index

            def token_loss(logprobs, entropy, part):
                return policy_objective(
                    logprobs, entropy, logprobs.detach(), old[pick][part], weights.loss[pick][part],
                    weights.mask[pick][part], clip_low=0.2, clip_high=0.2, clip_c=3.0,
                )  # fmt: skip

            return run_policy_head(actor.model, hidden, micro, actor.groups, 1.0, actor.num_ids, token_loss)

        def value(hidden, micro, weights):
            pick = micro.token_index
            predicted = compute_values(critic.model, hidden, micro, critic.groups)
            return value_objective(
                predicted, old[pick], goal[pick], weights.loss[pick], weights.mask[pick], clip_range=9.0
            )

        return [Task(actor, rows, policy, "token-mean", 0), Task(critic, rows, value, "token-mean", 0)]

    profiles = {"1f1b": Profile(), "fused": Profile()}
    choices: tuple[Choice, Choice] = ("1f1b", "fused")
    for choice in choices:
        roles[choice] = open_roles(choice)
    for number in range(rounds + 1):
        for choice in choices:
            dist.barrier()
            begin = time.perf_counter()
            runs = []
            for group in [tasks(choice)] if choice == "fused" else [[task] for task in tasks(choice)]:
                options = PipelineOptions(choice)
                runs.append(update_roles(group, batch, batch.response_mask, options, profiles[choice])[1])
            dist.barrier()
            took = time.perf_counter() - begin
            chunks = {name: topologies[choice, name].num_chunks for name in ("actor", "critic")}
            profiles[choice], _ = merge_profile(profiles[choice], runs, chunks)
            if number:
                seconds[choice].append(took)
            else:
                for role, head in zip(roles[choice], ("policy", "value"), strict=True):
                    tensors = gather_hf_tensors(
                        family,
                        spec,
                        topologies[choice, role.name],
                        role.weights(),
                        torch.float32,
                        torch.device("cpu"),
                        head,
                    )
                    weights[choice] += [tensor.clone() for _, tensor in tensors]
    apart = max(
        float((one - other).norm() / other.norm().clamp(min=1e-12))
        for one, other in zip(weights["fused"], weights["1f1b"], strict=True)
    )
    return {"1f1b": min(seconds["1f1b"]), "fused": min(seconds["fused"]), "apart": apart}


def run_two_ranks(figures: Figures, rounds: int = 4, length: int = 256) -> None:
    from tests.tiny import save_hf_model

    with tempfile.TemporaryDirectory() as folder:
        path = save_hf_model(
            Path(folder) / "model", "llama", num_hidden_layers=8, hidden_size=384, intermediate_size=1024,
            num_attention_heads=6, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        )  # fmt: skip
        slowest = [
            max(each)
            for each in zip(
                *(r.values() for r in run_ranks(run_model, 2, path, rounds, length, timeout_s=400)), strict=True
            )
        ]
    figures["run_1f1b_2_ranks_s"], figures["run_fused_2_ranks_s"], figures["run_weights_apart_2_ranks"] = slowest
    figures["run_speedup_2_ranks"] = slowest[0] / slowest[1]


def to_blocks(line: Timeline) -> list[Block]:
    return [
        Block(stage, span.start, span.end, span.step.action, span.step.model, span.step.micro_batch, span.step.chunk)
        for stage, spans in enumerate(line.stages)
        for span in spans
    ]


def draw(folder: Path) -> None:
    """One picture for each schedule, four stages and four micro-batches of each model."""
    folder.mkdir(parents=True, exist_ok=True)
    stages, count = 4, 4
    schedules = build_schedules(stages, count)
    plain = pair(linear(stages), linear(stages), count, False)
    schedules["gpipe"] = plan_in_turn("gpipe", plain, plan_gpipe), ratio_costs_of(plain)
    schedules["stream"] = build_stream(stages, count)
    for name, each in schedules.items():
        line = simulate(*each)
        title = f"{name}: {stages} stages, {count} micro-batches, {100 * line.idle_share:.1f} % idle"
        draw_time_line(folder / f"{name}.png", to_blocks(line), title, "stage")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-runs", action="store_true", help="only what is simulated")
    parser.add_argument("--draw", type=Path, help="only draw the schedules into this folder")
    arguments = parser.parse_args()
    if arguments.draw is not None:
        draw(arguments.draw)
        return
    figures: Figures = {}
    simulate_table(figures)
    simulate_variants(figures)
    simulate_uneven(figures)
    if not arguments.no_runs:
        run_executor(figures)
        run_two_ranks(figures)
    report("pipeline", figures)


if __name__ == "__main__":
    main()
