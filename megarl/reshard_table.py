"""`megarl plan-reshard`: the weight transfer of a run on paper: what every rank keeps, receives and sends.

megarl plan-reshard --config FILE [key=value ...]                          a run's own grids
megarl plan-reshard --model llama3-70b --actor tp=8,pp=4,dp=2 --engine tp=4,order=strided --gpus-per-node 8
megarl plan-reshard --paper                                                models and layouts of docs/performance.md
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megarl import device
from megarl.config.hub import load_run
from megarl.config.load import ConfigError
from megarl.config.schema import Engine
from megarl.config.validate import find_problems
from megarl.models.layout import Family, ModelSpec
from megarl.models.registry import FAMILIES, read_model_spec
from megarl.parallel.topology import Topology, plan_topology
from megarl.weights.blocks import Holdings, RankOrder, list_engine_shards, list_engines, list_trainer_shards
from megarl.weights.plan import ReshardPlan, Traffic, plan_reshard, summarize
from megarl.weights.shapes import DENSE, list_moe_engine_shards, list_moe_trainer_shards

GB = 1e9
NVLINK_BYTES_PER_S, IB_BYTES_PER_S = 450e9, 50e9  # of one GPU and its network card, each way

# model, (tp, pp, dp, ep), (engine tp, engine ep, order); 8 GPUs a node
PAPER: tuple[tuple[str, tuple[int, int, int, int], tuple[int, int, RankOrder]], ...] = (
    ("qwen2.5-7b", (4, 1, 2, 1), (1, 1, "contiguous")),
    ("qwen2.5-7b", (2, 2, 2, 1), (2, 1, "contiguous")),
    ("qwen2.5-7b", (4, 2, 1, 1), (4, 1, "contiguous")),
    ("qwen2.5-32b", (8, 2, 1, 1), (4, 1, "contiguous")),
    ("qwen2.5-32b", (8, 2, 1, 1), (4, 1, "strided")),
    ("qwen2.5-32b", (4, 2, 2, 1), (4, 1, "contiguous")),
    ("llama3-70b", (8, 4, 2, 1), (8, 1, "contiguous")),
    ("llama3-70b", (8, 4, 2, 1), (4, 1, "contiguous")),
    ("llama3-70b", (8, 4, 2, 1), (4, 1, "strided")),
    ("moe-671b", (8, 8, 4, 32), (8, 32, "contiguous")),
    ("moe-671b", (8, 16, 2, 16), (16, 16, "contiguous")),
    ("moe-671b", (4, 16, 4, 16), (8, 64, "contiguous")),
)


@dataclass(frozen=True)
class Case:
    """A transfer on paper: both sides, and what there is to be said about it."""

    name: str
    trainer: str
    engine: str
    sources: Holdings
    targets: Holdings
    ranks_per_node: int
    itemsize: int = 2

    def plan(self) -> ReshardPlan:
        return plan_reshard(self.sources, self.targets, self.ranks_per_node)


def build_case(
    name: str,
    family: Family,
    spec: ModelSpec,
    topology: Topology,
    engine_tp: int,
    order: RankOrder,
    ranks_per_node: int,
) -> Case:
    """The transfer of a dense model; the engines take all ranks of the trainer, or more of them.

    Raises:
        ValueError: sizes that do not fit the model or each other.
    """
    engines = list_engines(topology.ranks, engine_tp, order, span=topology.tp_size)
    return Case(
        name,
        f"TP{topology.tp_size} PP{topology.pp_size} DP{topology.dp_size}",
        f"TP{engine_tp}{' strided' if order == 'strided' else ''}",
        list_trainer_shards(family, spec, topology),
        list_engine_shards(family, spec, engines),
        ranks_per_node,
    )


def build_paper_case(name: str, trainer: tuple[int, int, int, int], engine: tuple[int, int, RankOrder]) -> Case:
    """One row of the paper table, on nodes of 8 GPUs."""
    tp, pp, dp, ep = trainer
    topology = Topology(tuple(range(tp * pp * dp)), tp_size=tp, pp_size=pp, dp_size=dp)
    engine_tp, engine_ep, order = engine
    if name in DENSE:
        return build_case(name, FAMILIES[DENSE[name].family], DENSE[name], topology, engine_tp, order, 8)
    return Case(
        name,
        f"TP{tp} PP{pp} DP{dp} EP{ep}",
        f"TP{engine_tp} EP{engine_ep}",
        list_moe_trainer_shards(topology, ep),
        list_moe_engine_shards(len(topology.ranks), engine_tp, engine_ep),
        8,
    )


def compute_gathered_bytes(case: Case) -> float:
    """Mean bytes a rank receives when every rank rebuilds the whole model: all of it but its own shard."""
    total = sum(
        (area[1] - area[0]) * (area[3] - area[2]) * case.itemsize
        for areas in _areas(case.sources).values()
        for area in areas
    )
    own = [sum(b.numel for shard in case.sources.get(r, ()) for b in shard.blocks) for r in case.targets]
    return total - sum(own) * case.itemsize / len(own)


def _areas(holdings: Holdings) -> dict[str, set[tuple[int, int, int, int]]]:
    """The different rectangles of each tensor."""
    found: dict[str, set[tuple[int, int, int, int]]] = {}
    for shards in holdings.values():
        for block in (block for shard in shards for block in shard.blocks):
            rows, columns = (block.row_start, block.num_rows), (block.column_start, block.num_columns)
            area = (rows[0], sum(rows), columns[0], sum(columns))
            found.setdefault(block.hf_name, set()).add(area)
    return found


def compute_seconds(traffic: Sequence[Traffic]) -> tuple[float, float]:
    """Seconds over the network and over NVLink of the busiest rank, at the rates at the top of this file."""
    across = max(max(rank.across, rank.sent_across) for rank in traffic)
    inside = max(max(rank.inside, rank.sent_inside) for rank in traffic)
    return across / IB_BYTES_PER_S, inside / NVLINK_BYTES_PER_S


def print_paper(console: Console) -> None:
    """The table of models and layouts, in the form of docs/performance.md."""
    table = Table(box=box.MARKDOWN)
    for name in ("model", "GPUs", "trainer", "engine"):
        table.add_column(name, no_wrap=True)
    for name in ("needs", "received", "max", "minimum", "gather all", "×", "IB ms", "NVLink ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in PAPER:
        case = build_paper_case(*row)
        traffic = summarize(case.plan(), case.itemsize)
        received = [rank.received for rank in traffic]
        mean, gathered = sum(received) / len(received), compute_gathered_bytes(case)
        network, nvlink = compute_seconds(traffic)
        values = (
            sum(rank.needed for rank in traffic) / len(traffic),
            mean,
            max(received),
            sum(rank.minimum for rank in traffic) / len(traffic),
            gathered,
        )
        table.add_row(
            case.name,
            str(len(traffic)),
            case.trainer,
            case.engine,
            *(f"{value / GB:.2f}" for value in values),
            f"{gathered / mean:.1f}" if mean else "-",
            f"{network * 1e3:.0f}",
            f"{nvlink * 1e3:.0f}",
        )
    console.print(table)


def print_ranks(case: Case, console: Console) -> None:
    """One line for each rank of the engines, and the sum."""
    plan = case.plan()
    traffic = summarize(plan, case.itemsize)
    table = Table(title=f"{case.name}: {case.trainer} -> engine {case.engine}, MB", title_justify="left")
    for name in ("rank", "node", "needs", "keeps", "in node", "across", "received", "minimum", "sends"):
        table.add_column(name, justify="right")

    def add(label: str, node: str, *numbers: int) -> None:
        table.add_row(label, node, *(f"{number / 1e6:,.2f}" for number in numbers))

    for one in traffic:
        numbers = (one.needed, one.kept, one.inside, one.across, one.received, one.minimum)
        add(str(one.rank), str(one.rank // case.ranks_per_node), *numbers, one.sent_inside + one.sent_across)
    table.add_section()
    names = ("needed", "kept", "inside", "across", "received", "minimum")
    add(
        "all", "", *(sum(getattr(one, name) for one in traffic) for name in names), sum(one.received for one in traffic)
    )
    console.print(table)
    network, nvlink = compute_seconds(traffic)
    entering = sum(one.across for one in traffic)
    least = sum(plan.node_minimum.values()) * case.itemsize
    console.print(
        f"{len(plan.copies):,} copies; {entering / 1e6:,.2f} MB enter nodes, at least {least / 1e6:,.2f} must; "
        f"gathering everything would bring {compute_gathered_bytes(case) / 1e6:,.2f} MB to each rank; "
        f"{network * 1e3:.1f} ms at {IB_BYTES_PER_S / GB:.0f} GB/s between nodes, {nvlink * 1e3:.1f} ms at "
        f"{NVLINK_BYTES_PER_S / GB:.0f} GB/s inside",
        highlight=False,
        soft_wrap=True,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `megarl plan-reshard`."""
    parser.add_argument("--config", help="a YAML file of a run; its grids and model are planned")
    parser.add_argument("--model", help=f"a Hugging Face folder (its config.json), or one of {', '.join(DENSE)}")
    parser.add_argument("--actor", default="tp=1", help="tp=..,pp=..,dp=..")
    parser.add_argument("--engine", default="tp=1", help="tp=..,order=contiguous|strided")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--paper", action="store_true", help="the models and layouts of docs/performance.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="go over the file's values")


def run_plan_reshard(options: argparse.Namespace, console: Console) -> int:
    """Prints what the options ask for; returns the exit code.

    Raises:
        ValueError: options that do not fit together or the model.
    """
    chosen = [name for name in ("config", "model", "paper") if getattr(options, name)]
    if len(chosen) != 1:
        raise ValueError("megarl plan-reshard needs one of --config FILE, --model NAME or --paper")
    if options.paper:
        print_paper(console)
    elif options.model:
        print_ranks(_case_of_words(options), console)
    else:
        print_ranks(_case_of_config(options.config, options.overrides), console)
    return 0


def _case_of_words(options: argparse.Namespace) -> Case:
    actor = _read_sizes("--actor", options.actor, ("tp", "pp", "dp"))
    engine = _read_sizes("--engine", options.engine, ("tp", "order"))
    tp, pp, dp = (int(actor.get(name, 1)) for name in ("tp", "pp", "dp"))
    order = engine.get("order", "contiguous")
    if order not in ("contiguous", "strided"):
        raise ValueError(f"--engine order={order} is unknown; use contiguous or strided")
    if options.gpus_per_node < 1:
        raise ValueError(f"--gpus-per-node={options.gpus_per_node} must be 1 or more")
    topology = plan_topology("actor", tp * pp * dp, tp, pp, dp)
    if options.model in DENSE:
        spec = DENSE[options.model]
        family = FAMILIES[spec.family]
    else:
        family, spec = read_model_spec(options.model)
    name = Path(options.model).name
    return build_case(name, family, spec, topology, int(engine.get("tp", 1)), order, options.gpus_per_node)


def _read_sizes(option: str, text: str, known: tuple[str, ...]) -> dict[str, str]:
    sizes: dict[str, str] = {}
    for word in text.split(","):
        if word:
            key, _, value = word.partition("=")
            sizes[key] = value
    for key, value in sizes.items():
        if key not in known:
            raise ValueError(f"{option} {key}={value}: unknown key; known are {', '.join(known)}")
        if key != "order" and not (value.isdigit() and int(value)):
            raise ValueError(f"{option} {key}={value} must be a whole number, 1 or more")
    return sizes


def _case_of_config(file: str, overrides: Sequence[str]) -> Case:
    from megarl.job import plan_topologies  # seconds to import: Megatron

    config, not_found = load_run(file, list(overrides))
    world_size = config.trainer.n_gpus_per_node * config.trainer.nnodes
    problems = find_problems(config, world_size, not_found=not_found)
    if problems:
        raise ConfigError(problems)
    if config.rollout.name is Engine.naive:
        raise ValueError("rollout.name=naive answers with the trainer's own weights: nothing is transferred")
    assert config.actor.model_path is not None
    family, spec = read_model_spec(config.actor.model_path)
    topologies = plan_topologies(config, world_size)
    actor, rollout = topologies["actor"], topologies["rollout"]
    engines = list_engines(rollout.ranks, rollout.tp_size)
    names = (config.actor.dtype.value, config.rollout.dtype.value)
    return Case(
        os.path.basename(config.actor.model_path.rstrip("/")),
        f"TP{actor.tp_size} PP{actor.pp_size} DP{actor.dp_size}",
        f"TP{rollout.tp_size}",
        list_trainer_shards(family, spec, actor),
        list_engine_shards(family, spec, engines),
        config.trainer.n_gpus_per_node,
        itemsize=min(device.pick_dtype(name).itemsize for name in names),
    )
