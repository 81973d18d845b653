"""The GAE kernel against loops written from the definition, in fp64, on packed and on padded batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algo.advantages import compute_gae
from megarl.ops import gae as gae_module
from megarl.ops import reference_segments
from megarl.ops.gae import gae

LENGTHS = [[1], [0], [7], [83], [769], [4096], [0, 1, 7, 0, 83, 769, 0], [8, 16, 15, 9], []]
MASKS = ["all", "none", "scattered", "answer", "turns"]


def _cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _bool(*flags: int) -> Tensor:
    return torch.tensor(flags, dtype=torch.bool)


def _mask(kind: str, lengths: list[int], rng: torch.Generator) -> Tensor:
    total = sum(lengths)
    place = torch.cat([torch.arange(length) for length in lengths]) if lengths else torch.arange(0)
    return {
        "all": torch.ones(total, dtype=torch.bool),
        "none": torch.zeros(total, dtype=torch.bool),
        "scattered": torch.rand(total, generator=rng) < 0.6,
        "answer": place >= 19,
        "turns": place // 21 % 3 == 1,
    }[kind]


def _batch(kind: str, lengths: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rewards, values, mask, bootstrap."""
    rng = torch.Generator().manual_seed(sum(lengths) + len(kind))
    rewards, values = torch.randn(2, sum(lengths), generator=rng, dtype=torch.float64).to(dtype)
    bootstrap = torch.randn(len(lengths), generator=rng, dtype=torch.float64).to(dtype)
    return rewards, values, _mask(kind, lengths, rng), bootstrap


def loop(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: list[int],
    gamma: list[float],
    lam: list[float],
    boot: Tensor,
) -> Tensor:
    """Token by token in Python's own fp64, each sequence from its end."""
    out: list[float] = []
    r, v, m = rewards.double().tolist(), values.double().tolist(), mask.tolist()
    start = 0
    for i, length in enumerate(lengths):
        running, next_value, carried = 0.0, float(boot[i]), 0.0
        row = [0.0] * length
        for t in range(start + length - 1, start - 1, -1):
            if m[t]:
                running = r[t] + carried + gamma[i] * next_value - v[t] + gamma[i] * lam[i] * running
                row[t - start], next_value, carried = running, v[t], 0.0
            elif math.isfinite(r[t]):
                carried += r[t]
        out += row
        start += length
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_gae_fp64_equals_the_loop(lengths, kind):
    rewards, values, mask, bootstrap = _batch(kind, lengths)
    advantages, returns = gae(rewards, values, mask, _cu(lengths), 0.99, 0.95, bootstrap)
    count = len(lengths)
    expected = loop(rewards, values, mask, lengths, [0.99] * count, [0.95] * count, bootstrap)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("kind", MASKS)
def test_gae_fp32_is_the_loop_rounded_once(kind, gamma, lam):
    """The kernel computes in fp64: the error is that of one rounding, as that of the plain-torch form."""
    lengths = [769, 83, 4096]
    rewards, values, mask, bootstrap = _batch(kind, lengths, torch.float32)
    advantages, _ = gae(rewards, values, mask, _cu(lengths), gamma, lam, bootstrap)
    expected = loop(rewards, values, mask, lengths, [gamma] * 3, [lam] * 3, bootstrap)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, expected.float(), rtol=2**-23, atol=1e-12)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1), st.floats(0, 1)), max_size=6), st.integers(0, 10**6))
def test_gae_takes_a_discount_and_a_decay_for_each_sequence(rows, seed):
    lengths, gamma, lam = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
    rng = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=rng, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=rng) < 0.7
    expected = loop(rewards, values, mask, lengths, gamma, lam, torch.zeros(len(rows)))
    each = [torch.tensor(x, dtype=torch.float64) for x in (gamma, lam)]
    advantages, _ = gae(rewards, values, mask, _cu(lengths), *each)
    torch.testing.assert_close(advantages, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("has_extension", [True, False])
@pytest.mark.parametrize("is_per_sequence", [True, False])
def test_gae_is_the_same_without_the_extension(monkeypatch, has_extension, is_per_sequence):
    if not has_extension:
        monkeypatch.setattr(gae_module, "_kernel", lambda: None)
    lengths = [83, 0, 7]
    rewards, values, mask, bootstrap = _batch("turns", lengths, torch.float32)
    gamma: float | Tensor = torch.full((3,), 0.99) if is_per_sequence else 0.99
    advantages, returns = gae(rewards, values, mask, _cu(lengths), gamma, 0.95, bootstrap)
    expected = compute_gae(rewards, values, mask, _cu(lengths), 0.99, 0.95, bootstrap)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close((advantages, returns), expected)


def test_the_reference_equals_the_loop():
    lengths = [83, 0, 7, 1]
    rewards, values, mask, bootstrap = _batch("scattered", lengths)
    gamma, lam = (torch.full((4,), x, dtype=torch.float64) for x in (0.9, 0.8))
    advantages, _ = reference_segments.gae(rewards, values, mask, _cu(lengths), gamma, lam, bootstrap)
    torch.testing.assert_close(advantages, loop(rewards, values, mask, lengths, [0.9] * 4, [0.8] * 4, bootstrap))


def test_gae_of_a_packed_batch_equals_the_padded_loop_over_steps():
    lengths = [5, 12, 1]
    rewards, values, mask, _ = _batch("all", lengths)
    padded = [torch.nn.utils.rnn.pad_sequence(list(x.split(lengths)), batch_first=True) for x in (rewards, values)]
    is_real = torch.arange(12) < torch.tensor(lengths)[:, None]
    running, next_value, columns = torch.zeros(3).double(), torch.zeros(3).double(), []
    for t in reversed(range(12)):
        delta = padded[0][:, t] + 0.99 * next_value - padded[1][:, t]
        running = torch.where(is_real[:, t], delta + 0.99 * 0.95 * running, running)
        next_value = torch.where(is_real[:, t], padded[1][:, t], next_value)
        columns.append(running)
    expected = torch.stack(columns[::-1], dim=1)[is_real]
    torch.testing.assert_close(gae(rewards, values, mask, _cu(lengths), 0.99, 0.95)[0], expected)


def test_gae_steps_over_a_masked_token_and_moves_its_reward():
    """Case D3."""
    values, mask = torch.tensor([0.0, 0.0, 100.0]), _bool(1, 1, 0)
    for rewards in ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0]):
        advantages, returns = gae(torch.tensor(rewards), values, mask, _cu([3]), 1.0, 0.95)
        torch.testing.assert_close(advantages, torch.tensor([0.95, 1.0, 0.0]))
        torch.testing.assert_close(returns, torch.tensor([0.95, 1.0, 0.0]))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", MASKS)
def test_gae_is_not_changed_by_what_masked_tokens_hold(kind, poison):
    lengths = [83, 7, 40]
    rewards, values, mask, bootstrap = _batch(kind, lengths, torch.float32)
    clean = gae(rewards.where(mask, 0.0), values.where(mask, 0.0), mask, _cu(lengths), 0.9, 0.9, bootstrap)
    dirty = gae(rewards.where(mask, poison), values.where(mask, poison), mask, _cu(lengths), 0.9, 0.9, bootstrap)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_gae_of_nothing_but_masked_tokens_is_zero():
    """Case D8: also with a bootstrap that is NaN."""
    nan = torch.full((20,), math.nan)
    advantages, returns = gae(nan, nan, torch.zeros(20, dtype=torch.bool), _cu([13, 0, 7]), 1.0, 1.0, nan[:3])
    assert torch.equal(advantages, torch.zeros(20)) and torch.equal(returns, torch.zeros(20))


def test_gae_shows_a_nan_reward_of_the_policy_in_its_own_sequence_only():
    rewards, mask = torch.zeros(48), torch.ones(48, dtype=torch.bool)
    rewards[20] = math.nan
    advantages, _ = gae(rewards, torch.zeros(48), mask, _cu([16, 16, 16]), 1.0, 1.0)
    assert advantages.isnan().nonzero().squeeze(1).tolist() == [16, 17, 18, 19, 20]


def test_gae_leaves_its_inputs_alone_and_repeats_itself():
    lengths = [769, 0, 83]
    inputs = (*_batch("scattered", lengths, torch.float32), _cu(lengths))
    rewards, values, mask, bootstrap, cu = inputs
    before = [x.clone() for x in inputs]
    first = gae(rewards, values, mask, cu, 0.99, 0.95, bootstrap)
    second = gae(rewards, values, mask, cu, 0.99, 0.95, bootstrap)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gae_is_the_same_on_one_and_two_threads():
    lengths = [9000, 3, 0, 20000, 4000, 16384]
    rewards, values, mask, _ = _batch("scattered", lengths, torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(gae(rewards, values, mask, _cu(lengths), 0.99, 0.95))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gae_takes_strided_input():
    lengths = [83, 7]
    rewards, values, mask, _ = _batch("scattered", lengths, torch.float32)
    r, v, m = (torch.stack([x, x], dim=1)[:, 0] for x in (rewards, values, mask))
    assert not r.is_contiguous()
    torch.testing.assert_close(
        gae(r, v, m, _cu(lengths), 0.9, 0.9), gae(rewards, values, mask, _cu(lengths), 0.9, 0.9), rtol=0, atol=0
    )


def test_gae_of_half_precision_values_is_fp32():
    half = torch.ones(2, dtype=torch.bfloat16)
    advantages, returns = gae(torch.zeros(2), half, _bool(1, 1), _cu([2]).int(), 1.0, 1.0)
    assert advantages.dtype == returns.dtype == torch.float32
    assert advantages.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("cu", "message"), [([0, 3], "number of tokens, 4"), ([0, 3, 2, 4], r"cu_seqlens\[2\]=2"), ([1, 4], "from 1 to 4")]
)
def test_gae_refuses_boundaries_that_do_not_fit(cu, message):
    x = torch.zeros(4)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.megarl.gae(x, x, x.bool(), torch.tensor(cu), 1.0, 1.0)


def test_gae_passes_opcheck():
    rewards, values, mask, bootstrap = _batch("scattered", [7, 9], torch.float32)
    each = torch.full((2,), 0.9, dtype=torch.float64)
    gae(rewards, values, mask, _cu([7, 9]), 0.99, 0.95)  # gives the op its fake kernel
    for extra in ((), (bootstrap, each, each)):
        torch.library.opcheck(torch.ops.megarl.gae, (rewards, values, mask, _cu([7, 9]), 0.99, 0.95, *extra))
