"""Carries what one role's ranks know to every rank of the job: ragged answers and per-token scores.

Host tensors over gloo. Every rank of the world calls; a rank outside the role contributes nothing. Sums of a value and
zeros are exact, so what arrives is what was sent, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def share_ragged(own: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Every rank's vector, on every rank.

    Args:
        own: [n] on the host; n may differ between ranks and be 0. One dtype everywhere.
        group: the ranks that take part; None = the world.

    Returns:
        The vectors by rank of the group.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = torch.zeros(size, dtype=torch.int64)
    counts[rank] = own.numel()
    dist.all_reduce(counts, group=group)
    bounds = [0, *counts.cumsum(0).tolist()]
    everything = own.new_zeros(bounds[-1])
    everything[bounds[rank] : bounds[rank + 1]] = own
    if everything.numel():
        dist.all_reduce(everything, group=group)
    return [everything[bounds[i] : bounds[i + 1]] for i in range(size)]


def share_token_scores(own: Mapping[str, Tensor], token_index: Tensor, num_tokens: int) -> dict[str, Tensor]:
    """Scores that the ranks computed for parts of a batch, put together on every rank of the world.

    Args:
        own: name -> [K] float scores of this rank; the names are the same on every rank.
        token_index: [K] int64, the packed positions they belong to; no position is filled by two ranks.
        num_tokens: T.

    Returns:
        name -> [T] fp32, 0 where no rank filled.
    """
    joined = torch.zeros(len(own), num_tokens)
    for row, scores in zip(joined, own.values(), strict=True):
        row[token_index] = scores.detach().float().cpu()
    if joined.numel():
        dist.all_reduce(joined)
    return dict(zip(own, joined, strict=True))


def share_sums(own: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    """The sum over all ranks of the world of each named number; a rank that has none of a name adds nothing."""
    sums = torch.tensor([own.get(name, 0.0) for name in names], dtype=torch.float64)
    dist.all_reduce(sums)
    return dict(zip(names, sums.tolist(), strict=True))
