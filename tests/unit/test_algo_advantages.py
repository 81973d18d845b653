"""Rewards on tokens, GAE, group advantages and whitening, against padded loops written from the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algo.advantages import compute_gae, compute_group_advantages, place_rewards, whiten
from megarl.algo.segments import last_policy_token, mask_sequences


def _cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _bool(*flags: int) -> Tensor:
    return torch.tensor(flags, dtype=torch.bool)


def gae_by_hand(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float, bootstrap: float
) -> list[float]:
    """One sequence, token by token, from the last to the first."""
    carried, next_value, running = 0.0, bootstrap, 0.0
    advantages = [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if not mask[t]:
            carried += rewards[t]
            continue
        delta = rewards[t] + carried + gamma * next_value - values[t]
        running = delta + gamma * lam * running
        advantages[t] = running
        carried, next_value = 0.0, values[t]
    return advantages


@st.composite
def packed(draw: st.DrawFn, max_length: int = 12) -> tuple[list[int], Tensor, int]:
    lengths = draw(st.lists(st.integers(0, max_length), min_size=1, max_size=5))
    mask = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    return lengths, torch.tensor(mask, dtype=torch.bool), draw(st.integers(0, 10**6))


@settings(deadline=None)
@given(packed(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]), st.booleans())
def test_gae_equals_the_loop_over_tokens(batch, gamma, lam, has_bootstrap):
    lengths, mask, seed = batch
    rng = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, len(mask), generator=rng, dtype=torch.float64)
    bootstrap = torch.randn(len(lengths), generator=rng, dtype=torch.float64)
    expected: list[float] = []
    for b, (r, v, m) in enumerate(zip(rewards.split(lengths), values.split(lengths), mask.split(lengths), strict=True)):
        after = bootstrap[b].item() if has_bootstrap else 0.0
        expected += gae_by_hand(r.tolist(), v.tolist(), m.tolist(), gamma, lam, after)
    advantages, returns = compute_gae(
        rewards, values, mask, _cu(lengths), gamma, lam, bootstrap if has_bootstrap else None
    )
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0))


@pytest.mark.parametrize("length", [63, 64, 65, 128, 500])
def test_gae_is_exact_across_the_blocks_of_the_scan(length):
    rng = torch.Generator().manual_seed(length)
    lengths = [3, length, 70]
    rewards, values = torch.randn(2, sum(lengths), generator=rng, dtype=torch.float64)
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    expected: list[float] = []
    for r, v in zip(rewards.split(lengths), values.split(lengths), strict=True):
        expected += gae_by_hand(r.tolist(), v.tolist(), [True] * len(r), 0.99, 0.97, 0.0)
    advantages, _ = compute_gae(rewards, values, mask, _cu(lengths), 0.99, 0.97)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))


def test_gae_moves_a_reward_on_a_masked_token_and_ignores_the_masked_value():
    """Case D3."""
    advantages, returns = compute_gae(
        torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 100.0]), _bool(1, 1, 0), _cu([3]), 1.0, 0.95
    )
    torch.testing.assert_close(advantages, torch.tensor([0.95, 1.0, 0.0]))
    torch.testing.assert_close(returns, torch.tensor([0.95, 1.0, 0.0]))
    moved, _ = compute_gae(
        torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 100.0]), _bool(1, 1, 0), _cu([3]), 1.0, 0.95
    )
    torch.testing.assert_close(moved, advantages)


def test_gae_keeps_a_reward_before_the_first_policy_token_out_of_the_previous_sequence():
    advantages, _ = compute_gae(
        torch.tensor([0.0, 0.0, 7.0, 0.0]), torch.zeros(4), _bool(1, 1, 0, 1), _cu([2, 2]), 1.0, 1.0
    )
    assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_gae_is_not_changed_by_what_masked_tokens_hold(poison):
    mask, cu = _bool(0, 1, 0, 1, 0, 0, 0), _cu([5, 2])
    rewards, values = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0]), torch.arange(7.0)
    bootstrap = torch.tensor([0.5, poison])
    clean = compute_gae(rewards, torch.where(mask, values, 0.0), mask, cu, 0.9, 0.9, torch.tensor([0.5, 0.0]))
    dirty = compute_gae(
        torch.where(mask, rewards, poison), torch.where(mask, values, poison), mask, cu, 0.9, 0.9, bootstrap
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_gae_does_not_hide_a_nan_reward_on_a_policy_token():
    advantages, _ = compute_gae(torch.tensor([math.nan, 0.0]), torch.zeros(2), _bool(1, 1), _cu([1, 1]), 1.0, 1.0)
    assert advantages[0].isnan() and advantages[1] == 0


def test_gae_pairs_a_value_with_the_state_before_its_token():
    """Case D6: prompt of 4, response of 3, value = position of the state: 3, 4, 5 for the three tokens."""
    values = torch.arange(7.0) - 1
    rewards = torch.tensor([0.0, 0, 0, 0, 0, 0, 1])
    advantages, _ = compute_gae(rewards, values, _bool(0, 0, 0, 0, 1, 1, 1), _cu([7]), 1.0, 0.0)
    assert advantages.tolist() == [0, 0, 0, 0, 1.0, 1.0, 1.0 - 5.0]


def test_gae_of_half_precision_values_is_fp32():
    advantages, returns = compute_gae(
        torch.zeros(2), torch.ones(2, dtype=torch.bfloat16), _bool(1, 1), _cu([2]), 1.0, 1.0
    )
    assert advantages.dtype == returns.dtype == torch.float32


@pytest.mark.parametrize("lengths", [[3], [0, 3], []])
def test_everything_is_zero_and_finite_without_policy_tokens(lengths):
    """Case D8."""
    total, cu = sum(lengths), _cu(lengths)
    mask, poison = torch.zeros(total, dtype=torch.bool), torch.full((total,), math.nan)
    scores = torch.full((len(lengths),), math.nan)
    group = torch.zeros(len(lengths), dtype=torch.int64)
    results = [
        *compute_gae(poison, poison, mask, cu, 1.0, 1.0),
        whiten(poison, mask),
        place_rewards(scores, mask, cu),
        compute_group_advantages(scores, group, torch.zeros(len(lengths), dtype=torch.bool), mask, cu, True)[0],
    ]
    for result in results:
        assert torch.equal(result, torch.zeros(total))


def test_a_score_lands_on_the_last_policy_token():
    """Case D5: finished, followed by padding or tool tokens, cut at the limit, and no answer at all."""
    mask, cu = _bool(0, 1, 1, 0, 1, 0, 0, 1, 0), _cu([3, 3, 2, 1])
    rewards = place_rewards(torch.tensor([1.0, 2.0, 3.0, math.nan]), mask, cu)
    assert rewards.tolist() == [0, 0, 1.0, 0, 2.0, 0, 0, 3.0, 0]


@settings(deadline=None)
@given(packed())
def test_last_policy_token_equals_a_search(batch):
    lengths, mask, _ = batch
    expected, start = [], 0
    for length in lengths:
        inside = [start + t for t in range(length) if mask[start + t]]
        expected.append(inside[-1] if inside else -1)
        start += length
    assert last_policy_token(mask, _cu(lengths)).tolist() == expected


def _group_advantages(
    scores: list[float], group: list[int], failed: list[int], by_std: bool
) -> tuple[list[float], float, int]:
    """One policy token a row."""
    mask = torch.ones(len(scores), dtype=torch.bool)
    advantages, flat_share, skipped = compute_group_advantages(
        torch.tensor(scores), torch.tensor(group), _bool(*failed), mask, _cu([1] * len(scores)), by_std
    )
    return advantages.tolist(), flat_share, skipped


def test_group_advantages_of_flat_mixed_and_single_groups():
    """Case D1, groups interleaved."""
    scores = [1.0, 1.0, 5.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    group = [7, 3, 9, 7, 3, 7, 3, 7, 3]
    advantages, flat_share, skipped = _group_advantages(scores, group, [0] * 9, True)
    assert advantages == pytest.approx([0, 1.5, 0, 0, -0.5, 0, -0.5, 0, -0.5], abs=1e-5)
    assert (flat_share, skipped) == (pytest.approx(2 / 3), 0)


def test_equal_scores_whose_mean_is_rounded_give_exactly_zero():
    """Three times 0.1 in fp64 sums to more than 0.3."""
    scores, mask = torch.full((3,), 0.1, dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    group = torch.zeros(3, dtype=torch.int64)
    advantages, _, _ = compute_group_advantages(scores, group, ~mask, mask, _cu([1] * 3), True)
    assert advantages.tolist() == [0.0] * 3


def test_a_failed_row_is_left_out_of_its_group():
    """Case D2."""
    advantages, _, skipped = _group_advantages([1.0, math.nan, 0.0, 0.0], [0] * 4, [0, 1, 0, 0], False)
    assert advantages == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert skipped == 0


def test_a_group_that_failed_as_a_whole_is_skipped_and_counted():
    """Case D2."""
    advantages, flat_share, skipped = _group_advantages([math.nan] * 2 + [1.0, 0.0], [0, 0, 1, 1], [1, 1, 0, 0], False)
    assert advantages == [0, 0, 0.5, -0.5]
    assert (flat_share, skipped) == (0.0, 1)


def test_a_nan_score_that_is_not_marked_failed_stays_visible():
    advantages, _, _ = _group_advantages([math.nan, 1.0, 1.0, 0.0], [0, 0, 1, 1], [0] * 4, True)
    assert [math.isnan(a) for a in advantages] == [True, True, False, False]


def test_group_advantages_cover_the_policy_tokens_of_a_row_and_an_empty_answer_counts_in_the_mean():
    """Case D8: an empty response in a group."""
    mask, cu = _bool(0, 1, 1, 0), _cu([3, 1])
    advantages, _, _ = compute_group_advantages(
        torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), _bool(0, 0), mask, cu, False
    )
    assert advantages.tolist() == [0, 0.5, 0.5, 0]


def test_failed_rows_leave_the_mask():
    assert mask_sequences(_bool(0, 1, 1, 1), ~_bool(0, 1), _cu([2, 2])).tolist() == [False, True, False, False]


def test_whitening_sees_policy_tokens_only():
    x, mask = torch.tensor([1.0, math.nan, 2.0, 3.0, math.inf]), _bool(1, 0, 1, 1, 0)
    torch.testing.assert_close(whiten(x, mask), torch.tensor([-1.0, 0.0, 0.0, 1.0, 0.0]))


def test_whitening_two_tokens_uses_the_unbiased_variance():
    whitened = whiten(torch.tensor([1.0, 3.0]), _bool(1, 1))
    torch.testing.assert_close(whitened, torch.tensor([-(0.5**0.5), 0.5**0.5]))


@pytest.mark.parametrize("x", [[5.0], [0.1] * 5])
def test_whitening_one_or_equal_tokens_is_zero(x):
    result = whiten(torch.tensor(x), torch.ones(len(x), dtype=torch.bool))
    torch.testing.assert_close(result, torch.zeros(len(x)), atol=1e-6, rtol=0)
