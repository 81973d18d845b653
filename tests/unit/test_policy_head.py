"""The one-pass policy head against autograd over whole logits, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from benchmarks.measure import MIB, measure_peak_bytes
from megarl.algo.objective import policy_objective
from megarl.ops import reference
from megarl.ops.policy_head import TokenLoss, policy_head

VOCAB, VALID, WIDTH = 301, 290, 24


def make_inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, targets."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, VALID, (num_tokens,), generator=generator)


def build_ppo(num_tokens: int) -> TokenLoss:
    """Clip, dual clip, entropy bonus and KL: every way in which a token's loss depends on its logits."""
    generator = torch.Generator().manual_seed(3)
    old, ref = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64).sub(6).unbind(0)
    advantages = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(num_tokens, generator=generator) < 0.8
    weights = mask / max(1, int(mask.sum()))

    def token_loss(logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
        return policy_objective(
            logprobs,
            entropy,
            old[part],
            advantages[part],
            weights[part],
            mask[part],
            clip_low=0.2,
            clip_high=0.3,
            clip_c=3.0,
            entropy_coeff=0.05,
            ref_logprobs=ref[part],
            kl_loss_coef=0.1,
        )

    return token_loss


def build_sequence_ratio(num_tokens: int) -> TokenLoss:
    """GSPO: the ratio of a sequence is the mean over its tokens, so no chunk knows it alone."""
    sequence = torch.arange(num_tokens) % 5
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.3], dtype=torch.float64)

    def token_loss(logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert part == slice(0, num_tokens)
        sums = logprobs.new_zeros(5).index_add(0, sequence, 0.1 * logprobs)
        ratio = (sums / sequence.bincount(minlength=5).clamp(min=1)).exp()
        return -(advantages * ratio).sum() - 0.01 * entropy.sum(), {"ratio": ratio.sum()}

    return token_loss


def run_head(hidden: Tensor, weight: Tensor, targets: Tensor, token_loss: TokenLoss, **changes: object):
    options: dict = {"temperature": 0.8, "vocab_start": 0, "vocab_size": VALID, "chunk_tokens": 20} | changes
    return policy_head(hidden, weight, targets, token_loss, **options)


def run_autograd(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, token_loss: TokenLoss):
    logits = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    scores = reference.logprob_entropy(logits, targets, 0.8, VALID)
    return token_loss(*scores, slice(0, len(targets)))


@pytest.mark.parametrize(
    ("build", "whole"),
    [(build_ppo, False), (build_ppo, True), (build_sequence_ratio, True)],
    ids=["ppo", "ppo-whole", "sequence-ratio"],
)
@pytest.mark.parametrize("num_tokens", [1, 20, 83])
def test_loss_statistics_and_gradients_are_those_of_autograd(
    build: Callable[[int], TokenLoss], whole: bool, num_tokens: int
) -> None:
    hidden, weight, bias, targets = make_inputs(num_tokens)
    token_loss = build(num_tokens)
    loss, stats = run_head(hidden, weight, targets, token_loss, bias=bias, whole=whole)
    expected, expected_stats = run_autograd(hidden, weight, bias, targets, token_loss)
    torch.testing.assert_close(loss, expected)
    assert stats.keys() == expected_stats.keys()
    for name, value in stats.items():
        assert not value.requires_grad
        torch.testing.assert_close(value, expected_stats[name], check_dtype=False)
    inputs = hidden, weight, bias
    for mine, right in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [7, 769])
def test_errors_are_at_most_twice_those_of_autograd_in_the_same_dtype(num_tokens: int, dtype: torch.dtype) -> None:
    hidden, weight, _, targets = make_inputs(num_tokens, dtype)
    token_loss = build_ppo(num_tokens)
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = torch.autograd.grad(run_autograd(*wide, None, targets, token_loss)[0], wide)
    plain = torch.autograd.grad(run_autograd(hidden, weight, None, targets, token_loss)[0], (hidden, weight))
    ours = torch.autograd.grad(run_head(hidden, weight, targets, token_loss)[0], (hidden, weight))
    for mine, theirs, right in zip(ours, plain, exact, strict=True):
        unit = torch.finfo(dtype).eps * right.abs().max()
        assert (mine - right).abs().max() <= 2 * (theirs - right).abs().max() + unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weight_gradient_is_added_to_main_grad(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = make_inputs(83, dtype)
    token_loss = build_ppo(83)
    expected = torch.autograd.grad(run_head(hidden, weight, targets, token_loss)[0], (hidden, weight))
    main_grad = torch.ones(VOCAB, WIDTH)
    loss, _ = run_head(hidden, weight, targets, token_loss, main_grad=main_grad)
    loss.backward()
    assert weight.grad is None
    assert hidden.grad is not None and torch.equal(hidden.grad, expected[0])
    torch.testing.assert_close(main_grad - 1.0, expected[1].float(), rtol=1e-2, atol=1e-6)


def test_only_the_rows_asked_for_are_projected_and_repeats_add_up() -> None:
    hidden, weight, _, _ = make_inputs(30)
    rows = torch.tensor([4, 4, 29, 0, 4, 17])
    targets = torch.tensor([1, 2, 3, 4, 5, 6])
    token_loss = build_ppo(6)
    with torch.no_grad():
        poisoned = hidden.clone()
        poisoned[[1, 2, 3, *range(5, 17), *range(18, 29)]] = torch.nan
    poisoned.requires_grad_()
    loss, _ = run_head(poisoned, weight, targets, token_loss, rows=rows, chunk_tokens=4)
    grads = torch.autograd.grad(loss, (poisoned, weight))
    expected = torch.autograd.grad(run_autograd(hidden[rows], weight, None, targets, token_loss)[0], (hidden, weight))
    for mine, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, right)


def test_an_ignored_token_changes_nothing_even_as_nan() -> None:
    hidden, weight, _, targets = make_inputs(30)
    keep = torch.arange(30) != 11

    def token_loss(logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
        return (logprobs.square() + entropy).sum(), {}

    with torch.no_grad():
        poisoned, ignored = hidden.clone(), targets.clone()
        poisoned[11], ignored[11] = 1e30, -100
    poisoned.requires_grad_()
    grads = torch.autograd.grad(run_head(poisoned, weight, ignored, token_loss)[0], (poisoned, weight))
    expected = torch.autograd.grad(
        run_autograd(hidden[keep], weight, None, targets[keep], token_loss)[0], (hidden, weight)
    )
    for mine, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, right)


def test_a_scaled_loss_scales_the_gradients() -> None:
    hidden, weight, _, targets = make_inputs(30)
    token_loss = build_ppo(30)
    plain = torch.autograd.grad(run_head(hidden, weight, targets, token_loss)[0], (hidden, weight))
    scaled = torch.autograd.grad(run_head(hidden, weight, targets, token_loss)[0] * 0.25, (hidden, weight))
    for mine, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(mine, 0.25 * other)


def test_a_scaled_loss_is_refused_where_main_grad_has_the_gradient_already() -> None:
    hidden, weight, _, targets = make_inputs(30, torch.float32)
    loss, _ = run_head(hidden, weight, targets, build_ppo(30), main_grad=torch.zeros(VOCAB, WIDTH))
    with pytest.raises(RuntimeError, match="main_grad was scaled"):
        (loss * 0.25).backward()


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, _, targets = make_inputs(30)
    loss, _ = run_head(hidden, weight, targets, build_ppo(30))
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="this is the second"):
        loss.backward()


def test_no_tokens_give_a_loss_of_zero_and_zero_gradients() -> None:
    hidden, weight, _, targets = make_inputs(0)
    loss, stats = run_head(hidden, weight, targets, build_ppo(0))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert float(loss.detach()) == 0.0
    assert float(stats["actor/pg_loss"]) == 0.0
    assert torch.count_nonzero(grads[1]) == 0


def test_a_loss_of_masked_tokens_only_is_zero_with_zero_gradients() -> None:
    hidden, weight, _, targets = make_inputs(30)

    def token_loss(logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
        return logprobs.new_zeros(()), {}

    loss, _ = run_head(hidden, weight, targets, token_loss)
    assert float(loss.detach()) == 0.0
    for grad in torch.autograd.grad(loss, (hidden, weight)):
        assert torch.count_nonzero(grad) == 0


def test_without_gradients_wanted_main_grad_stays() -> None:
    hidden, weight, _, targets = make_inputs(30, torch.float32)
    main_grad = torch.zeros(VOCAB, WIDTH)
    with torch.no_grad():
        loss, _ = run_head(hidden, weight, targets, build_ppo(30), main_grad=main_grad)
    assert not loss.requires_grad
    assert torch.count_nonzero(main_grad) == 0


def test_inputs_are_not_changed_and_the_same_call_gives_the_same_bits() -> None:
    hidden, weight, _, targets = make_inputs(83, torch.bfloat16)
    before = hidden.detach().clone(), weight.detach().clone()
    token_loss = build_ppo(83)
    first, second = (
        torch.autograd.grad(run_head(hidden, weight, targets, token_loss)[0], (hidden, weight)) for _ in range(2)
    )
    assert torch.equal(hidden, before[0])
    assert torch.equal(weight, before[1])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_memory_grows_with_the_chunk_and_not_with_the_length() -> None:
    weight = torch.randn(8192, 32).bfloat16().requires_grad_()
    main_grad = torch.zeros(8192, 32)

    def token_loss(logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
        return logprobs.sum(), {}

    def peak(num_tokens: int) -> float:
        hidden = torch.randn(num_tokens, 32).bfloat16().requires_grad_()
        targets = torch.zeros(num_tokens, dtype=torch.int64)

        def call() -> None:
            loss, _ = policy_head(
                hidden, weight, targets, token_loss, temperature=1.0, vocab_start=0, vocab_size=8192,
                main_grad=main_grad, chunk_tokens=512,
            )  # fmt: skip
            torch.autograd.grad(loss, hidden)

        call()
        return measure_peak_bytes(call) / MIB

    short, long = peak(1024), peak(8192)  # a chunk of logits is 8 MiB, all of them 16 and 128
    assert long < short + 6
    assert long < 20
