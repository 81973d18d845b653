"""The resolved plan of a run, without loading a model: `megarl train --dry-run`.

Where each role's ranks sit, which layers each stage holds, how many parameters and bytes that is on each rank, and how
a step is cut into mini-batches and micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megarl import device
from megarl.config.needs import count_together, critic_roles
from megarl.config.schema import ActorConfig, Config, CriticConfig, Engine, RefConfig, ScoringModelConfig
from megarl.job import count_updates, plan_topologies
from megarl.models.layout import Family, ModelSpec, plan_rank
from megarl.models.registry import read_model_spec
from megarl.parallel.partition import layer_range
from megarl.parallel.topology import Topology


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of one role: its layers (first, last) in each of its chunks, parameters, and bytes of state."""

    role: str
    rank: int
    place: str
    layers: tuple[tuple[int, int], ...]
    num_parameters: int
    num_bytes: int


def plan_ranks(role: str, config: Config, topology: Topology, family: Family, spec: ModelSpec) -> list[RankPlan]:
    """What every rank of a trained or scoring role holds.

    Bytes: weights; for a role that learns also fp32 gradients, and fp32 masters and two moments shared out over the
    data-parallel ranks. Activations are not counted.
    """
    settings = getattr(config, role)
    learns = isinstance(settings, ActorConfig | CriticConfig)
    dtype = device.pick_dtype((config.actor if isinstance(settings, RefConfig) else settings).dtype.value)
    head = "value" if isinstance(settings, CriticConfig | ScoringModelConfig) else "policy"
    plans: list[RankPlan] = []
    for rank in topology.ranks:
        at = topology.coordinates(rank)
        layouts = plan_rank(family, spec, topology, at.tp, at.pp, head)
        count = sum(layout.numel for layout in layouts)
        num_bytes = count * dtype.itemsize + (4 * count + 12 * count // topology.dp_size if learns else 0)
        ranges = [layer_range(spec.num_layers, topology.num_chunks, chunk) for chunk in topology.chunks_of(at.pp)]
        layers = tuple((each.start, each.stop - 1) for each in ranges)
        plans.append(RankPlan(role, rank, str(at), layers, count, num_bytes))
    return plans


def print_plan(config: Config, world_size: int, console: Console) -> None:
    """Prints the plan of a configuration that `find_problems` accepted."""
    topologies = plan_topologies(config, world_size)
    table = Table(title=f"{world_size} ranks", title_justify="left")
    for name in ("role", "rank", "place", "layers", "parameters", "GiB of state"):
        table.add_column(name, justify="left" if name in ("role", "place", "layers") else "right")
    for role, topology in topologies.items():
        if role == "rollout":
            for rank in topology.ranks:
                at = topology.coordinates(rank)
                table.add_row(role, str(rank), f"engine {at.dp} tp{at.tp}", config.rollout.name.value, "", "")
            continue
        path = getattr(config, role).model_path
        assert path is not None
        family, spec = read_model_spec(path)
        for plan in plan_ranks(role, config, topology, family, spec):
            layers = " ".join(f"{first}-{last}" for first, last in plan.layers)
            gib = f"{plan.num_bytes / 2**30:.2f}"
            table.add_row(role, str(plan.rank), plan.place, layers, f"{plan.num_parameters:,}", gib)
        table.add_section()
    console.print(table)
    answers = config.data.train_batch_size * config.rollout.n * count_together(config)
    longest = answers * (config.data.max_prompt_length + config.data.max_response_length)
    batch = Table(title="one step", title_justify="left")
    for name in ("role", "optimizer steps", "answers each", "micro-batches each, at most"):
        batch.add_column(name, justify="left" if name == "role" else "right")
    trained: dict[str, ActorConfig | CriticConfig] = {"actor": config.actor, **critic_roles(config)}
    for role, settings in trained.items():
        if role in topologies:
            updates = count_updates(config, role) // (settings.ppo_epochs or 1)
            dp_size = topologies[role].dp_size
            micro_batches = -(-longest // (updates * dp_size * settings.ppo_max_token_len))
            if settings.ppo_micro_batch_size is not None:
                micro_batches = max(micro_batches, -(-answers // (updates * dp_size * settings.ppo_micro_batch_size)))
            total = updates * (settings.ppo_epochs or 1)
            batch.add_row(role, str(total), str(answers // updates), f"{micro_batches} a data-parallel rank")
    console.print(batch)
    if config.preference is not None:
        told = f"{config.data.train_batch_size} examples a step, preference.loss={config.preference.loss}"
    else:
        engine = "the trainer's own model" if config.rollout.name is Engine.naive else "vLLM"
        told = f"{config.data.train_batch_size} prompts × {config.rollout.n} answers a step from {engine}"
    console.print(f"{told}; {device.describe()}", highlight=False, soft_wrap=True)
