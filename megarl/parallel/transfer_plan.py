"""Which sequences go from which rank to which, when a role on one grid calls a role on another. Pure.

    mode         the called role's ranks get                                  the caller gets back
    3D_PROTO     each replica its share, all of the replica's ranks the same  from tp 0 of each replica's last stage
    DP_ONLY      each rank its own share: tp and pp do not count              from every rank its share
    ALL_GATHER   every rank all sequences                                     from tp 0 of replica 0's last stage
    ONE_TO_ALL   every rank what the caller's first replica holds             the same, to every rank of the caller

Sequences are numbered through over the caller's replicas, in their order. Shares are balanced by work. A worked
example, 3D_PROTO from dp=2 on ranks 0 1 to tp=2 dp=1 on ranks 1 2; rank 0 holds sequences 0 1, rank 1 holds 2:

    there   0 -> 1: 0 1    1 -> 1: 2    0 -> 2: 0 1    1 -> 2: 2
    back    1 -> 0: 0 1    1 -> 1: 2

Invariants (the tests hold them):
1. Every rank of the called role gets each sequence of its share once, and sees them in rising order.
2. Every rank of the caller gets back what it held (ONE_TO_ALL: what replica 0 held), each sequence once.
3. What a rank needs and already holds moves from that rank to itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from megarl.parallel.partition import assign_sequences
from megarl.parallel.topology import Topology


class TransferMode(str, Enum):
    """How the arguments of a role's method are spread over its grid, and where its results come from."""

    three_d = "3D_PROTO"
    dp_only = "DP_ONLY"
    all_gather = "ALL_GATHER"
    one_to_all = "ONE_TO_ALL"


@dataclass(frozen=True)
class Move:
    """The sequences `rows`, in this order, from rank `source` to rank `target`; the two may be the same."""

    source: int
    target: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class TransferPlan:
    """Both ways of one call. `held`, `given`: rank -> rows before the call on the caller's side, and during it on the
    called role's side."""

    held: Mapping[int, tuple[int, ...]]
    given: Mapping[int, tuple[int, ...]]
    there: tuple[Move, ...]
    back: tuple[Move, ...]


def plan_transfer(
    mode: TransferMode, caller: Topology, callee: Topology, lengths_by_replica: Sequence[Sequence[int]]
) -> TransferPlan:
    """Plans one call.

    Args:
        mode: see above.
        caller, callee: the two grids; ranks may be shared.
        lengths_by_replica: for each data-parallel replica of the caller, the tokens of each sequence it holds.
    """
    assert len(lengths_by_replica) == caller.dp_size, f"{len(lengths_by_replica)} shares for dp={caller.dp_size}"
    counts = [len(lengths) for lengths in lengths_by_replica]
    bounds = [0, *itertools.accumulate(counts)]
    owned = [tuple(range(first, end)) for first, end in itertools.pairwise(bounds)]
    if mode is TransferMode.one_to_all:
        owned = [owned[0] for _ in owned]
        lengths_by_replica = [lengths_by_replica[0] for _ in owned]
        lengths = list(lengths_by_replica[0])
    else:
        lengths = [length for replica in lengths_by_replica for length in replica]
    held = {rank: owned[caller.coordinates(rank).dp] for rank in caller.ranks}
    given = _plan_shares(mode, callee, lengths)
    senders = {row: caller.rank_at(0, dp, 0) for dp, rows in reversed(list(enumerate(owned))) for row in rows}
    if mode is TransferMode.one_to_all:
        held = {rank: held[rank] if rank == caller.ranks[0] else () for rank in caller.ranks}
    speakers = {row: rank for rank in reversed(_result_ranks(mode, callee)) for row in given[rank]}
    wanted = {rank: owned[caller.coordinates(rank).dp] for rank in caller.ranks}
    has_result = {rank: set(given[rank]) for rank in _result_ranks(mode, callee)}
    return TransferPlan(
        held=held,
        given=given,
        there=_plan_moves(given, senders, {rank: set(rows) for rank, rows in held.items()}),
        back=_plan_moves(wanted, speakers, has_result),
    )


def _plan_shares(mode: TransferMode, callee: Topology, lengths: Sequence[int]) -> dict[int, tuple[int, ...]]:
    if mode in (TransferMode.all_gather, TransferMode.one_to_all):
        return {rank: tuple(range(len(lengths))) for rank in callee.ranks}
    if mode is TransferMode.dp_only:
        shares = assign_sequences(lengths, len(callee.ranks))
        return {rank: tuple(share) for rank, share in zip(callee.ranks, shares, strict=True)}
    shares = assign_sequences(lengths, callee.dp_size)
    return {rank: tuple(shares[callee.coordinates(rank).dp]) for rank in callee.ranks}


def _result_ranks(mode: TransferMode, callee: Topology) -> list[int]:
    """The ranks that results are taken from."""
    if mode is TransferMode.dp_only:
        return list(callee.ranks)
    replicas = range(callee.dp_size) if mode is TransferMode.three_d else range(1)
    return [callee.rank_at(0, dp, callee.last_stage) for dp in replicas]


def _plan_moves(
    wanted: Mapping[int, Sequence[int]], senders: Mapping[int, int], held: Mapping[int, set[int]]
) -> tuple[Move, ...]:
    """One move for each pair of ranks; a rank keeps what it holds already."""
    moves: list[Move] = []
    for target in sorted(wanted):
        by_source: dict[int, list[int]] = {}
        for row in wanted[target]:
            source = target if row in held.get(target, ()) else senders[row]
            by_source.setdefault(source, []).append(row)
        moves += [Move(source, target, tuple(rows)) for source, rows in sorted(by_source.items())]
    return tuple(moves)
