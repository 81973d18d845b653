"""The policy losses beside PPO's, against loops over answers and tokens, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algo.losses import LossInputs, cispo_loss, clip_loss, gmpo_loss, gspo_loss, pg_loss
from megarl.algo.objective import policy_objective
from megarl.algo.reduce import compute_token_weights

LOW, HIGH = 0.2, 0.3
LENGTHS = [4, 1, 6, 3]
SEQUENCE = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
CU = torch.tensor([0, *LENGTHS]).cumsum(0)


def random_inputs(seed: int, same_advantage: bool = False, mask_share: float = 0.0) -> LossInputs:
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(len(SEQUENCE), generator=rng, dtype=torch.float64)
    logprobs = old + 0.4 * torch.randn(len(SEQUENCE), generator=rng, dtype=torch.float64)
    advantages = torch.randn(len(SEQUENCE), generator=rng, dtype=torch.float64)
    if same_advantage:
        advantages = torch.randn(len(LENGTHS), generator=rng, dtype=torch.float64)[SEQUENCE]
    mask = torch.rand(len(SEQUENCE), generator=rng) >= mask_share
    clean = [torch.where(mask, x, 0.0) for x in (logprobs, old, advantages)]
    return LossInputs(clean[0].requires_grad_(), clean[1], clean[2], mask, LOW, HIGH, 3.0, SEQUENCE, len(LENGTHS))


def gradient_of(x: LossInputs, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x.logprobs)[0]


def clip(ratio: float, low: float = 1 - LOW, high: float = 1 + HIGH) -> float:
    return min(max(ratio, low), high)


@pytest.mark.parametrize("seed", range(3))
def test_pg_is_minus_advantage_times_logprob(seed):
    x = random_inputs(seed)
    expected = [-a * p for a, p in zip(x.advantages.tolist(), x.logprobs.tolist(), strict=True)]
    torch.testing.assert_close(pg_loss(x).loss, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(gradient_of(x, pg_loss(x).loss.sum()), -x.advantages)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_weighs_each_token_with_its_clipped_ratio_and_keeps_every_gradient(seed):
    x = random_inputs(seed)
    ratios = [math.exp(p - o) for p, o in zip(x.logprobs.tolist(), x.old_logprobs.tolist(), strict=True)]
    weights = torch.tensor([clip(r) for r in ratios], dtype=torch.float64)
    found = cispo_loss(x)
    torch.testing.assert_close(found.loss, -weights * x.advantages * x.logprobs)
    torch.testing.assert_close(gradient_of(x, found.loss.sum()), -weights * x.advantages)
    assert found.clipped.tolist() == [not 1 - LOW <= r <= 1 + HIGH for r in ratios]


def mean_log_ratios(x: LossInputs) -> list[Tensor]:
    """The mean log-ratio of each answer over its policy tokens, with gradient."""
    log_ratio = x.logprobs - x.old_logprobs
    return [log_ratio[(x.sequence == b) & x.mask].mean() for b in range(len(LENGTHS))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mask_share", [0.0, 0.3])
def test_gspo_equals_the_loss_of_whole_answers(seed, mask_share):
    """With seq-mean-token-mean: the mean over answers of max(-A s, -A clip(s)), s the ratio of the whole answer."""
    x = random_inputs(seed, same_advantage=True, mask_share=mask_share)
    weights = compute_token_weights(x.mask, CU, "seq-mean-token-mean").double()
    answers = [b for b in range(len(LENGTHS)) if bool(x.mask[x.sequence == b].any())]
    means, losses = mean_log_ratios(x), []
    for b in answers:
        advantage, ratio = x.advantages[(x.sequence == b) & x.mask][0], means[b].exp()
        losses.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH)))
    expected = torch.stack(losses).mean()
    found = (weights * gspo_loss(x).loss).sum()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient_of(x, found), gradient_of(x, expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mask_share", [0.0, 0.3])
def test_gmpo_equals_the_geometric_mean_of_clipped_ratios(seed, mask_share):
    x = random_inputs(seed, same_advantage=True, mask_share=mask_share)
    weights = compute_token_weights(x.mask, CU, "seq-mean-token-mean").double()
    losses = []
    for b in range(len(LENGTHS)):
        logs = []
        chosen = ((x.sequence == b) & x.mask).nonzero().flatten().tolist()
        for t in chosen:
            log_ratio = x.logprobs[t] - x.old_logprobs[t]
            sign = 1.0 if x.advantages[t] >= 0 else -1.0
            logs.append(sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-LOW, HIGH)))
        if chosen:
            losses.append(-x.advantages[chosen[0]] * torch.stack(logs).mean().exp())
    expected = torch.stack(losses).mean()
    found = (weights * gmpo_loss(x).loss).sum()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient_of(x, found), gradient_of(x, expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", [clip_loss, pg_loss, cispo_loss, gspo_loss, gmpo_loss])
def test_before_the_first_step_every_loss_has_the_policy_gradient(loss):
    """Case C5: ratio 1, nothing clipped, the gradient is minus the advantage over the tokens of the answer."""
    x = random_inputs(0, same_advantage=True)
    x = LossInputs(
        x.old_logprobs.clone().requires_grad_(), x.old_logprobs, x.advantages, x.mask, LOW, HIGH, 3.0, SEQUENCE, 4
    )  # fmt: skip
    weights = compute_token_weights(x.mask, CU, "seq-mean-token-mean").double()
    found = loss(x)
    torch.testing.assert_close(gradient_of(x, (weights * found.loss).sum()), -weights * x.advantages)
    assert not found.clipped.any() and not found.dual_clipped.any()


@pytest.mark.parametrize("loss", [clip_loss, pg_loss, cispo_loss, gspo_loss, gmpo_loss])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_a_huge_log_ratio_gives_finite_loss_and_gradient(loss, gap):
    logprobs = torch.full((2,), gap, requires_grad=True)
    ones = torch.ones(2)
    x = LossInputs(logprobs, torch.zeros(2), ones, ones.bool(), LOW, HIGH, 3.0, torch.zeros(2, dtype=torch.int64), 1)
    found = loss(x).loss.sum()
    assert found.isfinite() and gradient_of(x, found).isfinite().all()


@pytest.mark.parametrize("loss", [gspo_loss, gmpo_loss])
@pytest.mark.parametrize("poison", [math.nan, 10.0])
def test_masked_tokens_of_an_answer_do_not_reach_its_ratio(loss, poison):
    """Case D10 for the losses that look at whole answers."""
    mask = torch.tensor([True, False, True, True])
    results = []
    for value in (0.0, poison):
        logprobs = torch.tensor([-0.1, value, -0.7, -0.3], requires_grad=True)
        total, _ = policy_objective(
            logprobs, None, torch.tensor([-0.2, value, -0.5, -0.3]), torch.tensor([1.0, value, 1.0, -1.0]),
            torch.where(mask, 0.25, value), mask, clip_low=LOW, clip_high=HIGH, clip_c=3.0, policy_loss=loss,
            sequence=torch.tensor([0, 0, 0, 1]), num_sequences=2,
        )  # fmt: skip
        results.append((total.detach(), torch.autograd.grad(total, logprobs)[0]))
    assert results[0][1].abs().sum() > 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_importance_scales_the_policy_loss_and_nothing_else():
    mask, quarter = torch.ones(4, dtype=torch.bool), torch.full((4,), 0.25)
    logprobs, old, advantages = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    importance = torch.tensor([2.0, 0.0, 1.0, 0.5])
    fixed: dict[str, Any] = {"clip_low": LOW, "clip_high": HIGH, "clip_c": 3.0, "entropy_coeff": 0.1}
    loss, stats = policy_objective(
        logprobs, -logprobs, old, advantages, quarter, mask, **fixed, importance=importance
    )  # fmt: skip
    plain = clip_loss(LossInputs(logprobs, old, advantages, mask, LOW, HIGH, 3.0)).loss
    torch.testing.assert_close(stats["actor/pg_loss"], (quarter * importance * plain).sum())
    torch.testing.assert_close(loss, stats["actor/pg_loss"] - 0.1 * stats["actor/entropy"])
    torch.testing.assert_close(stats["actor/entropy"], -logprobs.mean())


def test_a_loss_of_whole_answers_needs_to_know_them():
    zeros = torch.zeros(2)
    x = LossInputs(zeros, zeros, zeros, torch.ones(2, dtype=torch.bool), LOW, HIGH, 3.0)
    with pytest.raises(AssertionError, match="which answer"):
        gspo_loss(x)
