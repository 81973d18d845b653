"""The gap between sampler and trainer, the price of length, the multiplier of the costs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algo.lagrange import combine_advantages, next_multiplier
from megarl.algo.mismatch import Bound, Level, compute_importance, describe_mismatch
from megarl.algo.shaping import overlong_penalty, place_step_rewards

LENGTHS = [3, 0, 5, 2]
CU = torch.tensor([0, *LENGTHS]).cumsum(0)


def random_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    old, rollout = -torch.rand(2, sum(LENGTHS), generator=rng, dtype=torch.float64)
    return old, rollout, torch.rand(sum(LENGTHS), generator=rng) < 0.8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bound", ["truncate", "mask"])
def test_importance_equals_the_loop(seed: int, level: Level, bound: Bound) -> None:
    lower, upper = 0.8, 1.2
    old, rollout, mask = random_batch(seed)
    expected: list[float] = []
    for start, end in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True):
        policy = [t for t in range(start, end) if mask[t]]
        logs = {t: float(old[t] - rollout[t]) for t in policy}
        for t in range(start, end):
            if t not in logs:
                expected.append(0.0)
                continue
            log_ratio = {
                "token": logs[t],
                "sequence": sum(logs.values()),
                "geometric": sum(logs.values()) / len(logs),
            }[level]
            ratio = math.exp(log_ratio)
            if bound == "truncate":
                ratio = min(max(ratio, lower), upper)
            expected.append(ratio if lower <= ratio <= upper else 0.0)
    old, rollout = (torch.where(mask, x, math.nan) for x in (old, rollout))
    found = compute_importance(old, rollout, mask, CU, level=level, bound=bound, lower=lower, upper=upper)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_no_gap_gives_ones_and_a_full_sample() -> None:
    old, _, mask = random_batch(0)
    importance = compute_importance(old, old, mask, CU, level="sequence", bound="mask", lower=0.9, upper=1.1)
    assert torch.equal(importance, mask.float())
    metrics = describe_mismatch(old, old, mask, importance)
    assert metrics["rollout/ess"] == pytest.approx(1.0) and metrics["rollout/kl"] == 0
    assert metrics["rollout/importance_masked_share"] == 0


def test_metrics_of_a_gap_by_hand() -> None:
    """Ratios 2 and 1/2: mean 1.25, effective samples 2.5² / (2 · 4.25)."""
    two = math.log(2)
    old, rollout = torch.tensor([-1.0, -1.0, math.nan]), torch.tensor([-1.0 - two, -1.0 + two, 0.0])
    metrics = describe_mismatch(old, rollout, torch.tensor([True, True, False]))
    assert metrics["rollout/ratio_mean"] == pytest.approx(1.25)
    assert metrics["rollout/ratio_max"] == pytest.approx(2.0)
    assert metrics["rollout/ratio_min"] == pytest.approx(0.5)
    assert metrics["rollout/ess"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert metrics["rollout/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["rollout/k3_kl"] == pytest.approx(0.25)
    assert metrics["rollout/logprob_gap"] == pytest.approx(two)


def test_no_policy_token_has_no_gap() -> None:
    assert describe_mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool)) == {}


def test_the_price_of_length_grows_over_the_buffer() -> None:
    """The example at the top of shaping.py."""
    assert overlong_penalty(torch.tensor([0, 6, 8, 10]), 10, 4, 1.0).tolist() == [0.0, 0.0, -0.5, -1.0]
    assert overlong_penalty(torch.tensor([10]), 10, 4, 0.3).tolist() == pytest.approx([-0.3])


def test_rewards_of_steps_lie_on_their_last_policy_token() -> None:
    """Two sequences, 'p a a t a' and 'p p a' (p prompt, t tool, a policy): a step may end on a tool token; a step that
    ends before the first policy token earns nothing."""
    mask = torch.tensor([False, True, True, False, True, False, False, True])
    ends = torch.tensor([2, 3, 4, 6, 7])
    rewards = place_step_rewards(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), ends, mask, torch.tensor([0, 5, 8]))
    assert rewards.tolist() == [0.0, 0.0, 3.0, 0.0, 4.0, 0.0, 0.0, 16.0]


# the multiplier


def test_the_joint_advantage_by_hand() -> None:
    rewards, costs = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    torch.testing.assert_close(combine_advantages(rewards, costs, 3.0), torch.tensor([0.25, -1.5]))
    assert torch.equal(combine_advantages(rewards, costs, 0.0), rewards)


def test_the_multiplier_takes_a_step_in_its_logarithm() -> None:
    assert next_multiplier(2.0, 1.5, 1.0, 0.1, 0.01, 10) == pytest.approx(2.0 * math.exp(0.1 * 2.0 * 0.5))


@settings(deadline=None)
@given(st.floats(0.01, 10), st.floats(-5, 5), st.floats(-1, 1))
def test_the_multiplier_rises_over_the_limit_falls_under_it_and_stays_in_its_bounds(multiplier, cost, limit) -> None:
    after = next_multiplier(multiplier, cost, limit, 0.5, 0.01, 10.0)
    assert 0.01 * (1 - 1e-9) <= after <= 10.0 * (1 + 1e-9)
    slack = 1e-9 * multiplier
    assert after >= multiplier - slack if cost >= limit else after <= multiplier + slack


def test_a_cost_that_is_not_finite_cannot_enter_the_multiplier() -> None:
    with pytest.raises(AssertionError, match="nan"):
        next_multiplier(1.0, math.nan, 0.0, 0.1, 0.01, 10)
