"""Moves the trainer's shards into the engines' live parameters as a plan says; nothing whole is ever made.

    resharder = build_resharder(plan, rank, group, trainer_dtype, engine_dtype)         # once
    resharder.run(actor_parameters, live_parameters)                          # a collective of the group, any number

What a rank trains and its engine needs is copied in place. The rest travels in rounds (`rounds.py`): `copy_segments`
packs a round's segments into one flat buffer, a message goes to each peer, and `copy_segments` writes what came into
the live parameters, casting on the way. While a round travels, the next one is packed and posted:

    post 0 | local copies | post 1, unpack 0 | post 2, unpack 1 | ... | unpack last

Two slots for sending and two for receiving share `bucket_bytes`; they are the only staging there is. Between the ranks
elements have the smaller of both sides' dtypes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import device
from megarl.ops.reshard import build_plan, copy_segments, place_plan
from megarl.weights.plan import Copy, ReshardPlan, summarize
from megarl.weights.rounds import HANDED_ON_AFTER, Round, plan_rounds

BUCKET_BYTES = 64 << 20
SLOTS = 4  # two for sending, two for receiving
CASTS = {(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class Message:
    """`count` elements between this rank and `peer`, from element `start` of the round's slot."""

    peer: int
    start: int
    count: int


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

    `stats` holds the bytes of every run, its seconds are 0.
    """

    rank: int
    group: dist.ProcessGroup
    local: Step
    rounds: tuple[RankRound, ...]
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
        batch = [_p2p(dist.irecv, incoming, message, self.group) for message in part.receives]
        batch += [_p2p(dist.isend, outgoing, message, self.group) for message in part.sends]
        return part, dist.batch_isend_irecv(batch) if batch else [], parity

    def _unpack(self, part: RankRound, works: Sequence[dist.Work], parity: int, live: Mapping[str, Tensor]) -> None:
        """Waits for a round and writes what it brought into the live parameters."""
        for work in works:
            work.wait()
        part.unpack.run([self.slots[2 + parity]], _pick(live, part.unpack.targets))


def _pick(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    return [tensors[name] for name in names]


def _p2p(kind: object, slot: Tensor, message: Message, group: dist.ProcessGroup) -> dist.P2POp:
    part = slot[message.start : message.start + message.count]
    return dist.P2POp(kind, part, message.peer, group)  # pyright: ignore[reportArgumentType]


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
) -> Resharder:
    """Compiles this rank's part of a plan; no communication.

    Args:
        plan: the same on every rank.
        rank: this process's global rank.
        group: all ranks that the plan names.
        trainer_dtype, engine_dtype: of the parameters on both sides (single live parameters may be fp32 beside bf16).
        bucket_bytes: of all staging buffers together.

    Raises:
        ValueError: dtypes that cannot be cast.
    """
    check_dtypes(trainer_dtype, engine_dtype)
    wire = min(trainer_dtype, engine_dtype, key=lambda dtype: dtype.itemsize)
    rounds = plan_rounds(plan, max(1, bucket_bytes // SLOTS // wire.itemsize))
    parts = tuple(
        _compile_round(number, messages, rank)
        for number, messages in enumerate(rounds.remote)
        if any(rank in pair for pair in messages)
    )
    local = _compile([copy for copy in rounds.local if copy.target == rank], None, None)
    largest_sent = max((_count(part.sends) for part in parts), default=0)
    largest_received = max((_count(part.receives) for part in parts), default=0)
    second = len(parts) > 1
    sizes = (largest_sent, largest_sent * second, largest_received, largest_received * second)
    slots = tuple(torch.empty(size, dtype=wire, device=device.device()) for size in sizes)
    traffic = {each.rank: each for each in summarize(plan, wire.itemsize)}.get(rank)
    stats = ReshardStats(
        kept_bytes=traffic.kept if traffic else 0,
        received_bytes=wire.itemsize * sum(_count(part.receives) for part in parts),
        minimum_bytes=traffic.minimum if traffic else 0,
        num_rounds=len(parts),
        seconds=0.0,
    )
    return Resharder(rank, group, local, parts, slots, stats)


def _count(messages: Iterable[Message]) -> int:
    return sum(message.count for message in messages)


def _compile_round(number: int, messages: Round, rank: int) -> RankRound:
    """Lays the messages of one rank out in its slots, peer after peer."""
    sends: list[Message] = []
    receives: list[Message] = []
    outgoing: list[tuple[Copy, int]] = []
    incoming: list[tuple[Copy, int]] = []
    for (source, target), copies in messages.items():
        for mine, peer, laid, out in ((source, target, sends, outgoing), (target, source, receives, incoming)):
            if mine != rank:
                continue
            start = place = _count(laid)
            for copy in copies:
                out.append((copy, place))
                place += copy.numel
            laid.append(Message(peer, start, place - start))
    hops = [[(copy, place) for copy, place in outgoing if copy.hop == hop] for hop in (0, 1)]
    pack = [_compile([c for c, _ in part], None, [place for _, place in part]) for part in hops]
    unpack = _compile([copy for copy, _ in incoming], [place for _, place in incoming], None)
    return RankRound(number, pack[0], pack[1], tuple(sends), tuple(receives), unpack)


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
