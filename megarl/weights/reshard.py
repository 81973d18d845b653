"""Moves the trainer's shards into the engines' live parameters as a plan says; nothing whole is ever made.

    resharder = build_resharder(plan, rank, group, trainer_dtype, engine_dtype)         # once
    resharder.run(actor_parameters, live_parameters)                          # a collective of the group, any number

What a rank trains and its engine needs is copied in place. The rest travels in rounds (`rounds.py`), in two ways:

- a run of at least `DIRECT_BYTES` that is contiguous on both sides and needs no cast is sent out of the trainer's
  parameter and received in the engine's: no staging, no copy;
- all else is packed by `copy_segments` into one flat slot, one message a peer and round, and written into the live
  parameters by `copy_segments` on the other side, casting on the way.

While a round travels, the next one is packed and posted:

    post 0 | local copies | post 1, unpack 0 | post 2, unpack 1 | ... | unpack last

Two slots for sending and two for receiving share `bucket_bytes`; they are the only staging there is. Between the ranks
elements have the smaller of both sides' dtypes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import device
from megarl.ops.reshard import build_plan, copy_segments, place_plan
from megarl.weights.plan import Copy, ReshardPlan, summarize
from megarl.weights.rounds import HANDED_ON_AFTER, Round, plan_rounds

BUCKET_BYTES = 64 << 20
SLOTS = 4  # two for sending, two for receiving
DIRECT_BYTES = 256 << 10  # below this a message of its own costs more than packing
CASTS = {(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class Message:
    """`count` elements between this rank and `peer`, from element `start` of `parameter`, or of the round's slot where
    that is None. `hop` 1 is sent out of the engine's parameters.
    """

    peer: int
    start: int
    count: int
    parameter: str | None = None
    hop: int = 0


@dataclass(frozen=True)
class Step:
    """Copies between named parameters and a slot, or between named parameters, ready for `copy_segments`."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    segments: Tensor
    placed: Tensor | None

    def run(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        if len(self.segments):
            copy_segments(sources, targets, self.segments, self.placed)


@dataclass(frozen=True)
class RankRound:
    """One rank's part of a round: what it packs from the trainer (hop 0) and the engine (hop 1), sends and unpacks."""

    number: int
    pack_trained: Step
    pack_arrived: Step
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    unpack: Step


@dataclass(frozen=True)
class ReshardStats:
    """What one transfer moved on this rank, in bytes, and how long it took."""

    kept_bytes: int
    received_bytes: int
    minimum_bytes: int
    num_rounds: int
    seconds: float


@dataclass(frozen=True)
class Resharder:
    """One rank's compiled part of a plan with its staging buffers. Built by `build_resharder`.

    `shared`: engine parameters that must be the trainer's own storage (`alias_`), by the trainer's name for them;
    nothing is copied for these. `stats` holds the bytes of every run, its seconds are 0.
    """

    rank: int
    group: dist.ProcessGroup
    local: Step
    rounds: tuple[RankRound, ...]
    shared: Mapping[str, str]
    slots: tuple[Tensor, ...]
    stats: ReshardStats

    @property
    def staging_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    @torch.no_grad()
    def run(self, trained: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> ReshardStats:
        """Makes one transfer; every rank of the group calls it.

        Args:
            trained: the actor's parameters of this rank by layout name, contiguous; empty outside the actor.
            live: the engine's parameters of this rank by vLLM's name, contiguous, written in place; empty where no
                engine lives. Must not share memory with `trained`.

        Returns:
            Bytes and seconds of this rank.

        Raises:
            RuntimeError: a peer is gone or late.
        """
        begin = time.perf_counter()
        flying: list[tuple[RankRound, list[dist.Work], int]] = []
        if self.rounds:
            flying.append(self._post(self.rounds[0], 0, trained, live))
        self.local.run(_pick(trained, self.local.sources), _pick(live, self.local.targets))
        for index, part in enumerate(self.rounds[1:], 1):
            before = flying[0][0]
            if part.number - before.number >= HANDED_ON_AFTER:  # it may hand on what `before` brings
                self._unpack(*flying.pop(), live)
            flying.append(self._post(part, index % 2, trained, live))
            if len(flying) == 2:
                self._unpack(*flying.pop(0), live)
        for rest in flying:
            self._unpack(*rest, live)
        device.synchronize()
        stats = self.stats
        seconds = time.perf_counter() - begin
        return ReshardStats(stats.kept_bytes, stats.received_bytes, stats.minimum_bytes, stats.num_rounds, seconds)

    def _post(
        self, part: RankRound, parity: int, trained: Mapping[str, Tensor], live: Mapping[str, Tensor]
    ) -> tuple[RankRound, list[dist.Work], int]:
        """Packs a round and starts its messages."""
        outgoing, incoming = self.slots[parity], self.slots[2 + parity]
        part.pack_trained.run(_pick(trained, part.pack_trained.sources), [outgoing])
        part.pack_arrived.run(_pick(live, part.pack_arrived.sources), [outgoing])
        batch = [self._p2p(dist.irecv, message, incoming, live) for message in part.receives]
        batch += [self._p2p(dist.isend, message, outgoing, live if message.hop else trained) for message in part.sends]
        return part, dist.batch_isend_irecv(batch) if batch else [], parity

    def _p2p(self, kind: object, message: Message, slot: Tensor, parameters: Mapping[str, Tensor]) -> dist.P2POp:
        if message.parameter is not None:
            parameter = parameters[message.parameter]
            assert parameter.dtype == slot.dtype, f"{message.parameter} is {parameter.dtype}, not {slot.dtype}"
            slot = parameter.view(-1)
        part = slot[message.start : message.start + message.count]
        return dist.P2POp(kind, part, message.peer, self.group)  # pyright: ignore[reportArgumentType]

    def _unpack(self, part: RankRound, works: Sequence[dist.Work], parity: int, live: Mapping[str, Tensor]) -> None:
        """Waits for a round and writes what it brought into the live parameters."""
        for work in works:
            work.wait()
        part.unpack.run([self.slots[2 + parity]], _pick(live, part.unpack.targets))


def _pick(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    return [tensors[name] for name in names]


def check_dtypes(trainer: torch.dtype, engine: torch.dtype) -> None:
    """Raises ValueError where weights cannot be cast from one to the other on the way."""
    if trainer != engine and (trainer, engine) not in CASTS:
        raise ValueError(
            f"actor.dtype={trainer} and rollout.dtype={engine}: weights are cast between fp32 and bf16 only; "
            f"set both to the same"
        )


def build_resharder(
    plan: ReshardPlan,
    rank: int,
    group: dist.ProcessGroup,
    trainer_dtype: torch.dtype,
    engine_dtype: torch.dtype,
    bucket_bytes: int = BUCKET_BYTES,
    shares: bool = False,
) -> Resharder:
    """Compiles this rank's part of a plan; no communication.

    Args:
        plan: the same on every rank.
        rank: this process's global rank.
        group: all ranks that the plan names.
        trainer_dtype, engine_dtype: of the parameters on both sides (single live parameters may be fp32 beside bf16).
        bucket_bytes: of all staging buffers together.
        shares: leave out copies between parameters of the same content and layout, for `alias_`.

    Raises:
        ValueError: dtypes that cannot be cast.
    """
    check_dtypes(trainer_dtype, engine_dtype)
    wire = min(trainer_dtype, engine_dtype, key=lambda dtype: dtype.itemsize)
    rounds = plan_rounds(plan, max(1, bucket_bytes // SLOTS // wire.itemsize))
    direct = DIRECT_BYTES // wire.itemsize if trainer_dtype == engine_dtype else None
    parts = tuple(
        _compile_round(number, messages, rank, direct)
        for number, messages in enumerate(rounds.remote)
        if any(rank in pair for pair in messages)
    )
    kept = [copy for copy in rounds.local if copy.target == rank]
    shared = find_shared(plan, rank) if shares and trainer_dtype == engine_dtype else {}
    local = _compile(merge_runs([copy for copy in kept if copy.target_parameter not in shared]), None, None)
    largest_sent = max((_count_packed(part.sends) for part in parts), default=0)
    largest_received = max((_count_packed(part.receives) for part in parts), default=0)
    second = len(parts) > 1
    sizes = (largest_sent, largest_sent * second, largest_received, largest_received * second)
    slots = tuple(torch.empty(size, dtype=wire, device=device.device()) for size in sizes)
    traffic = {each.rank: each for each in summarize(plan, wire.itemsize)}.get(rank)
    stats = ReshardStats(
        kept_bytes=traffic.kept if traffic else 0,
        received_bytes=wire.itemsize * sum(message.count for part in parts for message in part.receives),
        minimum_bytes=traffic.minimum if traffic else 0,
        num_rounds=len(parts),
        seconds=0.0,
    )
    return Resharder(rank, group, local, parts, shared, slots, stats)


def find_shared(plan: ReshardPlan, rank: int) -> dict[str, str]:
    """Engine parameters of `rank` that are one of its trained parameters, element for element. Pure.

    Returns:
        Engine's name -> trainer's name. Padding may differ in length, not in place.
    """
    sources: dict[str, set[str]] = {}
    moved: set[str] = set()
    for copy in plan.copies:
        if copy.target != rank:
            continue
        sources.setdefault(copy.target_parameter, set()).add(copy.source_parameter)
        is_in_place = copy.source == rank and copy.source_offset == copy.target_offset
        if not is_in_place or (copy.num_rows > 1 and copy.source_stride != copy.target_stride):
            moved.add(copy.target_parameter)
    return {name: min(found) for name, found in sources.items() if name not in moved and len(found) == 1}


def merge_runs(copies: Sequence[Copy]) -> list[Copy]:
    """Joins copies whose elements follow each other in both parameters, such as gate and up; one row each. Pure."""
    merged: list[Copy] = []
    for copy in copies:
        if not _is_run(copy):
            merged.append(copy)
            continue
        copy = replace(copy, num_rows=1, num_columns=copy.numel, source_stride=copy.numel, target_stride=copy.numel)
        before = merged[-1] if merged else None
        if before is not None and before.num_rows == 1 and _follows(before, copy):
            size = before.num_columns + copy.num_columns
            merged[-1] = replace(before, num_columns=size, source_stride=size, target_stride=size)
        else:
            merged.append(copy)
    return merged


def _is_run(copy: Copy) -> bool:
    """True when a copy is contiguous on both sides."""
    return copy.num_rows == 1 or copy.source_stride == copy.num_columns == copy.target_stride


def _follows(before: Copy, copy: Copy) -> bool:
    return (
        (before.source, before.target, before.hop) == (copy.source, copy.target, copy.hop)
        and (before.source_parameter, before.target_parameter) == (copy.source_parameter, copy.target_parameter)
        and before.source_offset + before.num_columns == copy.source_offset
        and before.target_offset + before.num_columns == copy.target_offset
    )


def _count_packed(messages: Iterable[Message]) -> int:
    return sum(message.count for message in messages if message.parameter is None)


def _compile_round(number: int, messages: Round, rank: int, direct: int | None) -> RankRound:
    """Lays the messages of one rank out in its slots, peer after peer.

    Args:
        direct: elements from which on a run travels without staging; None = never.
    """
    sends: list[Message] = []
    receives: list[Message] = []
    outgoing: list[tuple[Copy, int]] = []
    incoming: list[tuple[Copy, int]] = []
    for (source, target), copies in messages.items():
        runs = merge_runs(copies)
        alone = [copy for copy in runs if direct is not None and copy.numel >= direct and _is_run(copy)]
        packed = [copy for copy in runs if copy not in alone]
        if source == rank:
            sends += [Message(target, c.source_offset, c.numel, c.source_parameter, c.hop) for c in alone]
            _lay_out(packed, target, sends, outgoing)
        if target == rank:
            receives += [Message(source, c.target_offset, c.numel, c.target_parameter) for c in alone]
            _lay_out(packed, source, receives, incoming)
    hops = [[(copy, place) for copy, place in outgoing if copy.hop == hop] for hop in (0, 1)]
    pack = [_compile([c for c, _ in part], None, [place for _, place in part]) for part in hops]
    unpack = _compile([copy for copy, _ in incoming], [place for _, place in incoming], None)
    return RankRound(number, pack[0], pack[1], tuple(sends), tuple(receives), unpack)


def _lay_out(copies: Sequence[Copy], peer: int, messages: list[Message], placed: list[tuple[Copy, int]]) -> None:
    """Appends one message of all `copies` behind what is laid out in the slot."""
    start = place = _count_packed(messages)
    for copy in copies:
        placed.append((copy, place))
        place += copy.numel
    if copies:
        messages.append(Message(peer, start, place - start))


def _compile(copies: Sequence[Copy], read_at: Sequence[int] | None, write_at: Sequence[int] | None) -> Step:
    """Segments for `copy_segments`.

    Args:
        read_at: where in a slot each copy is read from, row after row; None = in its source parameter.
        write_at: where in a slot each copy is written; None = in its target parameter.
    """
    sources = {name: i for i, name in enumerate(dict.fromkeys(copy.source_parameter for copy in copies))}
    targets = {name: i for i, name in enumerate(dict.fromkeys(copy.target_parameter for copy in copies))}
    rows = [
        (
            *((sources[c.source_parameter], c.source_offset, c.source_stride) if read_at is None
              else (0, read_at[i], c.num_columns)),
            *((targets[c.target_parameter], c.target_offset, c.target_stride) if write_at is None
              else (0, write_at[i], c.num_columns)),
            c.num_rows,
            c.num_columns,
        )
        for i, c in enumerate(copies)
    ]  # fmt: skip
    segments = build_plan(rows)
    return Step(
        tuple(sources) if read_at is None else (),
        tuple(targets) if write_at is None else (),
        segments,
        place_plan(segments, device.device()),
    )
