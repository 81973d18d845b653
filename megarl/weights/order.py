"""Which order of a grid's axes lets its ranks' training shards overlap their engine shards most. Pure.

With trainer tp=2, dp=2 and one engine of tp=4 on four ranks, each rank of the engine needs a quarter of every matrix:

    tp-dp-pp   ranks train halves 0 1 0 1, need quarters 0 1 2 3: ranks 1 and 2 hold nothing of theirs
    dp-tp-pp   ranks train halves 0 0 1 1, need quarters 0 1 2 3: every rank holds its own

The same idea for engines smaller than the trainer's tensor-parallel group needs engines of ranks that are not
neighbours, which vLLM does not build (`strided` in `blocks.py` shows on paper what they would save).
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from megarl.models.layout import Family, ModelSpec
from megarl.parallel.topology import Order, Topology
from megarl.weights.blocks import list_engine_shards, list_engines, list_trainer_shards
from megarl.weights.plan import plan_reshard, summarize


def compute_received(family: Family, spec: ModelSpec, actor: Topology, engines: Topology, ranks_per_node: int) -> int:
    """Elements that all ranks receive in one transfer from the actor's grid to the engines'."""
    targets = list_engine_shards(family, spec, list_engines(engines.ranks, engines.tp_size))
    plan = plan_reshard(list_trainer_shards(family, spec, actor), targets, ranks_per_node)
    return sum(traffic.received for traffic in summarize(plan, itemsize=1))


def list_orders(actor: Topology, engines: Topology, ranks_per_node: int) -> list[Order]:
    """The orders worth comparing, Megatron's first.

    The other one only where it changes something and keeps tensor-parallel groups inside a node.
    """
    differs = actor.tp_size > 1 and actor.dp_size > 1 and engines.tp_size > 1
    stays_inside = ranks_per_node % (actor.tp_size * actor.dp_size) == 0
    return list(get_args(Order)) if differs and stays_inside else ["tp-dp-pp"]


def choose_order(
    family: Family, spec: ModelSpec, actor: Topology, engines: Topology, ranks_per_node: int
) -> tuple[Topology, dict[Order, int]]:
    """The actor's grid in the order in which its ranks receive least, Megatron's when equal.

    Returns:
        The grid, and the elements received in each order that was compared (empty when there was no choice).
    """
    orders = list_orders(actor, engines, ranks_per_node)
    if len(orders) == 1:
        return replace(actor, order=orders[0]), {}
    received: dict[Order, int] = {
        order: compute_received(family, spec, replace(actor, order=order), engines, ranks_per_node) for order in orders
    }
    return replace(actor, order=min(orders, key=lambda order: received[order])), received
