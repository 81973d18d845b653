"""The plan of a call between two grids: its three invariants, and balance."""

from __future__ import annotations

import random

import pytest

from megarl.parallel.partition import assign_sequences
from megarl.parallel.topology import Topology
from megarl.parallel.transfer_plan import Move, TransferMode, TransferPlan, plan_transfer

GRIDS = [
    Topology(tuple(range(8)), dp_size=8), Topology((0, 1), tp_size=2), Topology((3, 5), dp_size=2), Topology((6,)),
    Topology(tuple(range(8)), tp_size=2, pp_size=2, dp_size=2), Topology((1, 2, 4, 7), pp_size=2, dp_size=2),
]  # fmt: skip


def build_shares(dp_size: int, seed: int = 0) -> list[list[int]]:
    """Lengths of the sequences that each replica holds; some hold none."""
    numbers = random.Random(seed)
    return [[numbers.randint(1, 300) for _ in range(numbers.randint(0, 6))] for _ in range(dp_size)]


def deliver(moves: tuple[Move, ...], have: dict[int, set[int]]) -> dict[int, list[int]]:
    """Rank -> rows that arrive; every source must have what it sends."""
    arrived: dict[int, list[int]] = {}
    for move in moves:
        assert set(move.rows) <= have.get(move.source, set()), f"{move} sends what it has not"
        arrived.setdefault(move.target, []).extend(move.rows)
    return arrived


def as_sets(rows: TransferPlan, name: str) -> dict[int, set[int]]:
    return {rank: set(each) for rank, each in getattr(rows, name).items()}


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize("caller", GRIDS, ids=str)
@pytest.mark.parametrize("callee", GRIDS, ids=str)
def test_every_rank_gets_what_it_must_once_there_and_back(mode, caller, callee):
    shares = build_shares(caller.dp_size)
    plan = plan_transfer(mode, caller, callee, shares)
    counts = shares[:1] if mode is TransferMode.one_to_all else shares
    everything = list(range(sum(map(len, counts))))
    there = deliver(plan.there, as_sets(plan, "held"))
    assert set(plan.given) == set(callee.ranks)
    for rank, rows in plan.given.items():
        assert sorted(there.get(rank, [])) == list(rows) == sorted(rows)
    back = deliver(plan.back, as_sets(plan, "given"))
    for rank in caller.ranks:
        dp = caller.coordinates(rank).dp
        first = sum(len(each) for each in shares[:dp])
        own = everything if mode is TransferMode.one_to_all else list(range(first, first + len(shares[dp])))
        assert sorted(back.get(rank, [])) == own


@pytest.mark.parametrize("callee", GRIDS, ids=str)
def test_shares_of_a_role_cover_the_batch(callee):
    caller = GRIDS[0]
    shares = build_shares(8)
    total = sum(map(len, shares))
    three_d = plan_transfer(TransferMode.three_d, caller, callee, shares).given
    for dp in range(callee.dp_size):
        same = {three_d[rank] for rank in callee.ranks if callee.coordinates(rank).dp == dp}
        assert len(same) == 1, "all ranks of a replica see the same sequences"
    firsts = [three_d[callee.rank_at(0, dp, 0)] for dp in range(callee.dp_size)]
    assert sorted(row for rows in firsts for row in rows) == list(range(total))
    alone = plan_transfer(TransferMode.dp_only, caller, callee, shares).given
    assert sorted(row for rows in alone.values() for row in rows) == list(range(total))
    gathered = plan_transfer(TransferMode.all_gather, caller, callee, shares).given
    assert all(rows == tuple(range(total)) for rows in gathered.values())


def test_shares_are_balanced_by_work_and_not_by_number():
    """One rank of the caller holds all that is long: the called replicas get the same work."""
    shares = [[100] * 6, [1000] * 6]
    plan = plan_transfer(TransferMode.three_d, Topology((0, 1), dp_size=2), Topology((2, 3), dp_size=2), shares)
    loads = [sum(([100] * 6 + [1000] * 6)[row] for row in plan.given[rank]) for rank in (2, 3)]
    assert loads == [3300, 3300]
    assert plan.given[2] == tuple(assign_sequences([100] * 6 + [1000] * 6, 2)[0])


def test_what_a_rank_holds_does_not_travel():
    grid = Topology(tuple(range(4)), tp_size=2, dp_size=2)
    plan = plan_transfer(TransferMode.all_gather, grid, grid, [[5, 5], [7]])
    for move in plan.there:
        at = grid.coordinates(move.target)
        if set(move.rows) <= set(plan.held[move.target]):
            assert move.source == move.target
        else:
            assert grid.coordinates(move.source).dp != at.dp
    assert all(move.source == move.target for move in plan.back if move.target == 0)


def test_the_example_of_the_module():
    plan = plan_transfer(
        TransferMode.three_d, Topology((0, 1), dp_size=2), Topology((1, 2), tp_size=2), [[10, 10], [10]]
    )
    assert plan.there == (Move(0, 1, (0, 1)), Move(1, 1, (2,)), Move(0, 2, (0, 1)), Move(1, 2, (2,)))
    assert plan.back == (Move(1, 0, (0, 1)), Move(1, 1, (2,)))


def test_the_plan_is_the_same_every_time():
    shares = build_shares(8, seed=3)
    plans = {str(plan_transfer(TransferMode.three_d, GRIDS[0], GRIDS[4], shares)) for _ in range(3)}
    assert len(plans) == 1
