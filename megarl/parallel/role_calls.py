"""Calls of a role from another grid: a method says how its arguments and results travel, and is called like any other.

    class RewardModel:
        topology: Topology                                       # every rank knows it, also those outside the role

        @register(transfer_mode="3D_PROTO", returns="sequences")
        def get_rewards(self, batch: PackedBatch) -> Tensor: ...  # runs on the role's ranks, each with its share

    rewards = reward_model.get_rewards(shard, caller=actor.topology)   # on every rank of the job

Every rank of the job makes the call: those of the caller with the sequences they hold, all others with None. It is
planned once, from the lengths of all sequences (`transfer_plan.py`), and what the method returns comes back to the
ranks that held the sequences, in their order. Host tensors travel, over gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.topology import Topology
from megarl.parallel.transfer import share_ragged
from megarl.parallel.transfer_plan import Move, TransferMode, TransferPlan, plan_transfer
from megarl.records import PackedBatch

Grain = Literal["tokens", "sequences"]
BATCH: dict[str, tuple[Grain, torch.dtype]] = {
    "tokens": ("tokens", torch.int64),
    "response_mask": ("tokens", torch.bool),
    "rollout_logprobs": ("tokens", torch.float32),
    "group": ("sequences", torch.int64),
    "is_finished": ("sequences", torch.bool),
}


class HasTopology(Protocol):
    """What `register` needs of a role: its grid, the same on every rank of the job."""

    topology: Topology


@dataclass(frozen=True)
class Column:
    """A named tensor with one number for each token, or for each sequence."""

    name: str
    grain: Grain
    dtype: torch.dtype


def register(transfer_mode: str | TransferMode, returns: Grain = "tokens") -> Callable[[Callable[..., Any]], Any]:
    """Turns a role's method into one that any grid can call.

    The method takes a `PackedBatch` and named scores [T] of it, and returns a tensor with a number for each token or
    sequence of its share (`returns`), on the ranks that results are taken from; what it returns elsewhere is not read.
    The call takes the same and `caller`, the grid of those who call; it returns the tensor for the caller's own
    sequences, and None on ranks that do not belong to the caller.

    Args:
        transfer_mode: 3D_PROTO, DP_ONLY, ALL_GATHER or ONE_TO_ALL; see `transfer_plan.py`.
        returns: whether a result has a number for each token or for each sequence.

    Raises:
        ValueError: an unknown mode.
    """
    known = [mode.value for mode in TransferMode]
    if transfer_mode not in known:
        raise ValueError(f"transfer_mode={transfer_mode!r} is not one of {', '.join(known)}")
    mode = TransferMode(transfer_mode)

    def decorate(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def call(self: HasTopology, batch: PackedBatch | None, *, caller: Topology, **scores: Tensor) -> Tensor | None:
            return _run_call(self, method, mode, returns, caller, batch, scores)

        vars(call)["transfer_mode"] = mode
        return call

    return decorate


def _run_call(
    role: HasTopology,
    method: Callable[..., Any],
    mode: TransferMode,
    returns: Grain,
    caller: Topology,
    batch: PackedBatch | None,
    scores: Mapping[str, Tensor],
) -> Tensor | None:
    rank = dist.get_rank()
    assert (batch is not None) == (rank in caller), f"rank {rank}: the caller's ranks bring sequences, others None"
    lengths_by_replica = _share_lengths(caller, batch)
    plan = plan_transfer(mode, caller, role.topology, lengths_by_replica)
    lengths = _number_lengths(mode, lengths_by_replica)
    names: list[list[str]] = [sorted(scores)]
    dist.broadcast_object_list(names, src=caller.ranks[0], device=torch.device("cpu"))
    columns = [Column(name, *kind) for name, kind in BATCH.items()]
    columns += [Column(name, "tokens", torch.float32) for name in names[0]]
    own: dict[str, Tensor] = {}
    if batch is not None and plan.held[rank]:
        own = {name: getattr(batch, name) for name in BATCH} | dict(scores)
    arrived = _move(plan.there, plan.held, plan.given, own, columns, lengths)
    result: dict[str, Tensor] = {}
    if rank in role.topology:
        found = method(
            role, _to_batch(arrived, plan.given[rank], lengths), **{name: arrived[name] for name in names[0]}
        )
        if any(move.source == rank for move in plan.back):
            assert isinstance(found, Tensor), f"{method.__name__} returned {type(found).__name__} on rank {rank}"
            result = {"result": found.detach().float().cpu()}
    wanted = _wanted(mode, caller, plan)
    back = _move(plan.back, plan.given, wanted, result, [Column("result", returns, torch.float32)], lengths)
    return back["result"] if rank in caller else None


def _wanted(mode: TransferMode, caller: Topology, plan: TransferPlan) -> Mapping[int, Sequence[int]]:
    """What each rank of the caller gets back: what it held, or what the first one held."""
    if mode is not TransferMode.one_to_all:
        return plan.held
    return dict.fromkeys(caller.ranks, plan.held[caller.ranks[0]])


def _share_lengths(caller: Topology, batch: PackedBatch | None) -> list[list[int]]:
    """The sequences' lengths by replica of the caller, on every rank of the world."""
    rank = dist.get_rank()
    own = torch.zeros(0, dtype=torch.int64)
    if batch is not None:
        at = caller.coordinates(rank)
        if at.tp == 0 and at.pp == 0:
            own = batch.lengths
    by_rank = share_ragged(own)
    return [by_rank[caller.rank_at(0, dp, 0)].tolist() for dp in range(caller.dp_size)]


def _number_lengths(mode: TransferMode, lengths_by_replica: Sequence[Sequence[int]]) -> list[int]:
    """Row -> tokens, in the numbering of the plan."""
    counted = lengths_by_replica[:1] if mode is TransferMode.one_to_all else lengths_by_replica
    return [length for lengths in counted for length in lengths]


def _move(
    moves: Sequence[Move],
    before: Mapping[int, Sequence[int]],
    after: Mapping[int, Sequence[int]],
    own: Mapping[str, Tensor],
    columns: Sequence[Column],
    lengths: Sequence[int],
) -> dict[str, Tensor]:
    """Runs the moves; a collective of the ranks that they name.

    Args:
        before, after: rank -> rows that it has, and will have, in the order of its tensors.
        own: what this rank holds of the rows `before`, by name of the column.
        columns: what travels.
        lengths: row -> tokens.

    Returns:
        name -> tensor of the rows `after`, on the host; empty on a rank that gets nothing.
    """
    rank = dist.get_rank()
    dtypes = list(dict.fromkeys(column.dtype for column in columns))
    sends, pending = [], []
    parts: dict[tuple[int, torch.dtype], Tensor] = {}
    for move in moves:
        for tag, dtype in enumerate(dtypes):
            kinds = [column for column in columns if column.dtype == dtype]
            if move.source == rank:
                message = _gather(own, kinds, before[rank], move.rows, lengths)
                if move.target == rank:
                    parts[rank, dtype] = message
                elif message.numel():
                    sends.append((dist.isend(_as_sendable(message), move.target, tag=tag), message))
            elif move.target == rank:
                size = sum(_size(column, move.rows, lengths) for column in kinds)
                parts[move.source, dtype] = torch.empty(size, dtype=dtype)
                if size:
                    pending.append(dist.irecv(_as_sendable(parts[move.source, dtype]), move.source, tag=tag))
    for request in [*pending, *(request for request, _ in sends)]:
        request.wait()
    if rank not in after:
        return {}
    arrived = {move.source: move.rows for move in moves if move.target == rank}
    return {column.name: _scatter(column, columns, parts, arrived, after[rank], lengths) for column in columns}


def _as_sendable(message: Tensor) -> Tensor:
    """The same memory as bytes where gloo does not know the dtype."""
    return message.view(torch.uint8) if message.dtype == torch.bool else message


def _size(column: Column, rows: Sequence[int], lengths: Sequence[int]) -> int:
    return len(rows) if column.grain == "sequences" else sum(lengths[row] for row in rows)


def _positions(column: Column, have: Sequence[int], want: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """[n] int64: where the rows `want` lie in a tensor of the rows `have`."""
    sizes = [1 if column.grain == "sequences" else lengths[row] for row in have]
    starts = dict(zip(have, [0, *torch.tensor(sizes).cumsum(0).tolist()], strict=False))
    each = [1 if column.grain == "sequences" else lengths[row] for row in want]
    spans = [torch.arange(starts[row], starts[row] + size) for row, size in zip(want, each, strict=True)]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def _gather(
    own: Mapping[str, Tensor], kinds: Sequence[Column], have: Sequence[int], rows: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """One message: the columns `kinds` of the sequences `rows`, column after column."""
    return torch.cat([own[column.name].cpu()[_positions(column, have, rows, lengths)] for column in kinds])


def _scatter(
    column: Column,
    columns: Sequence[Column],
    parts: Mapping[tuple[int, torch.dtype], Tensor],
    arrived: Mapping[int, Sequence[int]],
    want: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """One column of the rows `want`, put together from the messages of all sources."""
    whole = torch.empty(_size(column, want, lengths), dtype=column.dtype)
    for source, rows in arrived.items():
        start = 0
        for other in columns:
            if other.dtype == column.dtype:
                size = _size(other, rows, lengths)
                if other.name == column.name:
                    piece = parts[source, column.dtype][start : start + size]
                    whole[_positions(column, want, rows, lengths)] = piece
                start += size
    return whole


def _to_batch(arrived: Mapping[str, Tensor], rows: Sequence[int], lengths: Sequence[int]) -> PackedBatch:
    bounds = torch.zeros(len(rows) + 1, dtype=torch.int64)
    bounds[1:] = torch.tensor([lengths[row] for row in rows], dtype=torch.int64).cumsum(0)
    return PackedBatch(cu_seqlens=bounds, **{name: arrived[name] for name in BATCH})
