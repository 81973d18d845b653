"""KL, losses, weights and objectives: values worked by hand, gradients, and the same sum for every split."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algo.kl import compute_kl, next_kl_coef, subtract_kl
from megarl.algo.losses import ppo_policy_loss, value_loss
from megarl.algo.objective import policy_objective, value_objective
from megarl.algo.reduce import compute_token_weights

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
HORIZON = 4
CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}


def _cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _bool(*flags: int) -> Tensor:
    return torch.tensor(flags, dtype=torch.bool)


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


# KL


def test_k3_values_at_small_log_ratios():
    """Case D11."""
    kl = compute_kl(torch.zeros(3), torch.tensor([0.0, 1.0, -1.0]), "k3")
    torch.testing.assert_close(kl, torch.tensor([0.0, 0.718282, 0.367879]), atol=1e-6, rtol=0)


def test_k3_is_held_at_ten():
    assert compute_kl(torch.zeros(2), torch.tensor([100.0, 1e4]), "k3").tolist() == [10.0, 10.0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("log_ratio", [100.0, 1e4, -100.0, -1e4])
def test_kl_and_its_gradient_stay_finite(kind, log_ratio):
    """Case D11."""
    logprobs = torch.zeros(1, requires_grad=True)
    kl = compute_kl(logprobs, torch.tensor([log_ratio]), kind)
    kl.sum().backward()
    assert kl.isfinite() and _grad(logprobs).isfinite()


def test_k1_and_k2_values():
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert compute_kl(logprobs, ref, "k1").tolist() == [0.5, -1.0]
    assert compute_kl(logprobs, ref, "k2").tolist() == [0.125, 0.5]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradient_is_the_derivative_of_its_value(kind):
    logprobs = torch.tensor([-0.3, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.9, -1.0, -4.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: compute_kl(x, ref, kind), (logprobs,))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_average_to_the_kl_of_the_distributions(kind):
    scores = 0.5 * torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    policy, ref = scores.log_softmax(-1)
    assert (ref - policy).max() < 2.6, "beyond it k3 is clamped and no longer unbiased"
    truth = (policy.exp() * (policy - ref)).sum()
    torch.testing.assert_close((policy.exp() * compute_kl(policy, ref, kind)).sum(), truth, atol=1e-9, rtol=0)


def test_an_unknown_estimator_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"k4.*k1, k2 or k3"):
        compute_kl(torch.zeros(1), torch.zeros(1), "k4")  # pyright: ignore[reportArgumentType]


def test_kl_penalty_skips_masked_tokens():
    rewards = subtract_kl(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.5, 0.5, math.nan]), _bool(1, 1, 0), 0.1)
    torch.testing.assert_close(rewards, torch.tensor([-0.05, 0.95, 0.0]))


@pytest.mark.parametrize(
    ("kl", "num_steps", "factor"),
    [(0.1, 1000, 1.0), (1.0, 1000, 1.02), (0.0, 1000, 0.98), (0.11, 1000, 1.01), (0.0, 10**6, 0.8)],
)
def test_the_adaptive_coefficient_follows_the_clipped_error(kl, num_steps, factor):
    assert next_kl_coef(0.2, kl, target=0.1, horizon=10_000, num_steps=num_steps) == pytest.approx(0.2 * factor)


def test_a_non_finite_kl_cannot_enter_the_coefficient():
    with pytest.raises(AssertionError, match="nan"):
        next_kl_coef(0.2, math.nan, 0.1, 100, 1)


# weights


@pytest.mark.parametrize(("mode", "expected"), list(zip(MODES, [1.25, 1.5, 2.5, 0.625], strict=True)))
@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]], [[1], [0], []]])
def test_the_loss_is_the_same_for_every_split(mode, expected, split):
    """Case D12: one token with loss 2, three with loss 1; each list of sequences is a micro-batch on some rank."""
    weights = compute_token_weights(torch.ones(4, dtype=torch.bool), _cu([1, 3]), mode, HORIZON)
    parts = [(w, x) for w, x in zip(weights.split([1, 3]), torch.tensor([2.0, 1, 1, 1]).split([1, 3]), strict=True)]
    total = sum(float((parts[b][0] * parts[b][1]).sum()) for batch in split for b in batch)
    assert total == pytest.approx(expected)


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=6), st.sampled_from(MODES))
def test_weights_equal_the_definition(masks, mode):
    policy = [sum(mask) for mask in masks]
    num_sequences = sum(n > 0 for n in policy)
    expected = []
    for mask, n in zip(masks, policy, strict=True):
        for is_policy in mask:
            share = {
                "token-mean": lambda: 1 / sum(policy),
                "seq-mean-token-mean": lambda n=n: 1 / (n * num_sequences),
                "seq-mean-token-sum": lambda: 1 / num_sequences,
                "seq-mean-token-sum-norm": lambda: 1 / (num_sequences * HORIZON),
            }[mode]
            expected.append(share() if is_policy else 0.0)
    flat = torch.tensor([x for mask in masks for x in mask], dtype=torch.bool)
    weights = compute_token_weights(flat, _cu([len(mask) for mask in masks]), mode, HORIZON)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))


def test_an_unknown_mode_is_refused_with_the_choices():
    with pytest.raises(
        ValueError, match=r"mean.*token-mean, seq-mean-token-mean, seq-mean-token-sum or seq-mean-token-sum-norm"
    ):
        compute_token_weights(_bool(1), _cu([1]), "mean")  # pyright: ignore[reportArgumentType]


# per-token losses


def test_policy_loss_in_each_region_of_the_ratio():
    """Ratios inside, above and below the clip, with either sign, and beyond the dual clip."""
    ratio = torch.tensor([1.1, 2.0, 0.5, 2.0, 0.5, 5.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    loss, clipped, dual = ppo_policy_loss(ratio.log(), torch.zeros(6), advantages, 0.2, 0.3, 3.0)
    torch.testing.assert_close(loss, torch.tensor([-1.1, -1.3, -0.5, 2.0, 0.8, 3.0]))
    assert clipped.tolist() == [False, True, False, False, True, False]
    assert dual.tolist() == [False] * 5 + [True]


def test_dual_clip_zero_is_off():
    loss, _, dual = ppo_policy_loss(torch.tensor([5.0]).log(), torch.zeros(1), torch.tensor([-1.0]), 0.2, 0.2, 0.0)
    torch.testing.assert_close(loss, torch.tensor([5.0]))
    assert not dual.any()


def test_policy_gradient_at_the_old_policy_is_minus_the_advantage():
    """Case C5: no step yet, ratio 1, nothing clipped."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.7, -1.3])
    loss, clipped, dual = ppo_policy_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.2, 3.0)
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert not clipped.any() and not dual.any()


@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_policy_loss_of_a_huge_log_ratio_is_finite(gap, advantage):
    logprobs = torch.tensor([gap], requires_grad=True)
    loss, _, _ = ppo_policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2, 0.0)
    loss.sum().backward()
    assert loss.isfinite() and _grad(logprobs).isfinite()


@pytest.mark.parametrize("clip_c", [0.0, 3.0])
def test_policy_loss_gradient_is_the_derivative_of_its_value(clip_c):
    logprobs = torch.tensor([0.05, 0.9, -0.9, 0.9, -0.9, 2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.zeros(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ppo_policy_loss(x, old, advantages, 0.2, 0.3, clip_c)[0], (logprobs,))


def test_a_dual_clip_below_one_is_a_broken_promise():
    with pytest.raises(AssertionError, match=r"clip_c=0.5"):
        ppo_policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), 0.2, 0.2, 0.5)


def test_value_loss_takes_the_larger_error():
    """Old value 0, clip 0.5: inside; past the clip towards the target (held); past it away from the target (not)."""
    loss, clipped = value_loss(torch.tensor([0.3, 2.0, -2.0]), torch.zeros(3), torch.full((3,), 2.0), 0.5)
    torch.testing.assert_close(loss, 0.5 * torch.tensor([1.7**2, 1.5**2, 4.0**2]))
    assert clipped.tolist() == [False, True, False]


def test_value_loss_gradient_is_the_derivative_of_its_value():
    values = torch.tensor([0.3, 2.0, -2.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(3, dtype=torch.float64), torch.full((3,), 2.5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, 0.5)[0], (values,))


# objectives


def _random_batch(lengths: list[int], seed: int = 0) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    names = ["logprobs", "entropy", "old_logprobs", "advantages", "ref_logprobs"]
    batch = {name: torch.randn(sum(lengths), generator=rng) for name in names}
    batch["mask"] = torch.rand(sum(lengths), generator=rng) < 0.6
    return batch


def _policy(batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_objective(**batch, **CLIPS, entropy_coeff=0.01, kl_loss_coef=0.1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", [[3, 4, 5], [7, 5], [1, 11]])
def test_policy_objective_and_stats_add_up_over_any_split(mode, split):
    lengths = [3, 4, 5]
    batch = _random_batch(lengths)
    batch["weights"] = compute_token_weights(batch["mask"], _cu(lengths), mode, HORIZON)
    whole, whole_stats = _policy(batch)
    total, totals = torch.zeros(()), dict.fromkeys(whole_stats, torch.zeros(()))
    for part in zip(*(x.split(split) for x in batch.values()), strict=True):
        loss, stats = _policy(dict(zip(batch, part, strict=True)))
        total, totals = total + loss, {name: totals[name] + stats[name] for name in stats}
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(totals, whole_stats)


def test_policy_objective_equals_its_parts():
    batch = _random_batch([6]) | {"mask": torch.ones(6, dtype=torch.bool), "weights": torch.full((6,), 1 / 6)}
    loss, stats = _policy(batch)
    token_loss, clipped, dual = ppo_policy_loss(batch["logprobs"], batch["old_logprobs"], batch["advantages"], **CLIPS)
    kl = compute_kl(batch["logprobs"], batch["ref_logprobs"], "k3").mean()
    expected = {
        "actor/pg_loss": token_loss.mean(),
        "actor/entropy": batch["entropy"].mean(),
        "actor/kl_loss": kl,
        "actor/ppo_kl": (batch["old_logprobs"] - batch["logprobs"]).mean(),
        "actor/pg_clipfrac": clipped.float().mean(),
        "actor/pg_clipfrac_lower": dual.float().mean(),
    }
    torch.testing.assert_close(stats, expected)
    torch.testing.assert_close(loss, token_loss.mean() - 0.01 * batch["entropy"].mean() + 0.1 * kl)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 10.0])
@pytest.mark.parametrize("mode", MODES)
def test_masked_entries_change_neither_policy_loss_nor_gradient(mode, poison):
    """Case D10: masked advantages, and everything else that is masked."""
    lengths = [4, 4]
    batch = _random_batch(lengths, seed=1)
    mask = batch.pop("mask")
    fixed = {"mask": mask, "weights": compute_token_weights(mask, _cu(lengths), mode, HORIZON)}
    results = []
    for masked_value in (0.0, poison):
        leaves = {name: torch.where(mask, x, masked_value) for name, x in batch.items()}
        for name in ("logprobs", "entropy"):
            leaves[name].requires_grad_()
        loss, stats = _policy(leaves | fixed)
        loss.backward()
        results.append([loss.detach(), leaves["logprobs"].grad, leaves["entropy"].grad, *stats.values()])
    assert results[0][1].abs().sum() > 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_policy_tokens_alone_give_the_same_as_the_packed_whole():
    batch = _random_batch([5, 5])
    batch["weights"] = compute_token_weights(batch["mask"], _cu([5, 5]), "token-mean")
    torch.testing.assert_close(_policy({name: x[batch["mask"]] for name, x in batch.items()}), _policy(batch))


def test_nothing_masked_in_gives_zero_loss_and_zero_gradient():
    """Case D8: the loss still hangs on the graph, so backward runs everywhere."""
    batch = _random_batch([4]) | {"mask": torch.zeros(4, dtype=torch.bool), "weights": torch.zeros(4)}
    batch["logprobs"] = torch.full((4,), math.nan, requires_grad=True)
    loss, _ = _policy(batch)
    loss.backward()
    assert loss == 0 and torch.equal(_grad(batch["logprobs"]), torch.zeros(4))


def test_metric_weights_keep_fractions_within_one():
    mask, zeros = torch.ones(4, dtype=torch.bool), torch.zeros(4)
    weights = compute_token_weights(mask, _cu([2, 2]), "seq-mean-token-sum")
    shares = compute_token_weights(mask, _cu([2, 2]), "token-mean")
    _, stats = policy_objective(
        torch.full((4,), 1.0), None, zeros, torch.ones(4), weights, mask, **CLIPS, metric_weights=shares
    )
    assert stats["actor/pg_clipfrac"] == 1 and stats["actor/ppo_kl"] == -1
    assert stats["actor/pg_loss"] == pytest.approx(-1.3 * 2)


def test_stats_carry_no_gradient():
    batch = _random_batch([4]) | {"weights": torch.full((4,), 0.25)}
    batch["logprobs"].requires_grad_()
    assert not any(value.requires_grad for value in _policy(batch)[1].values())


@pytest.mark.parametrize("missing", [{"entropy_coeff": 0.1}, {"kl_loss_coef": 0.1}])
def test_a_coefficient_without_its_input_is_a_broken_promise(missing: dict[str, Any]):
    x = torch.zeros(1)
    with pytest.raises(AssertionError, match=next(iter(missing))):
        policy_objective(x, None, x, x, x, _bool(1), **CLIPS, **missing)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_value_objective_and_gradient_ignore_masked_entries(poison):
    mask = _bool(1, 0, 1, 0)
    weights = compute_token_weights(mask, _cu([4]), "token-mean")
    values = torch.tensor([0.3, poison, 2.0, poison], requires_grad=True)
    old, returns = torch.tensor([0.0, poison, 0.0, poison]), torch.tensor([2.0, poison, 2.0, poison])
    loss, stats = value_objective(values, old, returns, weights, mask, 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.25 * (1.7**2 + 1.5**2))
    assert stats["critic/vf_clipfrac"] == 0.5
    assert stats["critic/vpred_mean"].item() == pytest.approx(1.15)
    torch.testing.assert_close(values.grad, torch.tensor([-0.85, 0.0, 0.0, 0.0]))
