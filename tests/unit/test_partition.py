"""The plans of who computes what: the invariants stated in `partition.py`, on random lengths and on named cases."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.parallel.partition import (
    assign_sequences,
    layer_range,
    plan_dp_micro_batches,
    plan_micro_batches,
    plan_mini_batches,
    sequence_work,
    split_layers,
)

LENGTHS = st.lists(st.integers(1, 100), max_size=40)


def _flat(bins: list[list[int]]) -> list[int]:
    return [row for rows in bins for row in rows]


# layers


@pytest.mark.parametrize(
    ("num_layers", "pp_size", "expected"),
    [(30, 4, [8, 8, 7, 7]), (7, 2, [4, 3]), (10, 3, [4, 3, 3]), (4, 4, [1, 1, 1, 1])],
)
def test_earlier_stages_take_the_rest(num_layers, pp_size, expected):
    """Case A12."""
    assert split_layers(num_layers, pp_size) == expected


@given(st.integers(1, 60), st.data())
def test_every_layer_is_owned_once_in_order(num_layers, data):
    """Case A12."""
    pp_size = data.draw(st.integers(1, num_layers))
    owned = [list(layer_range(num_layers, pp_size, stage)) for stage in range(pp_size)]
    assert _flat(owned) == list(range(num_layers))


@pytest.mark.parametrize("pp_size", [0, 4])
def test_stages_without_layers_are_refused_with_the_choices(pp_size):
    with pytest.raises(ValueError, match=f"pp_size={pp_size} .*num_layers=3.*use 1 to 3"):
        split_layers(3, pp_size)


# sequences to ranks


def _best_possible(work: list[float], num_bins: int) -> float:
    return min(
        max(sum(w for w, at in zip(work, places, strict=True) if at == index) for index in range(num_bins))
        for places in itertools.product(range(num_bins), repeat=len(work))
    )


@given(LENGTHS, st.integers(1, 9), st.sampled_from([(1, 0), (24576, 1), (0, 1), (0, 0)]))
def test_every_sequence_goes_to_one_rank_and_no_rank_starves(lengths, dp_size, costs):
    bins = assign_sequences(lengths, dp_size, *costs)
    assert len(bins) == dp_size
    assert sorted(_flat(bins)) == list(range(len(lengths)))
    assert all(rows == sorted(rows) for rows in bins)
    assert sum(bool(rows) for rows in bins) == min(dp_size, len(lengths))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_the_heaviest_rank_is_near_the_best_possible(lengths, dp_size):
    work = [sequence_work(length, 10, 1) for length in lengths]
    heaviest = max(sum(work[row] for row in rows) for rows in assign_sequences(lengths, dp_size, 10, 1))
    assert heaviest <= _best_possible(work, dp_size) * 4 / 3


def test_balance_of_many_random_sequences_is_within_one_percent():
    lengths = [17 + (row * 7919) % 1500 for row in range(256)]
    loads = [sum(sequence_work(lengths[r]) for r in rows) for rows in assign_sequences(lengths, 8)]
    assert max(loads) <= 1.01 * sum(loads) / 8


def test_balance_is_by_largest_differencing():
    """The example at the top of `partition.py`."""
    assert assign_sequences([8, 7, 6, 5, 4], 2, 1, 0) == [[0, 2], [1, 3, 4]]


def test_small_cases_are_on_average_within_one_percent_of_the_best_possible():
    excess = 0.0
    for case in range(40):
        work = [1.0 + (case * 8 + row) * 7919 % 101 for row in range(8)]
        bins = assign_sequences([int(w) for w in work], 2, 1, 0)
        excess += max(sum(work[row] for row in rows) for rows in bins) / _best_possible(work, 2) - 1
    assert excess / 40 < 0.01


def test_the_quadratic_cost_decides_what_balance_means():
    lengths = [8, 4, 4]
    assert assign_sequences(lengths, 2, 1, 0) == [[0], [1, 2]]
    assert assign_sequences([8, 4, 4, 4, 4], 2, 0, 1) == [[0], [1, 2, 3, 4]]


def test_equal_sequences_are_shared_equally():
    assert sorted(len(rows) for rows in assign_sequences([7] * 12, 4)) == [3, 3, 3, 3]


# micro-batches


@settings(deadline=None)
@given(LENGTHS, st.integers(100, 300), st.one_of(st.none(), st.integers(1, 6)), st.integers(1, 8))
def test_micro_batches_keep_both_limits_and_lose_nothing(lengths, max_tokens, max_sequences, min_batches):
    bins = plan_micro_batches(lengths, max_tokens, max_sequences, min_batches)
    assert sorted(_flat(bins)) == list(range(len(lengths)))
    assert all(rows and rows == sorted(rows) for rows in bins)
    assert all(sum(lengths[row] for row in rows) <= max_tokens for rows in bins)
    assert all(len(rows) <= (max_sequences or len(lengths)) for rows in bins)


@settings(deadline=None)
@given(LENGTHS, st.integers(100, 300), st.one_of(st.none(), st.integers(1, 6)), st.integers(1, 50))
def test_min_batches_is_met_exactly_where_it_asks_for_more(lengths, max_tokens, max_sequences, min_batches):
    least = len(plan_micro_batches(lengths, max_tokens, max_sequences))
    bins = plan_micro_batches(lengths, max_tokens, max_sequences, min_batches)
    assert len(bins) == max(least, min(min_batches, len(lengths)))


@settings(deadline=None)
@given(LENGTHS, st.integers(100, 300))
def test_micro_batches_are_no_more_than_first_fit_decreasing_needs(lengths, max_tokens):
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((i for i, left in enumerate(room) if left >= length), None)
        if at is None:
            room.append(max_tokens - length)
        else:
            room[at] -= length
    assert len(plan_micro_batches(lengths, max_tokens)) <= len(room)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "max_sequences", "loads"),
    [
        ([10, 10, 10, 90], 100, None, [90, 30]),  # first-fit alone fills the first: 100, 20
        ([6, 3, 7, 3, 5, 5, 4], 14, None, [11, 11, 11]),  # longest first into the emptiest: 13, 10, 10
        ([1, 2, 7, 10, 3, 3, 1, 2, 7], 13, 2, [10, 8, 8, 5, 5]),  # with at most two in each
    ],
)
def test_micro_batches_are_balanced_and_the_heaviest_comes_first(lengths, max_tokens, max_sequences, loads):
    bins = plan_micro_batches(lengths, max_tokens, max_sequences, linear_cost=1, quadratic_cost=0)
    assert [sum(lengths[row] for row in rows) for rows in bins] == loads


def test_a_sequence_beyond_the_budget_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"sequence 1 has 90 tokens.*80.*ppo_max_token_len to 95"):
        plan_micro_batches([10, 90, 95], 80)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(100, 300), st.one_of(st.none(), st.integers(1, 6)), st.integers(1, 4))
def test_every_rank_has_the_same_number_of_micro_batches(lengths, dp_size, max_tokens, max_sequences, min_batches):
    """Case E6."""
    ranks = plan_dp_micro_batches(lengths, dp_size, max_tokens, max_sequences, min_batches)
    assert len(ranks) == dp_size and len({len(bins) for bins in ranks}) == 1
    assert sorted(_flat([rows for bins in ranks for rows in bins])) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= max_tokens for bins in ranks for rows in bins)
    assert all(len(rows) <= (max_sequences or len(lengths)) for bins in ranks for rows in bins)
    assert all(bool(a) or not b for bins in ranks for a, b in itertools.pairwise(bins)), "an empty one is not last"


def test_short_and_long_sequences_are_mixed_over_the_ranks():
    """Case E6: 8 short and 8 long sequences, DP 2."""
    lengths = [10] * 8 + [100] * 8
    ranks = plan_dp_micro_batches(lengths, 2, 220)
    assert [len(bins) for bins in ranks] == [2, 2]
    assert [sum(lengths[row] for rows in bins for row in rows) for bins in ranks] == [440, 440]


def test_a_rank_spreads_its_sequences_before_it_runs_empty_batches():
    """By squares one rank gets 80 and 20, which fit one micro-batch, the other five of 36, which need two or more."""
    ranks = plan_dp_micro_batches([80, 20, 36, 36, 36, 36, 36], 2, 100, linear_cost=0, quadratic_cost=1)
    assert sorted(ranks) == [[[0], [1], []], [[2, 3], [4, 5], [6]]]


def test_a_rank_with_fewer_sequences_than_batches_gets_empty_ones():
    ranks = plan_dp_micro_batches([100, 60, 60], 2, 100, linear_cost=1, quadratic_cost=0)
    assert sorted(ranks) == [[[0], []], [[1], [2]]]
    assert plan_dp_micro_batches([5], 2, 100) == [[[0]], [[]]]
    assert plan_dp_micro_batches([], 2, 100) == [[[]], [[]]]


def test_a_thousand_sequences_are_planned_in_under_two_seconds():
    lengths = [17 + (row * 7919) % 1500 for row in range(1024)]
    start = time.perf_counter()
    plan_dp_micro_batches(lengths, 4, 4096)
    assert time.perf_counter() - start < 2


# mini-batches


@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 9), st.booleans())
def test_each_epoch_holds_every_sequence_once_in_batches_of_near_equal_size(n, per_prompt, prompts, epochs, seed, mix):
    size = per_prompt * prompts
    batches = plan_mini_batches(n, per_prompt, prompts, epochs, seed, mix)
    num_batches = -(-n // size)
    assert len(batches) == epochs * num_batches
    for epoch in range(epochs):
        own = batches[epoch * num_batches : (epoch + 1) * num_batches]
        assert sorted(_flat(own)) == list(range(n))
        assert all(len(rows) <= size for rows in own)
        assert n == 0 or max(map(len, own)) - min(map(len, own)) <= (n % size > 0)


def test_without_shuffling_mini_batches_follow_the_rows():
    assert plan_mini_batches(8, 2, 2, 2, seed=0, shuffle=False) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_the_order_depends_on_seed_epoch_and_step_and_repeats():
    one = plan_mini_batches(32, 1, 8, 2, seed=1, shuffle=True)
    assert one == plan_mini_batches(32, 1, 8, 2, seed=1, shuffle=True)
    assert one[:4] != one[4:]
    assert one != plan_mini_batches(32, 1, 8, 2, seed=2, shuffle=True)
    assert one != plan_mini_batches(32, 1, 8, 2, seed=1, shuffle=True, step=1)
