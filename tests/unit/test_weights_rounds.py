"""Rounds of a weight transfer: every element once, no slot overfull, nothing handed on before it has arrived."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.layout import ModelSpec
from megarl.models.registry import FAMILIES
from megarl.parallel.topology import Topology
from megarl.weights.blocks import list_engine_shards, list_engines, list_trainer_shards
from megarl.weights.plan import Copy, ReshardPlan, plan_reshard
from megarl.weights.rounds import HANDED_ON_AFTER, Rounds, plan_rounds

SPEC = ModelSpec(
    family="qwen2", num_layers=4, hidden_size=12, num_heads=8, num_kv_heads=4, head_dim=2, ffn_size=24,
    vocab_size=150, norm_eps=1e-5, max_positions=64, is_tied=False, has_qkv_bias=True,
)  # fmt: skip


def make_plan(tp: int, pp: int, dp: int, engine_tp: int, per_node: int = 2) -> ReshardPlan:
    topology = Topology(tuple(range(tp * pp * dp)), tp_size=tp, pp_size=pp, dp_size=dp)
    family = FAMILIES[SPEC.family]
    engines = list_engines(topology.ranks, engine_tp)
    return plan_reshard(
        list_trainer_shards(family, SPEC, topology), list_engine_shards(family, SPEC, engines), per_node
    )


def written(copy: Copy) -> set[tuple[int, str, int]]:
    """Every element of a live parameter that a copy writes."""
    return {
        (copy.target, copy.target_parameter, copy.target_offset + row * copy.target_stride + column)
        for row in range(copy.num_rows)
        for column in range(copy.num_columns)
    }


def read(copy: Copy) -> set[tuple[int, str, int]]:
    return {
        (copy.source, copy.source_parameter, copy.source_offset + row * copy.source_stride + column)
        for row in range(copy.num_rows)
        for column in range(copy.num_columns)
    }


def check(plan: ReshardPlan, rounds: Rounds) -> None:
    arrived: dict[tuple[int, str, int], int] = {}
    for number, messages in enumerate(rounds.remote):
        sent: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        for (source, target), copies in messages.items():
            assert copies
            for copy in copies:
                assert (copy.source, copy.target) == (source, target)
                sent[source] += copy.numel
                received[target] += copy.numel
                if copy.hop == 1:
                    assert all(arrived[element] + HANDED_ON_AFTER <= number for element in read(copy))
                for element in written(copy):
                    assert element not in arrived
                    arrived[element] = number
        assert max([*sent.values(), *received.values()], default=0) <= rounds.slot_elements
    expected = {element for copy in plan.copies if copy.source != copy.target for element in written(copy)}
    assert set(arrived) == expected
    assert all(copy.source == copy.target for copy in rounds.local)
    assert len(rounds.local) == sum(copy.source == copy.target for copy in plan.copies)


@settings(max_examples=40, deadline=None)
@given(
    grid=st.sampled_from([(1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 3, 2), (4, 2, 1), (2, 2, 2)]),
    engine_tp=st.sampled_from([1, 2, 4]),
    per_node=st.sampled_from([1, 2, 4]),
    slot=st.sampled_from([1, 5, 12, 100, 1000, 1 << 20]),
)
def test_any_slot_gives_sound_rounds(grid: tuple[int, int, int], engine_tp: int, per_node: int, slot: int) -> None:
    if grid[0] * grid[1] * grid[2] % engine_tp:
        engine_tp = 1
    plan = make_plan(*grid, engine_tp, per_node)
    rounds = plan_rounds(plan, slot)
    check(plan, rounds)
    assert rounds == plan_rounds(plan, slot)


def test_a_row_larger_than_a_slot_is_cut_by_columns() -> None:
    plan = ReshardPlan((Copy(0, 1, 0, "w", 0, 2, 0, 10, "w", 0, 10, "v", 5, 20),), {}, {}, {}, 1)
    rounds = plan_rounds(plan, 4)
    check(plan, rounds)
    assert [[(c.num_rows, c.num_columns) for c in r[0, 1]] for r in rounds.remote] == [
        [(1, 4)], [(1, 4)], [(1, 2), (1, 2)], [(1, 4)], [(1, 4)]
    ]  # fmt: skip


@pytest.mark.parametrize("slot", [500, 2000])
def test_messages_grow_with_the_bytes_not_with_the_tensors(slot: int) -> None:
    """300 small tensors and one larger than the slot: a pair's messages are few and full."""
    small = [Copy(0, 1, 0, f"w{i}", 0, 1, 0, 10, f"w{i}", 0, 10, f"w{i}", 0, 10) for i in range(300)]
    large = Copy(0, 1, 0, "large", 0, 100, 0, 30, "large", 0, 30, "large", 0, 30)
    plan = ReshardPlan((*small[:150], large, *small[150:]), {}, {}, {}, 1)
    rounds = plan_rounds(plan, slot)
    check(plan, rounds)
    total = 300 * 10 + 3000
    assert len(rounds.remote) <= -(-total // slot) + 2


def test_the_busiest_rank_sets_the_number_of_rounds() -> None:
    """A slot a tenth of what the busiest rank receives: little more than ten rounds."""
    plan = make_plan(2, 2, 1, 1, per_node=4)
    received: dict[int, int] = defaultdict(int)
    sent: dict[int, int] = defaultdict(int)
    for copy in plan.copies:
        if copy.source != copy.target:
            received[copy.target] += copy.numel
            sent[copy.source] += copy.numel
    slot = max(*received.values(), *sent.values()) // 10
    assert len(plan_rounds(plan, slot).remote) <= 14
