"""Plans how weights get from the trainer's shards into the engine's parameters: who sends what to whom. Pure.

    plan = plan_reshard(list_trainer_shards(...), list_engine_shards(...), ranks_per_node=8)
    plan.copies          # every element of every engine parameter is written by exactly one of them
    summarize(plan, 2)   # bytes that each rank keeps, gets inside its node and from other nodes; the lower bound

Both sides cut each tensor into rectangles; a source rectangle and a destination rectangle that meet give one piece,
which some ranks hold and some need. A piece goes, in this order of preference: nowhere (the rank trains what it needs),
from another rank of the node, from another node. A piece that several ranks of a node need and none holds enters the
node once (hop 0) and is handed on there out of the engine's parameter it was written to (hop 1). Among equals the rank
that has sent or received least so far is taken, then the lowest: the plan is the same wherever it is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.weights.blocks import Block, Holdings

Rectangle = tuple[int, int, int, int]  # first row, end row, first column, end column


@dataclass(frozen=True, slots=True)
class Copy:
    """A rectangle of a Hugging Face tensor on its way from one rank's parameter into another's.

    `hop` 0 reads the trainer's parameter `source_parameter`, hop 1 an engine's parameter that hop 0 has written.
    Offsets and strides count elements of the flat parameters.
    """

    source: int
    target: int
    hop: int
    hf_name: str
    row_start: int
    num_rows: int
    column_start: int
    num_columns: int
    source_parameter: str
    source_offset: int
    source_stride: int
    target_parameter: str
    target_offset: int
    target_stride: int

    @property
    def numel(self) -> int:
        return self.num_rows * self.num_columns

    @property
    def piece(self) -> tuple[str, int, int, int, int]:
        """Which elements of the model these are."""
        return (self.hf_name, self.row_start, self.num_rows, self.column_start, self.num_columns)


@dataclass(frozen=True)
class ReshardPlan:
    """All copies of one transfer, in the order in which they are packed.

    `needs`: elements that each rank's engine parameters are filled with; `minimum`: those of them that the rank does
    not train itself; `node_minimum`: those that no rank of a node trains, each counted once.
    """

    copies: tuple[Copy, ...]
    needs: dict[int, int]
    minimum: dict[int, int]
    node_minimum: dict[int, int]
    ranks_per_node: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank in one transfer: `kept` never leave it, the others arrive from inside and across nodes."""

    rank: int
    needed: int
    kept: int
    inside: int
    across: int
    sent_inside: int
    sent_across: int
    minimum: int

    @property
    def received(self) -> int:
        return self.inside + self.across


class _Loads:
    """How much each rank has sent and received so far while a plan is made."""

    def __init__(self) -> None:
        self.sent_inside: dict[int, int] = defaultdict(int)
        self.sent_across: dict[int, int] = defaultdict(int)
        self.entered: dict[int, int] = defaultdict(int)


_Owners = dict[int, tuple[str, Block]]  # rank -> parameter and block


def plan_reshard(sources: Holdings, targets: Holdings, ranks_per_node: int) -> ReshardPlan:
    """Plans one transfer.

    Args:
        sources: what each rank of the trainer holds. The different rectangles of a tensor must tile it; ranks may
            hold the same rectangle.
        targets: what each rank of the engines needs, under the same rule.
        ranks_per_node: rank r sits on node r // ranks_per_node.

    Raises:
        AssertionError: a rectangle that is needed is not held, or is held by overlapping rectangles.
    """
    held, wanted = _by_tensor(sources), _by_tensor(targets)
    loads = _Loads()
    copies: list[Copy] = []
    needs: dict[int, int] = dict.fromkeys(targets, 0)
    minimum: dict[int, int] = dict.fromkeys(targets, 0)
    node_minimum: dict[int, int] = {rank // ranks_per_node: 0 for rank in targets}
    for name, needed in wanted.items():
        for area, needers in needed.items():
            covered = 0
            nodes = _by_node(needers, ranks_per_node)
            for source_area, holders in held.get(name, {}).items():
                common = _intersect(source_area, area)
                if common is None:
                    continue
                size = (common[1] - common[0]) * (common[3] - common[2])
                covered += size
                holder_nodes = _by_node(holders, ranks_per_node)
                for node, group in nodes.items():
                    for rank in group:
                        needs[rank] += size
                        minimum[rank] += 0 if rank in holders else size
                    node_minimum[node] += 0 if node in holder_nodes else size
                    copies += _route(name, common, size, group, needers, holders, holder_nodes.get(node, []), loads)
            expected = (area[1] - area[0]) * (area[3] - area[2])
            assert covered == expected, f"{name} {area}: the trainer's shards hold {covered} of {expected} elements"
    return ReshardPlan(tuple(copies), needs, minimum, node_minimum, ranks_per_node)


def _by_tensor(holdings: Holdings) -> dict[str, dict[Rectangle, _Owners]]:
    found: dict[str, dict[Rectangle, _Owners]] = {}
    for rank, shards in holdings.items():
        for shard in shards:
            for block in shard.blocks:
                area = (
                    block.row_start,
                    block.row_start + block.num_rows,
                    block.column_start,
                    block.column_start + block.num_columns,
                )
                owners = found.setdefault(block.hf_name, {}).setdefault(area, {})
                owners.setdefault(rank, (shard.name, block))
    return found


def _by_node(ranks: Sequence[int] | _Owners, ranks_per_node: int) -> dict[int, list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return nodes


def _intersect(one: Rectangle, other: Rectangle) -> Rectangle | None:
    top, bottom = max(one[0], other[0]), min(one[1], other[1])
    left, right = max(one[2], other[2]), min(one[3], other[3])
    return (top, bottom, left, right) if top < bottom and left < right else None


def _route(
    name: str,
    area: Rectangle,
    size: int,
    group: list[int],
    needers: _Owners,
    holders: _Owners,
    neighbours: list[int],
    loads: _Loads,
) -> list[Copy]:
    """The copies that bring one piece to the ranks `group` of one node; `neighbours` hold it on that node."""
    copies = [_build_copy(name, area, rank, rank, 0, holders, needers) for rank in group if rank in holders]
    rest = [rank for rank in group if rank not in holders]
    if not rest:
        return copies
    if neighbours:
        for rank in rest:
            source = min(neighbours, key=lambda each: (loads.sent_inside[each], each))
            loads.sent_inside[source] += size
            copies.append(_build_copy(name, area, source, rank, 0, holders, needers))
        return copies
    entry = min(rest, key=lambda each: (loads.entered[each], each))
    source = min(holders, key=lambda each: (loads.sent_across[each], each))
    loads.entered[entry] += size
    loads.sent_across[source] += size
    copies.append(_build_copy(name, area, source, entry, 0, holders, needers))
    for rank in rest:
        if rank != entry:
            loads.sent_inside[entry] += size
            copies.append(_build_copy(name, area, entry, rank, 1, needers, needers))
    return copies


def _build_copy(
    name: str, area: Rectangle, source: int, target: int, hop: int, holders: _Owners, needers: _Owners
) -> Copy:
    top, bottom, left, right = area
    (source_name, reads), (target_name, writes) = holders[source], needers[target]
    return Copy(
        source,
        target,
        hop,
        name,
        top,
        bottom - top,
        left,
        right - left,
        source_name,
        reads.offset + (top - reads.row_start) * reads.stride + left - reads.column_start,
        reads.stride,
        target_name,
        writes.offset + (top - writes.row_start) * writes.stride + left - writes.column_start,
        writes.stride,
    )


def summarize(plan: ReshardPlan, itemsize: int) -> list[Traffic]:
    """What each rank of the engines keeps, receives and sends, and how little it could receive, in bytes.

    Args:
        itemsize: bytes of an element on the way.
    """
    kept: dict[int, int] = defaultdict(int)
    inside: dict[int, int] = defaultdict(int)
    across: dict[int, int] = defaultdict(int)
    sent_inside: dict[int, int] = defaultdict(int)
    sent_across: dict[int, int] = defaultdict(int)
    for copy in plan.copies:
        if copy.source == copy.target:
            kept[copy.target] += copy.numel
        elif copy.source // plan.ranks_per_node == copy.target // plan.ranks_per_node:
            inside[copy.target] += copy.numel
            sent_inside[copy.source] += copy.numel
        else:
            across[copy.target] += copy.numel
            sent_across[copy.source] += copy.numel
    ranks = sorted({*plan.needs, *sent_inside, *sent_across})
    return [
        Traffic(
            rank,
            needed=plan.needs.get(rank, 0) * itemsize,
            kept=kept[rank] * itemsize,
            inside=inside[rank] * itemsize,
            across=across[rank] * itemsize,
            sent_inside=sent_inside[rank] * itemsize,
            sent_across=sent_across[rank] * itemsize,
            minimum=plan.minimum.get(rank, 0) * itemsize,
        )
        for rank in ranks
    ]
