"""The order of the actor's axes that lets ranks keep most of what their engines need."""

from __future__ import annotations

import pytest

from megarl.models.registry import FAMILIES
from megarl.parallel.topology import Topology
from megarl.weights.order import choose_order, list_orders
from megarl.weights.shapes import DENSE

SPEC = DENSE["qwen2.5-7b"]
FAMILY = FAMILIES[SPEC.family]


def grids(tp: int, pp: int, dp: int, engine_tp: int) -> tuple[Topology, Topology]:
    ranks = tuple(range(tp * pp * dp))
    return (
        Topology(ranks, tp_size=tp, pp_size=pp, dp_size=dp),
        Topology(ranks, tp_size=engine_tp, dp_size=len(ranks) // engine_tp),
    )


def test_an_engine_larger_than_the_tp_group_wants_replicas_side_by_side() -> None:
    """TP 2 and DP 2 against an engine of TP 4: in Megatron's order half of the ranks hold nothing of their quarter."""
    actor, engines = grids(2, 1, 2, 4)
    chosen, received = choose_order(FAMILY, SPEC, actor, engines, ranks_per_node=4)
    assert chosen.order == "dp-tp-pp"
    assert received["dp-tp-pp"] < 0.05 * received["tp-dp-pp"]  # only key-value heads and padded rows lie otherwise


@pytest.mark.parametrize(("tp", "pp", "dp", "engine_tp"), [(2, 2, 1, 4), (1, 1, 4, 4), (2, 1, 2, 1)])
def test_where_the_order_changes_nothing_it_is_megatrons(tp: int, pp: int, dp: int, engine_tp: int) -> None:
    actor, engines = grids(tp, pp, dp, engine_tp)
    assert list_orders(actor, engines, 4) == ["tp-dp-pp"]
    assert choose_order(FAMILY, SPEC, actor, engines, 4) == (actor, {})


def test_equal_orders_stay_megatrons() -> None:
    actor, engines = grids(2, 1, 2, 2)
    assert choose_order(FAMILY, SPEC, actor, engines, 4)[0].order == "tp-dp-pp"


def test_tensor_parallel_groups_do_not_leave_their_node() -> None:
    actor, engines = grids(2, 1, 2, 4)
    assert list_orders(actor, engines, ranks_per_node=2) == ["tp-dp-pp"]


@pytest.mark.parametrize("order", ["tp-dp-pp", "dp-tp-pp"])
def test_coordinates_and_ranks_agree_in_both_orders(order) -> None:
    grid = Topology(tuple(range(24)), tp_size=2, dp_size=3, pp_size=4, order=order)
    for rank in grid.ranks:
        at = grid.coordinates(rank)
        assert grid.rank_at(tp=at.tp, dp=at.dp, pp=at.pp) == rank
    for group in grid.groups("tp"):
        assert [grid.coordinates(rank).tp for rank in group] == [0, 1], "torch sorts the ranks of a group"
    for group in grid.groups("dp"):
        assert [grid.coordinates(rank).dp for rank in group] == [0, 1, 2]
