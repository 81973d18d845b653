"""Masked moments and whitening against fp64, and the join of several ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algo import advantages as algo
from megarl.ops import moments as moments_module
from megarl.ops import reference_segments
from megarl.ops.moments import join_moments, masked_moments, whiten

LENGTHS = [1, 7, 83, 769, 2048, 4096, 40000]


def _data(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(length)
    x = torch.randn(length, generator=rng, dtype=torch.float64) * 3 + 5
    return x.to(dtype), torch.rand(length, generator=rng) < 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", LENGTHS)
def test_moments_equal_those_of_the_chosen_elements(length, dtype):
    x, mask = _data(length, dtype)
    mask[0] = True
    count, mean, m2 = masked_moments(x, mask)
    chosen = x[mask].double()
    assert count == mask.sum()
    torch.testing.assert_close(mean, chosen.mean(), rtol=1e-13, atol=0)
    torch.testing.assert_close(m2, (chosen - chosen.mean()).square().sum(), rtol=1e-12, atol=1e-20)


def test_moments_keep_a_small_variance_beside_a_large_mean():
    """The sum of squares of these numbers would lose the variance altogether."""
    x, mask = _data(10000)
    x = x + 1e9
    _, _, m2 = masked_moments(x, mask)
    torch.testing.assert_close(m2, (x[mask] - 1e9).var() * (mask.sum() - 1), rtol=1e-9, atol=0)


def test_moments_survive_an_outlier_in_front():
    x, mask = torch.ones(5000, dtype=torch.float64), torch.ones(5000, dtype=torch.bool)
    x[0] = 1e12
    count, mean, m2 = masked_moments(x, mask)
    torch.testing.assert_close(m2 / (count - 1), x.var(), rtol=1e-12, atol=0)
    torch.testing.assert_close(mean, x.mean(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_moments_and_whitening_do_not_see_what_is_masked(poison):
    x, mask = _data(769, torch.float32)
    dirty = x.where(mask, poison)
    assert torch.equal(masked_moments(dirty, mask), masked_moments(x, mask))
    assert torch.equal(whiten(dirty, mask), whiten(x, mask))


@pytest.mark.parametrize("length", [0, 1, 83, 5000])
def test_moments_of_an_empty_mask_are_zero(length):
    """Case D8."""
    nothing = torch.zeros(length, dtype=torch.bool)
    x = torch.full((length,), math.nan)
    assert masked_moments(x, nothing).tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(whiten(x, nothing), torch.zeros(length))


def test_a_nan_under_the_mask_stays_visible():
    x, mask = _data(83, torch.float32)
    x[mask.nonzero()[0]] = math.nan
    assert whiten(x, mask)[mask].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_whitening_equals_the_plain_form(length, dtype):
    x, mask = _data(length, dtype)
    torch.testing.assert_close(whiten(x, mask), algo.whiten(x, mask))


@pytest.mark.parametrize("has_extension", [True, False])
def test_one_policy_token_has_no_variance(monkeypatch, has_extension):
    if not has_extension:
        monkeypatch.setattr(moments_module, "_kernels", lambda: reference_segments)
    x, mask = torch.tensor([3.0, 7.0]), torch.tensor([False, True])
    assert masked_moments(x, mask).tolist() == [1.0, 7.0, 0.0]
    assert whiten(x, mask).tolist() == [0.0, 0.0]


def test_whitening_is_the_same_without_the_extension(monkeypatch):
    x, mask = _data(769, torch.float32)
    kernel = whiten(x, mask)
    monkeypatch.setattr(moments_module, "_kernels", lambda: reference_segments)
    torch.testing.assert_close(kernel, whiten(x, mask))


def test_joined_groups_have_the_moments_of_their_union():
    x, mask = _data(769)
    parts = list(zip(x.split([0, 1, 700, 68]), mask.split([0, 1, 700, 68]), strict=True))
    joined = join_moments(torch.stack([masked_moments(*part) for part in parts]))
    torch.testing.assert_close(joined, masked_moments(x, mask), rtol=1e-12, atol=0)


def test_joined_empty_groups_are_empty():
    assert join_moments(torch.zeros(3, 3, dtype=torch.float64)).tolist() == [0.0, 0.0, 0.0]


def test_moments_are_the_same_on_one_and_two_threads():
    x, mask = _data(100_000, torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(whiten(x, mask))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_inputs_stay_as_they_are():
    x, mask = _data(83, torch.float32)
    before = x.clone(), mask.clone()
    whiten(x, mask)
    assert torch.equal(x, before[0]) and torch.equal(mask, before[1])


def test_moments_and_whitening_pass_opcheck():
    x, mask = _data(83, torch.float32)
    moments = masked_moments(x, mask)  # gives the ops their fake kernels
    torch.library.opcheck(torch.ops.megarl.masked_moments, (x, mask))
    torch.library.opcheck(torch.ops.megarl.whiten, (x, mask, moments, 1e-8))
