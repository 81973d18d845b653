"""Advantages without a critic against loops over answers and tokens, written from the papers' definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algo.advantages import compute_gae
from megarl.algo.baselines import (
    adaptive_lam,
    leave_one_out,
    spread,
    subtract_greedy,
    subtract_group_mean,
    subtract_optimal_baseline,
    sum_to_go,
)
from megarl.algo.groups import find_telling_groups, summarise_groups
from megarl.ops.gae import gae


def _cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@st.composite
def judged(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, lengths, groups and failures of some answers; a failed answer's score is NaN."""
    count = draw(st.integers(1, 12))
    scores = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, -2.0]), min_size=count, max_size=count))
    lengths = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    group = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    failed = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    return torch.tensor(scores).masked_fill(failed, math.nan), torch.tensor(lengths), torch.tensor(group), failed


def siblings(b: int, group: Tensor, failed: Tensor) -> list[int]:
    """All answers with a score in the group of answer b, itself included."""
    return [i for i in range(len(group)) if group[i] == group[b] and not failed[i]]


@settings(deadline=None)
@given(judged())
def test_leave_one_out_equals_the_loop(answers):
    scores, _, group, failed = answers
    expected = []
    for b in range(len(scores)):
        others = [float(scores[i]) for i in siblings(b, group, failed) if i != b]
        expected.append(0.0 if failed[b] or not others else float(scores[b]) - sum(others) / len(others))
    torch.testing.assert_close(leave_one_out(scores, group, failed), torch.tensor(expected, dtype=torch.float64))


@settings(deadline=None)
@given(judged())
def test_group_mean_equals_the_loop(answers):
    scores, _, group, failed = answers
    expected = []
    for b in range(len(scores)):
        own = [float(scores[i]) for i in siblings(b, group, failed)]
        expected.append(0.0 if failed[b] else float(scores[b]) - sum(own) / len(own))
    torch.testing.assert_close(subtract_group_mean(scores, group, failed), torch.tensor(expected, dtype=torch.float64))


@settings(deadline=None)
@given(judged())
def test_optimal_baseline_equals_the_loop(answers):
    scores, lengths, group, failed = answers
    expected = []
    for b in range(len(scores)):
        own = siblings(b, group, failed)
        flat = len({float(scores[i]) for i in own}) < 2
        total = sum(int(lengths[i]) for i in own)
        baseline = sum(int(lengths[i]) * float(scores[i]) for i in own) / max(total, 1)
        expected.append(0.0 if failed[b] or flat else float(scores[b]) - baseline)
    found = subtract_optimal_baseline(scores, lengths, group, failed)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_three_answers_by_hand():
    """The example at the top of baselines.py."""
    scores, group, failed = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3), torch.zeros(3, dtype=torch.bool)
    assert leave_one_out(scores, group, failed).tolist() == [1.0, -0.5, -0.5]
    assert subtract_optimal_baseline(scores, torch.tensor([1, 1, 2]), group, failed).tolist() == [0.75, -0.25, -0.25]


@pytest.mark.parametrize("estimate", [leave_one_out, subtract_group_mean])
def test_a_flat_group_and_a_group_of_one_give_exactly_zero(estimate):
    """Case D1."""
    scores = torch.tensor([0.1, 0.1, 0.1, 3.0])
    assert estimate(scores, torch.tensor([0, 0, 0, 1]), torch.zeros(4, dtype=torch.bool)).tolist() == [0.0] * 4


def test_a_failed_answer_is_nobodys_sibling():
    """Case D2 in the leave-one-out form: 1 against 0, 0 against 1 and 0 alike."""
    scores = torch.tensor([1.0, math.nan, 0.0, 0.0])
    failed = torch.tensor([False, True, False, False])
    assert leave_one_out(scores, torch.zeros(4), failed).tolist() == [1.0, 0.0, -0.5, -0.5]


@settings(deadline=None)
@given(judged(), st.sampled_from([1.0, 0.9]), st.integers(0, 10**6))
def test_rewards_to_go_and_remax_equal_the_loop(answers, gamma, seed):
    _, lengths, _, _ = answers
    lengths = lengths.tolist()
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.randn(sum(lengths), generator=rng, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=rng) < 0.7
    rewards = torch.where(mask, rewards, math.nan)  # what is masked is not read
    greedy = torch.randn(len(lengths), generator=rng, dtype=torch.float64)
    to_go, remax = [], []
    for b, (r, m) in enumerate(zip(rewards.split(lengths), mask.split(lengths), strict=True)):
        own = [float(x) for x, keep in zip(r, m, strict=True) if keep]
        sums = [sum(gamma**k * x for k, x in enumerate(own[t:])) for t in range(len(own))]
        plain = [sum(own[t:]) - float(greedy[b]) for t in range(len(own))]
        for keep in m:
            to_go.append(sums.pop(0) if keep else 0.0)
            remax.append(plain.pop(0) if keep else 0.0)
    found = sum_to_go(rewards, mask, _cu(lengths), gamma)
    torch.testing.assert_close(found, torch.tensor(to_go, dtype=torch.float64))
    found = subtract_greedy(rewards, greedy, mask, _cu(lengths))
    torch.testing.assert_close(found, torch.tensor(remax, dtype=torch.float64))


def test_spread_puts_a_number_on_every_policy_token():
    mask = torch.tensor([False, True, True, False, True])
    assert spread(torch.tensor([2.0, -1.0]), mask, _cu([3, 2])).tolist() == [0.0, 2.0, 2.0, 0.0, -1.0]


def test_the_adaptive_decay_reaches_further_in_longer_answers():
    lam = adaptive_lam(torch.tensor([0, 10, 20, 100, 1000]), 0.05)
    torch.testing.assert_close(lam, torch.tensor([0.0, 0.0, 0.0, 0.8, 0.98], dtype=torch.float64))
    # the sum of all decays is alpha * length
    assert 1 / (1 - float(lam[3])) == pytest.approx(0.05 * 100)


def test_a_decay_for_each_sequence_equals_the_sequences_alone():
    lengths, rng = [5, 3, 9], torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 17, generator=rng)
    mask = torch.ones(17, dtype=torch.bool)
    lam = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)
    together, _ = gae(rewards, values, mask, _cu(lengths), 0.99, lam)
    parts = zip(rewards.split(lengths), values.split(lengths), lam.tolist(), strict=True)
    alone = [compute_gae(r, v, torch.ones(len(r), dtype=torch.bool), _cu([len(r)]), 0.99, x)[0] for r, v, x in parts]
    torch.testing.assert_close(together, torch.cat(alone))


@settings(deadline=None)
@given(judged())
def test_group_statistics_equal_the_loop(answers):
    scores, _, group, failed = answers
    groups = summarise_groups(scores, group, failed)
    for b in range(len(scores)):
        own = torch.tensor([float(scores[i]) for i in siblings(b, group, failed)], dtype=torch.float64)
        at = groups.member[b]
        assert groups.count[at] == len(own)
        assert bool(groups.is_flat[at]) == (len(own) > 0 and len(own.unique()) == 1)
        if len(own):
            torch.testing.assert_close(groups.mean[at], own.mean())
        if len(own) > 1:
            torch.testing.assert_close(groups.std[at], own.std())


def test_only_groups_with_different_scores_are_worth_training_on():
    """Flat; different; one scored answer; all failed."""
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 5.0, math.nan, math.nan, math.nan])
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    found = find_telling_groups(scores, group, scores.isnan())
    assert found.tolist() == [False, False, True, True, False, False, False, False]
