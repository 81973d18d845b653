"""Losses of preference training: the papers' formulas pair by pair, gradients, and another trainer's numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algo.preference import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_baseline,
    kto_loss,
    simpo_loss,
    sum_by_sequence,
)

# Summed log-probs of four pairs, chosen and rejected in turn, and the lengths of the answers.
POLICY = torch.tensor([-12.0, -15.5, -30.25, -28.0, -7.5, -9.0, -41.0, -40.5], dtype=torch.float64)
REFERENCE = torch.tensor([-13.0, -14.0, -30.0, -29.5, -8.25, -8.0, -39.0, -42.0], dtype=torch.float64)
LENGTHS = torch.tensor([6, 7, 11, 12, 3, 4, 20, 18], dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def pairs(x: Tensor) -> list[tuple[float, float]]:
    return list(zip(x[0::2].tolist(), x[1::2].tolist(), strict=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_and_cdpo_equal_the_formula(smoothing):
    expected = []
    for (c, r), (ref_c, ref_r) in zip(pairs(POLICY), pairs(REFERENCE), strict=True):
        margin = 0.3 * ((c - ref_c) - (r - ref_r))
        expected.append(-(1 - smoothing) * math.log(sigmoid(margin)) - smoothing * math.log(sigmoid(-margin)))
    found = dpo_loss(POLICY - REFERENCE, 0.3, smoothing)
    torch.testing.assert_close(found.loss, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(found.chosen, 0.3 * (POLICY - REFERENCE)[0::2])


def test_the_example_at_the_top():
    log_ratios = torch.tensor([-1.0, -2.0]) - torch.tensor([-1.5, -1.5])
    assert float(dpo_loss(log_ratios, 1.0).loss) == pytest.approx(math.log(1 + math.exp(-1)))


def test_ipo_equals_the_formula():
    expected = [((c - r) - 1 / (2 * 0.2)) ** 2 for c, r in pairs((POLICY - REFERENCE) / LENGTHS)]
    found = ipo_loss((POLICY - REFERENCE) / LENGTHS, 0.2).loss
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_simpo_equals_the_formula():
    expected = [-math.log(sigmoid(2.0 * (c - r) - 0.7)) for c, r in pairs(POLICY / LENGTHS)]
    found = simpo_loss(POLICY / LENGTHS, 2.0, 0.7).loss
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_kto_equals_the_formula():
    good = torch.tensor([True, False] * 4)
    expected = []
    for ratio, is_good in zip((POLICY - REFERENCE).tolist(), good.tolist(), strict=True):
        towards = ratio - 0.4 if is_good else 0.4 - ratio
        expected.append((1.5 if is_good else 0.5) * (1 - sigmoid(0.3 * towards)))
    found = kto_loss(POLICY - REFERENCE, good, 0.4, 0.3, 1.5, 0.5)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_ktos_baseline_is_a_mean_that_is_not_negative():
    assert kto_baseline(torch.tensor([1.0, 2.0])) == 1.5
    assert kto_baseline(torch.tensor([-1.0, 0.5])) == 0.0
    assert kto_baseline(torch.zeros(0)) == 0.0


def test_bradley_terry_equals_the_formula():
    scores = torch.tensor([1.0, -0.5, 0.0, 2.0], dtype=torch.float64)
    expected = [-math.log(sigmoid(c - r)) + 0.1 * (c + r) ** 2 for c, r in pairs(scores)]
    torch.testing.assert_close(bradley_terry_loss(scores, 0.1).loss, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: dpo_loss(x, 0.3, 0.1).loss,
        lambda x: ipo_loss(x, 0.3).loss,
        lambda x: simpo_loss(x, 2.0, 0.5).loss,
        lambda x: bradley_terry_loss(x, 0.1).loss,
        lambda x: kto_loss(x, torch.tensor([True, False] * 4), 0.2, 0.3),
    ],
    ids=["dpo", "ipo", "simpo", "bradley_terry", "kto"],
)
def test_gradients_are_the_derivatives_and_raise_the_chosen(loss):
    x = (POLICY - REFERENCE).clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (x,))
    grad = torch.autograd.grad(loss(torch.zeros(8, dtype=torch.float64).requires_grad_(False) + x).sum(), x)[0]
    assert (grad[0::2] - grad[1::2] < 0).any(), "a step down the loss must part chosen and rejected"


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_a_huge_margin_is_finite(gap):
    x = torch.tensor([gap, 0.0], requires_grad=True)
    for loss in (dpo_loss(x, 1.0).loss, simpo_loss(x, 1.0, 0.5).loss, bradley_terry_loss(x).loss):
        (grad,) = torch.autograd.grad(loss.sum(), x)
        assert loss.isfinite().all() and grad.isfinite().all()


def test_sums_and_means_of_answers_leave_out_what_is_masked():
    x = torch.tensor([1.0, 2.0, math.nan, 4.0, 8.0])
    mask, sequence = ~x.isnan(), torch.tensor([0, 0, 0, 1, 1])
    assert sum_by_sequence(x, mask, sequence, 3).tolist() == [3.0, 12.0, 0.0]
    assert sum_by_sequence(x, mask, sequence, 3, mean=True).tolist() == [1.5, 6.0, 0.0]


# What TRL 0.19.1 computes of the numbers above: DPOTrainer.dpo_loss (sigmoid, ipo), CPOTrainer.cpo_loss (simpo) and
# KTOTrainer.kto_loss, called on the same tensors. TRL's KTO lists the good answers first.
TRL = {
    "dpo": [0.38687100611489994, 0.9897117546729934, 0.46471175467299347, 1.3500584796176431],
    "cdpo": [0.46187100611489995, 0.9372117546729936, 0.5172117546729935, 1.2450584796176434],
    "ipo": [4.490362811791384, 7.0104597107438025, 4.0, 7.200277777777779],
    "simpo": [0.8380425183363875, 1.7287480357401126, 1.4632824673380311, 0.854355244468527],
    "kto": [
        0.6826816614396298,
        0.8228941628747015,
        0.710661135941897,
        1.0089105256016406,
        0.18061841242557908,
        0.2908796884209181,
        0.19825837506763683,
        0.2908796884209181,
    ],
}


@pytest.mark.parametrize("name", TRL)
def test_another_trainer_gives_the_same_numbers(name):
    good = torch.tensor([True, False] * 4)
    kto = kto_loss(POLICY - REFERENCE, good, 0.4, 0.3, 1.5, 0.5)
    found = {
        "dpo": dpo_loss(POLICY - REFERENCE, 0.3).loss,
        "cdpo": dpo_loss(POLICY - REFERENCE, 0.3, 0.1).loss,
        "ipo": ipo_loss((POLICY - REFERENCE) / LENGTHS, 0.2).loss,
        "simpo": simpo_loss(POLICY / LENGTHS, 2.0, 0.7).loss,
        "kto": torch.cat((kto[good], kto[~good])),
    }
    torch.testing.assert_close(found[name], torch.tensor(TRL[name], dtype=torch.float64))
