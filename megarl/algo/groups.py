"""What the answers to one prompt say about each other: count, mean, spread, and whether they all scored the same.

group    0    0    0    1    1        failed    F F T F F
scores   1    0    -    5    5        count 2 2, mean 0.5 5, is_flat F T
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupScores:
    """Statistics of G groups, fp64.

    `member` [B] int64: the group of each answer, counted from 0. `count` [G]: answers with a score. `mean`, `std` [G]:
    over those, the std unbiased and 0 for fewer than two. `is_flat` [G] bool: all scores are equal, so that they say
    nothing about which answer is better; a group in which every answer failed is not flat, it has `count` 0.
    """

    member: Tensor
    count: Tensor
    mean: Tensor
    std: Tensor
    is_flat: Tensor

    @property
    def flat_share(self) -> float:
        """The share of groups with a score that teach nothing because all their scores are equal."""
        num_scored = int((self.count > 0).sum())
        return int(self.is_flat.sum()) / num_scored if num_scored else 0.0

    @property
    def num_skipped(self) -> int:
        """Groups in which every answer failed."""
        return int((self.count == 0).sum())

    def sum(self, x: Tensor) -> Tensor:
        """[G]: `x` [B] added up over each group."""
        return x.new_zeros(self.count.numel()).index_add(0, self.member, x)


def summarise_groups(scores: Tensor, group: Tensor, failed: Tensor) -> GroupScores:
    """Statistics of the answers to each prompt.

    Args:
        scores: [B] float; not read where `failed`.
        group: [B] int, equal for answers to the same prompt.
        failed: [B] bool, True = no score.
    """
    ids, member = group.unique(return_inverse=True)
    scored = ~failed

    def per_group(x: Tensor) -> Tensor:
        return x.new_zeros(ids.numel()).index_add(0, member, x)

    def extreme(reduce: str, neutral: float) -> Tensor:
        start = torch.full((ids.numel(),), neutral, dtype=torch.float64, device=scores.device)
        return start.scatter_reduce(0, member, torch.where(scored, scores.double(), neutral), reduce)

    count = per_group(scored.double())
    mean = per_group(torch.where(scored, scores.double(), 0.0)) / count.clamp(min=1)
    centred = torch.where(scored, scores.double() - mean[member], 0.0)
    std = (per_group(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    # an all-failed group is not flat: -inf against inf
    is_flat = extreme("amax", -torch.inf) == extreme("amin", torch.inf)
    return GroupScores(member, count, mean, std, is_flat)


def find_telling_groups(scores: Tensor, group: Tensor, failed: Tensor) -> Tensor:
    """[B] bool: answers of groups worth training on, for dynamic sampling (DAPO, Yu et al. 2025, section 3.2).

    A group tells something when at least two of its answers have a score and the scores differ.
    """
    groups = summarise_groups(scores, group, failed)
    return (~groups.is_flat & (groups.count > 1))[groups.member]
