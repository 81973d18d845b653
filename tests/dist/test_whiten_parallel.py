"""Whitening over ranks equals whitening of all tokens on one, whatever each rank holds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops.moments import whiten
from tests.ranks import run_ranks

SPLITS = {
    "even": [300, 300, 169],
    "one rank has no tokens": [0, 700, 69],
    "masks of one rank are empty": [100, 600, 69],
}


def _tokens(kind: str) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(769, generator=rng) * 4 + 2
    mask = torch.rand(769, generator=rng) < 0.6
    if kind == "masks of one rank are empty":
        mask[:100] = False
    return x.where(mask, torch.nan), mask


def whiten_own(rank: int, world_size: int) -> list[Tensor]:
    """This rank's part of every case, then a batch in which no rank has a policy token."""
    assert dist.group.WORLD is not None
    results = []
    for kind, split in SPLITS.items():
        x, mask = (whole.split(split)[rank] for whole in _tokens(kind))
        results.append(whiten(x, mask, dist.group.WORLD))
    results.append(whiten(torch.full((5,), torch.nan), torch.zeros(5, dtype=torch.bool), dist.group.WORLD))
    only_first = torch.tensor([rank == 0])
    results.append(whiten(torch.ones(1), only_first, dist.group.WORLD))
    return results


@pytest.fixture(scope="module")
def by_rank() -> list[list[Tensor]]:
    return run_ranks(whiten_own, 3)


@pytest.mark.parametrize("kind", SPLITS)
def test_three_ranks_whiten_as_one(by_rank, kind):
    index = list(SPLITS).index(kind)
    together = torch.cat([results[index] for results in by_rank])
    torch.testing.assert_close(together, whiten(*_tokens(kind)))


def test_nothing_but_masked_tokens_on_all_ranks_is_zero(by_rank):
    """Case D8: every rank joins the collective."""
    assert all(torch.equal(results[3], torch.zeros(5)) for results in by_rank)


def test_one_policy_token_in_all_has_no_variance(by_rank):
    assert all(results[4].tolist() == [0.0] for results in by_rank)
