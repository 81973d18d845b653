"""Cuts a transfer plan into rounds whose staging is bounded. Pure: numbers, no tensors, no ranks.

    rounds = plan_rounds(plan, slot_elements=8 << 20)
    rounds.local         # copies that never leave their rank
    rounds.remote[3]     # {(source, target): copies}: one message a pair

In a round a rank sends at most `slot_elements` and receives at most as many, whatever the number of its peers. Pairs
are tried by their distance (target - source), so that the messages of a round are spread over the ranks. A copy that
is larger than what is left of a slot is cut by rows, and a row that is larger than a slot by columns:

    slot 10:  round 0  0->1: rows 0..2 of [5, 3]        round 1  0->1: rows 3, 4

A copy of hop 1 reads what a copy of hop 0 has written. While one round travels the next is packed, so hop 1 may be
packed two rounds after its data was sent (`HANDED_ON_AFTER`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megarl.weights.plan import Copy, ReshardPlan

HANDED_ON_AFTER = 2
SMALLEST_CUT = 8  # a copy is not cut for less than this part of a slot

Pair = tuple[int, int]  # source rank, target rank
Round = Mapping[Pair, tuple[Copy, ...]]


@dataclass(frozen=True)
class Rounds:
    """The copies of a plan in the order in which they are made: `local` at any time, `remote` round after round."""

    local: tuple[Copy, ...]
    remote: tuple[Round, ...]
    slot_elements: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A copy, or what is left of `whole`, that may be packed in round `ready` or later."""

    ready: int
    copy: Copy
    whole: Copy


class _Queues:
    """What waits, by pair; and what hop 1 waits for."""

    def __init__(self, plan: ReshardPlan) -> None:
        self.by_pair: dict[Pair, deque[_Waiting]] = defaultdict(deque)
        self.followers: dict[tuple[object, ...], list[Copy]] = defaultdict(list)
        self.missing: dict[tuple[object, ...], int] = {}
        for copy in plan.copies:
            if copy.source == copy.target:
                continue
            if copy.hop == 0:
                self.by_pair[copy.source, copy.target].append(_Waiting(0, copy, copy))
            else:
                key = (copy.source, *copy.piece)
                self.followers[key].append(copy)
                self.missing[key] = copy.numel

    def deliver(self, whole: Copy, numel: int, number: int) -> None:
        """`numel` elements of `whole` travel in round `number`; with the last of them its followers get their turn."""
        key = (whole.target, *whole.piece)
        if whole.hop or key not in self.missing:
            return
        self.missing[key] -= numel
        if self.missing[key] == 0:
            del self.missing[key]
            for copy in self.followers.pop(key):
                self.by_pair[copy.source, copy.target].append(_Waiting(number + HANDED_ON_AFTER, copy, copy))


def plan_rounds(plan: ReshardPlan, slot_elements: int) -> Rounds:
    """Deals the copies of a plan out over rounds; the same wherever it is made.

    Args:
        plan: of one transfer.
        slot_elements: what a rank may send, and what it may receive, in one round; 1 or more.

    The invariants: every element of every copy is in exactly one round; hop 1 comes `HANDED_ON_AFTER` rounds after
    the last part of what it hands on.
    """
    assert slot_elements >= 1, f"slot_elements={slot_elements} must be 1 or more"
    queues = _Queues(plan)
    num_ranks = 1 + max((max(copy.source, copy.target) for copy in plan.copies), default=0)
    rounds: list[Round] = []
    while any(queues.by_pair.values()):
        number = len(rounds)
        free_to_send: dict[int, int] = defaultdict(lambda: slot_elements)
        free_to_receive: dict[int, int] = defaultdict(lambda: slot_elements)
        messages: dict[Pair, tuple[Copy, ...]] = {}
        waiting = sorted(queues.by_pair, key=lambda pair: ((pair[1] - pair[0]) % num_ranks, pair[0]))
        for pair in waiting:
            room = min(free_to_send[pair[0]], free_to_receive[pair[1]])
            taken = _fill(queues, pair, room, number, slot_elements)
            if taken:
                size = sum(copy.numel for copy in taken)
                free_to_send[pair[0]] -= size
                free_to_receive[pair[1]] -= size
                messages[pair] = tuple(taken)
            if not queues.by_pair[pair]:
                del queues.by_pair[pair]
        rounds.append(messages)
    assert not queues.missing, f"{len(queues.missing)} pieces are handed on but never arrive"
    local = tuple(copy for copy in plan.copies if copy.source == copy.target)
    return Rounds(local, tuple(rounds), slot_elements)


def _fill(queues: _Queues, pair: Pair, room: int, number: int, slot_elements: int) -> list[Copy]:
    """What `pair` sends in round `number`, at most `room` elements; the rest stays in its queue."""
    queue = queues.by_pair[pair]
    taken: list[Copy] = []
    while queue and room and queue[0].ready <= number:
        first = queue[0]
        if first.copy.numel <= room:
            head, rest = first.copy, []
        elif room * SMALLEST_CUT < slot_elements:
            break
        else:
            head, rest = _cut(first.copy, room)
        queue.popleft()
        queue.extendleft(_Waiting(first.ready, part, first.whole) for part in reversed(rest))
        taken.append(head)
        room -= head.numel
        queues.deliver(first.whole, head.numel, number)
    return taken


def _cut(copy: Copy, room: int) -> tuple[Copy, list[Copy]]:
    """As many whole rows as fit into `room`, or the beginning of a row; and the rest in order."""
    num_rows = room // copy.num_columns
    if num_rows:
        return _rows(copy, 0, num_rows), [_rows(copy, num_rows, copy.num_rows - num_rows)]
    first = _rows(copy, 0, 1)
    rest = [_columns(first, room, copy.num_columns - room)]
    if copy.num_rows > 1:
        rest.append(_rows(copy, 1, copy.num_rows - 1))
    return _columns(first, 0, room), rest


def _rows(copy: Copy, start: int, count: int) -> Copy:
    return replace(
        copy,
        row_start=copy.row_start + start,
        num_rows=count,
        source_offset=copy.source_offset + start * copy.source_stride,
        target_offset=copy.target_offset + start * copy.target_stride,
    )


def _columns(copy: Copy, start: int, count: int) -> Copy:
    return replace(
        copy,
        column_start=copy.column_start + start,
        num_columns=count,
        source_offset=copy.source_offset + start,
        target_offset=copy.target_offset + start,
    )
