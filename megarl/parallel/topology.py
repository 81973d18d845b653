"""The grid of one role: tp × pp × dp over a list of ranks. Pure: no distributed call.

Ranks are laid out with tp fastest, then dp, then pp, as Megatron does, so that tensor-parallel peers sit on one
node; the order "dp-tp-pp" swaps the first two. A worked example, 8 ranks as tp=2, dp=2, pp=2:

    stage 0:  dp 0: ranks 0 1    dp 1: ranks 2 3
    stage 1:  dp 0: ranks 4 5    dp 1: ranks 6 7

    tp groups  (0 1) (2 3) (4 5) (6 7)      dp groups  (0 2) (1 3) (4 6) (5 7)      pp groups  (0 4) (1 5) (2 6) (3 7)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

Axis = Literal["tp", "dp", "pp"]
Order = Literal["tp-dp-pp", "dp-tp-pp"]


@dataclass(frozen=True)
class Coordinates:
    """Where one rank sits in a role's grid."""

    tp: int
    dp: int
    pp: int

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}"


@dataclass(frozen=True)
class Topology:
    """A role's grid; `ranks` are global ranks, rising, and need not be neighbours.

    `chunk_stages` says which stage runs each chunk of the model, in the model's order (see `schedule.py`); the default
    is one chunk a stage, in order.

    The invariant: `len(ranks) == tp_size * pp_size * dp_size`. Ranks rise because torch sorts the ranks of a group:
    a rank's place in its group is then its place in the grid.
    """

    ranks: tuple[int, ...]
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    order: Order = "tp-dp-pp"
    chunk_stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.chunk_stages:
            object.__setattr__(self, "chunk_stages", tuple(range(self.pp_size)))
        assert set(self.chunk_stages) == set(range(self.pp_size)), (
            f"chunks on stages {self.chunk_stages} of a grid with pp={self.pp_size}"
        )
        assert len(self.ranks) == self.tp_size * self.pp_size * self.dp_size, (
            f"{len(self.ranks)} ranks cannot form tp={self.tp_size} pp={self.pp_size} dp={self.dp_size}"
        )
        assert all(a < b for a, b in itertools.pairwise(self.ranks)), f"ranks must rise: {self.ranks}"

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_stages)

    @property
    def first_stage(self) -> int:
        """The stage of the model's beginning: it embeds tokens."""
        return self.chunk_stages[0]

    @property
    def last_stage(self) -> int:
        """The stage of the model's end: it has the head."""
        return self.chunk_stages[-1]

    @property
    def ends_meet(self) -> bool:
        """Whether the model's first and last chunk are two on one stage, as in a V."""
        return self.num_chunks > 1 and self.first_stage == self.last_stage

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that `stage` runs, first to last."""
        return tuple(chunk for chunk, at in enumerate(self.chunk_stages) if at == stage)

    def rank_at(self, tp: int, dp: int, pp: int) -> int:
        """The global rank at these coordinates."""
        inner = tp + self.tp_size * dp if self.order == "tp-dp-pp" else dp + self.dp_size * tp
        return self.ranks[inner + self.tp_size * self.dp_size * pp]

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` sits. Raises ValueError when it is not part of the role."""
        stage, inner = divmod(self.ranks.index(rank), self.tp_size * self.dp_size)
        if self.order == "tp-dp-pp":
            return Coordinates(tp=inner % self.tp_size, dp=inner // self.tp_size, pp=stage)
        return Coordinates(tp=inner // self.dp_size, dp=inner % self.dp_size, pp=stage)

    def groups(self, *axes: Axis) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only along `axes`, ranks rising, groups by first rank."""
        together: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            at = self.coordinates(rank)
            key = tuple(-1 if axis in axes else getattr(at, axis) for axis in ("pp", "dp", "tp"))
            together.setdefault(key, []).append(rank)
        return [tuple(group) for group in together.values()]


def plan_topology(
    role: str,
    world_size: int,
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    ranks: list[int] | None = None,
    order: Order = "tp-dp-pp",
) -> Topology:
    """Builds a role's grid from what the user wrote.

    Args:
        role: the role's name, for messages.
        world_size: ranks in the job.
        tp, pp: sizes; dp: size, or None = what the ranks give.
        ranks: global ranks of the role, or None = all; with a dp that needs fewer, the first tp × pp × dp of them.
        order: which axis runs fastest.

    Raises:
        ValueError: sizes that are not positive, ranks out of range or repeated, or a product that does not fit.
    """
    for name, size in (("tp", tp), ("pp", pp), ("dp", 1 if dp is None else dp)):
        if size < 1:
            raise ValueError(f"parallel.{role}.{name}={size} must be 1 or more")
    wanted = world_size if dp is None else min(world_size, tp * pp * dp)
    chosen = tuple(range(wanted)) if ranks is None else tuple(sorted(ranks))
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"parallel.{role}.ranks={list(chosen)} names a rank twice")
    outside = [rank for rank in chosen if not 0 <= rank < world_size]
    if outside:
        raise ValueError(f"parallel.{role}.ranks={list(chosen)}: ranks {outside} are not in 0..{world_size - 1}")
    if not chosen or len(chosen) % (tp * pp):
        raise ValueError(
            f"parallel.{role}: tp={tp} × pp={pp} = {tp * pp} does not divide its {len(chosen)} ranks; "
            f"start a multiple of {tp * pp} ranks, or choose sizes whose product divides {len(chosen)}"
        )
    fitting = len(chosen) // (tp * pp)
    if dp is not None and dp != fitting:
        raise ValueError(
            f"parallel.{role}.dp={dp} does not agree with its {len(chosen)} ranks at tp={tp} pp={pp}, "
            f"which give dp={fitting}; leave dp out, set dp={fitting}, or list {tp * pp * dp} ranks in "
            f"parallel.{role}.ranks"
        )
    return Topology(ranks=chosen, tp_size=tp, pp_size=pp, dp_size=fitting, order=order)
