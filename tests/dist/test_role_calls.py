"""Calls between roles on unequal grids, 8 ranks -> 2 -> 1 -> 8, with 8 gloo ranks in one job."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.parallel.role_calls import BATCH, register
from megarl.parallel.topology import Topology
from megarl.records import PackedBatch
from tests.ranks import run_ranks
from tests.tiny import build_batch

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

EIGHT = Topology(tuple(range(8)), dp_size=8)
PAIR = Topology((2, 5), dp_size=2)
ONE = Topology((6,))
CUBE = Topology(tuple(range(8)), tp_size=2, pp_size=2, dp_size=2)
PROMPTS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
RESPONSES = [7, 0, 2, 6, 1, 30, 1, 4, 2, 25, 3, 0, 12]
OWNERS = [5, 0, 0, 3, 3, 1, 7, 7, 7, 6, 2, 2, 0]  # rank 4 holds nothing


@dataclass
class Worker:
    """A role without a model: every method shows which tokens it was given."""

    topology: Topology

    def __post_init__(self) -> None:
        self.seen: list[PackedBatch] = []

    @register(transfer_mode="3D_PROTO", returns="tokens")
    def compute_tokens(self, batch: PackedBatch, values: Tensor) -> Tensor:
        self.seen.append(batch)
        return batch.tokens * 2.0 + values + batch.response_mask * 0.25

    @register(transfer_mode="3D_PROTO", returns="sequences")
    def count(self, batch: PackedBatch) -> Tensor:
        self.seen.append(batch)
        return batch.lengths + 0.5 * batch.group

    @register(transfer_mode="DP_ONLY", returns="sequences")
    def count_alone(self, batch: PackedBatch) -> Tensor:
        self.seen.append(batch)
        return batch.lengths * 3.0

    @register(transfer_mode="ALL_GATHER", returns="sequences")
    def rank_by_length(self, batch: PackedBatch) -> Tensor:
        self.seen.append(batch)
        return batch.lengths.argsort(stable=True).argsort().float()

    @register(transfer_mode="ONE_TO_ALL", returns="sequences")
    def copy(self, batch: PackedBatch) -> Tensor:
        self.seen.append(batch)
        return batch.tokens.new_tensor([int(batch.tokens.sum())] * batch.num_sequences)


def whole_batch() -> PackedBatch:
    batch = build_batch(PROMPTS, RESPONSES)
    return dataclasses.replace(batch, is_finished=torch.arange(len(PROMPTS)) % 3 == 0)


def share_of(rank: int, caller: Topology) -> tuple[list[int], PackedBatch]:
    """The rows that this rank of the caller's grid holds, and them."""
    dp = caller.coordinates(rank).dp
    rows = [row for row, owner in enumerate(OWNERS) if owner % caller.dp_size == dp]
    return rows, whole_batch().select(rows)


def call_all(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, caller, callee in (
        ("8 to 2", EIGHT, PAIR), ("2 to 1", PAIR, ONE), ("1 to 8", ONE, CUBE), ("8 to 8", CUBE, EIGHT), ("cube", EIGHT, CUBE),
    ):  # fmt: skip
        rows, batch, scores = [], None, {}
        if rank in caller:
            rows, batch = share_of(rank, caller)
            scores = {"values": batch.tokens / 1000}
        worker = Worker(callee)
        results = [
            worker.compute_tokens(batch, caller=caller, **scores),
            worker.count(batch, caller=caller),
            worker.count_alone(batch, caller=caller),
            worker.rank_by_length(batch, caller=caller),
            worker.copy(batch, caller=caller),
        ]
        seen = [[row.tolist() for row in each.tokens.split(each.lengths.tolist())] for each in worker.seen]
        found[name] = (rows, results, seen, [dataclasses.asdict(each) for each in worker.seen])
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(call_all, 8, timeout_s=300)


CALLS = {"8 to 2": (EIGHT, PAIR), "2 to 1": (PAIR, ONE), "1 to 8": (ONE, CUBE), "8 to 8": (CUBE, EIGHT), "cube": (EIGHT, CUBE)}


@pytest.mark.parametrize("name", CALLS)
def test_results_come_back_in_the_callers_order(outcomes, name) -> None:
    caller, _ = CALLS[name]
    batch = whole_batch()
    order = [row for dp in range(caller.dp_size) for row in share_of(caller.rank_at(0, dp, 0), caller)[0]]
    place = batch.select(order).lengths.argsort(stable=True).argsort().float()
    first_rows = share_of(caller.ranks[0], caller)[0]
    for rank in range(8):
        rows, results, _, _ = outcomes[rank][name]
        if rank not in caller:
            assert results == [None] * 5
            continue
        own = batch.select(rows)
        expected_tokens = own.tokens * 2.0 + own.tokens / 1000 + own.response_mask * 0.25
        torch.testing.assert_close(results[0], expected_tokens, rtol=0, atol=1e-3)
        assert results[1].tolist() == (own.lengths + 0.5 * own.group).tolist()
        assert results[2].tolist() == (own.lengths * 3.0).tolist()
        assert results[3].tolist() == [float(place[order.index(row)]) for row in rows]
        assert results[4].tolist() == [float(batch.select(first_rows).tokens.sum())] * len(first_rows)


@pytest.mark.parametrize("name", CALLS)
def test_each_replica_sees_its_own_share_whole(outcomes, name) -> None:
    _, callee = CALLS[name]
    batch = whole_batch()
    everything = sorted(row.tolist() for row in batch.tokens.split(batch.lengths.tolist()))
    for number in (0, 1):  # the two 3D_PROTO calls
        shares = []
        for dp in range(callee.dp_size):
            ranks = [rank for rank in callee.ranks if callee.coordinates(rank).dp == dp]
            seen = [outcomes[rank][name][2][number] for rank in ranks]
            assert all(each == seen[0] for each in seen), "tp and pp ranks of a replica must see the same"
            shares += seen[0]
        assert sorted(shares) == everything
    alone = [row for rank in callee.ranks for row in outcomes[rank][name][2][2]]
    assert sorted(alone) == everything
    for rank in callee.ranks:
        assert sorted(outcomes[rank][name][2][3]) == everything
    for rank in set(range(8)) - set(callee.ranks):
        assert outcomes[rank][name][2] == []


@pytest.mark.parametrize("name", CALLS)
def test_every_field_of_a_sequence_stays_with_it(outcomes, name) -> None:
    batch = whole_batch()
    bounds = batch.cu_seqlens.tolist()
    by_tokens = {
        tuple(batch.tokens[first:end].tolist()): row
        for row, (first, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
    }
    assert len(by_tokens) == len(PROMPTS)
    for outcome in outcomes:
        for fields in outcome[name][3]:
            got = PackedBatch(**fields)
            rows = [by_tokens[tuple(row.tolist())] for row in got.tokens.split(got.lengths.tolist())]
            expected = batch.select(rows)
            for field in dataclasses.fields(PackedBatch):
                assert torch.equal(getattr(got, field.name), getattr(expected, field.name)), field.name


def test_no_field_of_a_batch_is_left_behind() -> None:
    assert {field.name for field in dataclasses.fields(PackedBatch)} == {*BATCH, "cu_seqlens"}


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transfer_mode='3D' is not one of 3D_PROTO, DP_ONLY"):
        register(transfer_mode="3D")
