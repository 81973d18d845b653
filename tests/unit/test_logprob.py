"""Log-prob and entropy: the kernels against fp64, plain torch and each other's forms, on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.measure import MIB, measure_peak_bytes
from megarl.ops import dispatch, reference
from megarl.ops.logprob import linear_logprob_entropy, logprob_entropy

SHAPES = [(1, 49153), (7, 517), (83, 1001), (769, 257), (4096, 65)]
NARROW = [torch.float32, torch.bfloat16, torch.float16]
ARGUMENTS = ("logits", "targets", "temperature", "vocab_start", "vocab_size", "ignore_index")


def make_case(
    num_tokens: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets, and gradients [2, T] of log-probs and entropies."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_tokens, width, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, width, (num_tokens,), generator=generator)
    return logits, targets, torch.randn(2, num_tokens, generator=generator)


def run(logits: Tensor, targets: Tensor, grads: Tensor, **changes: object) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies, and the gradient of the logits."""
    options = {"temperature": 1.0, "vocab_start": 0, "vocab_size": logits.shape[1]} | changes
    leaf = logits.detach().requires_grad_()
    logprobs, entropy = logprob_entropy(leaf, targets, **options)  # type: ignore[arg-type]
    grads = grads.to(logprobs.dtype)
    (grad,) = torch.autograd.grad((logprobs, entropy), leaf, (grads[0], grads[1]))
    return logprobs.detach(), entropy.detach(), grad


def run_plain(logits: Tensor, targets: Tensor, grads: Tensor, temperature: float = 1.0) -> tuple[Tensor, ...]:
    leaf = logits.detach().requires_grad_()
    scores = reference.logprob_entropy(leaf, targets, temperature)
    grads = grads.to(scores[0].dtype)
    (grad,) = torch.autograd.grad(scores, leaf, (grads[0], grads[1]))
    return scores[0].detach(), scores[1].detach(), grad


def test_the_extension_is_built_and_used() -> None:
    assert "megarl._C" in dispatch.choose_implementation(require_extension=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_at_most_twice_those_of_plain_torch(
    shape: tuple[int, int], dtype: torch.dtype, temperature: float
) -> None:
    logits, targets, grads = make_case(*shape, dtype)
    right = run_plain(logits.double(), targets, grads, temperature)
    plain = run_plain(logits, targets, grads, temperature)
    ours = run(logits, targets, grads, temperature=temperature)
    for mine, theirs, exact in zip(ours, plain, right, strict=True):
        assert mine.dtype == theirs.dtype
        unit = torch.finfo(mine.dtype).eps * exact.abs().max()  # the rounding of the largest result
        assert (mine - exact).abs().max() <= 2 * (theirs - exact).abs().max() + unit


@pytest.mark.parametrize("dtype", [*NARROW, torch.float64], ids=str)
@pytest.mark.parametrize(("start", "size"), [(0, 517), (500, 1000), (500, 900), (600, 600)])
def test_kernels_compute_what_the_reference_says(dtype: torch.dtype, start: int, size: int) -> None:
    logits, targets, _ = make_case(29, 517, dtype)
    targets = targets + start // 2
    targets[3] = -100
    wide = torch.promote_types(dtype, torch.float32)
    temperature = torch.linspace(0.5, 2.0, 29, dtype=wide)
    arguments = (logits, targets, temperature, start, size, -100)
    mine, theirs = torch.ops.megarl.logprob_stats(*arguments), reference.logprob_stats(*arguments)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    state = torch.stack((theirs[0], theirs[1] + 1, torch.rand(29, dtype=wide)))
    grads = torch.randn(2, 29, dtype=wide)
    out, expected = torch.full_like(logits, torch.nan), torch.full_like(logits, torch.nan)
    torch.ops.megarl.logprob_grad(*arguments[:3], state, *grads, *arguments[3:], out)
    reference.logprob_grad(*arguments[:3], state, grads[0], grads[1], *arguments[3:], expected)
    torch.testing.assert_close(out, expected)
    torch.ops.megarl.logprob_grad_(logits, *arguments[1:3], state, *grads, *arguments[3:])
    assert torch.equal(logits, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_fp32_logits_is_written_narrow_directly(dtype: torch.dtype) -> None:
    logits, targets, grads = make_case(7, 517)
    state, temperature = torch.rand(3, 7) + 3, torch.ones(1)
    wide, narrow = torch.empty_like(logits), torch.empty_like(logits, dtype=dtype)
    for out in (wide, narrow):
        torch.ops.megarl.logprob_grad(logits, targets, temperature, state, *grads, 0, 517, -100, out)
    assert torch.equal(narrow, wide.to(dtype))


def test_a_temperature_divides_the_logits() -> None:
    # logits [2, 1, 0] at 0.5: token 0 has log-prob -log(1 + e^-2 + e^-4)
    logprobs, _ = logprob_entropy(
        torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), temperature=0.5, vocab_start=0, vocab_size=3
    )
    assert abs(float(logprobs) - -0.1429) < 1e-4


def test_a_temperature_per_token_is_each_tokens_own() -> None:
    logits, targets, grads = make_case(5, 517)
    temperature = torch.tensor([0.3, 1.0, 2.0, 0.7, 1.5])
    together = run(logits, targets, grads, temperature=temperature)
    for i in range(5):
        row = slice(i, i + 1)
        alone = run(logits[row], targets[row], grads[:, row], temperature=float(temperature[i]))
        for mine, other in zip(together, alone, strict=True):
            assert torch.equal(mine[row], other)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_must_be_above_zero(temperature: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        run(*make_case(2, 8), temperature=temperature)


def test_padded_columns_take_no_mass_and_no_gradient() -> None:
    # zero logits over 50257 ids padded to 50688: log-prob and entropy are those of 50257 equal ids
    logits = torch.zeros(2, 50688)
    logits[:, 50257:] = torch.nan
    logprobs, entropy, grad = run(logits, torch.tensor([0, 50256]), torch.ones(2, 2), vocab_size=50257)
    torch.testing.assert_close(logprobs, torch.full((2,), -10.82491), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, torch.full((2,), 10.82491), rtol=0, atol=1e-5)
    assert torch.count_nonzero(grad[:, 50257:]) == 0


def test_an_ignored_token_gives_nothing_whatever_its_row_holds() -> None:
    logits, targets, grads = make_case(5, 517)
    clean = run(logits, targets, grads)
    logits[2], targets[2], grads[:, 2] = torch.nan, -100, torch.nan
    for name, mine, other in zip(("logprobs", "entropy", "grad"), run(logits, targets, grads), clean, strict=True):
        assert torch.count_nonzero(mine[2]) == 0, name
        keep = torch.tensor([0, 1, 3, 4])
        assert torch.equal(mine[keep], other[keep]), name


def test_rows_apart_in_memory_and_off_alignment_give_the_same() -> None:
    logits, targets, grads = make_case(7, 517, torch.bfloat16)
    buffer = torch.full((7, 600), torch.nan, dtype=torch.bfloat16)
    buffer[:, 3:520] = logits
    for mine, other in zip(run(buffer[:, 3:520], targets, grads), run(logits, targets, grads), strict=True):
        assert torch.equal(mine, other)


def test_columns_apart_in_memory_give_the_same() -> None:
    logits, targets, grads = make_case(7, 517)
    for mine, other in zip(run(logits.t().contiguous().t(), targets, grads), run(logits, targets, grads), strict=True):
        assert torch.equal(mine, other)


def test_no_tokens_give_no_scores() -> None:
    logprobs, entropy, grad = run(*make_case(0, 517))
    assert logprobs.shape == entropy.shape == (0,)
    assert grad.shape == (0, 517)


def test_inputs_are_not_changed_unless_allowed() -> None:
    logits, targets, grads = make_case(7, 517)
    before = logits.clone(), targets.clone()
    run(logits, targets, grads)
    assert torch.equal(logits, before[0])
    assert torch.equal(targets, before[1])


def test_the_gradient_may_replace_the_logits() -> None:
    logits, targets, grads = make_case(7, 517)
    expected = run(logits, targets, grads)[2]
    grad = run(logits, targets, grads, overwrite_logits=True)[2]
    assert torch.equal(grad, expected)
    assert grad.data_ptr() == logits.data_ptr()


def test_the_same_call_gives_the_same_bits() -> None:
    case = make_case(83, 1001)
    for first, second in zip(run(*case), run(*case), strict=True):
        assert torch.equal(first, second)


def test_logprob_and_entropy_may_be_differentiated_one_by_one() -> None:
    logits, targets, grads = make_case(7, 517)
    both = run(logits, targets, grads)[2]
    leaf = logits.requires_grad_()
    logprobs, entropy = logprob_entropy(leaf, targets, temperature=1.0, vocab_start=0, vocab_size=517)
    entropy.backward(grads[1], retain_graph=True)
    logprobs.backward(grads[0])
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, both, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("target", [-1, 517, 10**9])
def test_a_target_outside_the_vocabulary_is_seen(target: int) -> None:
    logits, targets, grads = make_case(3, 517)
    targets[1] = target
    assert run(logits, targets, grads)[0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 250, 516])
def test_a_logit_that_is_not_a_number_is_seen(value: float, column: int) -> None:
    logits, targets, grads = make_case(3, 517)
    logits[1, column] = value
    logprobs, entropy, grad = run(logits, targets, grads)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]
    assert grad[1].isnan().any()


def test_a_logit_of_minus_infinity_takes_no_mass() -> None:
    logits, targets, grads = make_case(3, 517)
    targets.fill_(5)
    without = run(torch.cat((logits[:, :100], logits[:, 101:]), 1), targets, grads)
    logits[:, 100] = -torch.inf
    logprobs, entropy, grad = run(logits, targets, grads)
    torch.testing.assert_close((logprobs, entropy), without[:2])
    assert torch.count_nonzero(grad[:, 100]) == 0


def test_large_logits_lose_nothing() -> None:
    logits, targets, grads = make_case(7, 517)
    shifted = (logits * 8).round() / 8 + 30000.0  # exact in fp32
    for mine, other in zip(run(shifted, targets, grads), run(shifted - 30000.0, targets, grads), strict=True):
        assert torch.equal(mine, other)


def test_gradients_are_those_of_finite_differences() -> None:
    logits, targets, _ = make_case(3, 7, torch.float64)
    targets[1] = -100
    temperature = torch.tensor([0.5, 1.0, 2.0])
    assert torch.autograd.gradcheck(
        lambda x: logprob_entropy(x, targets, temperature=temperature, vocab_start=0, vocab_size=6),
        logits.requires_grad_(),
    )


def make_linear_case(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 24, generator=generator).to(dtype)
    weight = torch.randn(301, 24, generator=generator).to(dtype)
    bias = torch.randn(301, generator=generator).to(dtype)
    return hidden, weight, bias, torch.randint(0, 290, (num_tokens,), generator=generator)


def run_linear(
    compute: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], *inputs: Tensor
) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    logprobs, entropy = compute(*leaves)
    grads = torch.randn(2, len(logprobs), generator=torch.Generator().manual_seed(1)).to(logprobs.dtype)
    return (
        logprobs.detach(),
        entropy.detach(),
        *torch.autograd.grad((logprobs, entropy), leaves, (grads[0], grads[1])),
    )


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 83, 769])
def test_from_hidden_states_errors_are_at_most_twice_those_of_plain_torch(num_tokens: int, dtype: torch.dtype) -> None:
    *inputs, targets = make_linear_case(num_tokens, dtype)

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return reference.logprob_entropy(torch.addmm(bias, hidden, weight.t()), targets, 0.8, 290)

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprob_entropy(
            hidden, weight, targets, temperature=0.8, vocab_start=0, vocab_size=290, bias=bias, chunk_tokens=20
        )

    exact = run_linear(plain, *(each.double() for each in inputs))
    for mine, theirs, right in zip(run_linear(ours, *inputs), run_linear(plain, *inputs), exact, strict=True):
        assert mine.dtype == theirs.dtype
        unit = torch.finfo(mine.dtype).eps * right.abs().max()
        assert (mine - right).abs().max() <= 2 * (theirs - right).abs().max() + unit


def test_no_tokens_give_zero_gradients_of_hidden_states_and_weight() -> None:
    hidden, weight, _, targets = make_linear_case(0, torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    scores = linear_logprob_entropy(hidden, weight, targets, temperature=1.0, vocab_start=0, vocab_size=290)
    grads = torch.autograd.grad(scores, (hidden, weight), (torch.zeros(0), torch.zeros(0)))
    assert grads[0].shape == hidden.shape
    assert torch.equal(grads[1], torch.zeros_like(weight))


def test_memory_grows_with_the_chunk_and_not_with_the_length() -> None:
    weight = torch.randn(8192, 32, requires_grad=True)

    def peak(num_tokens: int) -> float:
        hidden, targets = torch.randn(num_tokens, 32, requires_grad=True), torch.zeros(num_tokens, dtype=torch.int64)

        def call() -> None:
            scores = linear_logprob_entropy(
                hidden, weight, targets, temperature=1.0, vocab_start=0, vocab_size=8192, chunk_tokens=256
            )
            torch.autograd.grad((scores[0].sum(), scores[1].sum()), (hidden, weight))

        call()
        return min(measure_peak_bytes(call) for _ in range(3)) / MIB  # what else the process maps can only add

    short, long = peak(512), peak(4096)  # a chunk of logits is 8 MiB, all of them 16 and 128
    assert long < short + 6
    assert long < 24


def test_opcheck() -> None:
    logits, targets, grads = make_case(5, 40)
    targets.clamp_(max=36)  # one outside gives NaN, which opcheck takes for a difference
    temperature, state = torch.ones(1), torch.rand(3, 5) + 3
    ops = torch.ops.megarl
    rest = (0, 37, -100)
    torch.library.opcheck(ops.logprob_stats.default, (logits, targets, temperature, *rest))
    torch.library.opcheck(
        ops.logprob_grad.default, (logits, targets, temperature, state, *grads, *rest, torch.empty_like(logits))
    )
    torch.library.opcheck(ops.logprob_grad_.default, (logits, targets, temperature, state, *grads, *rest))
    torch.library.opcheck(ops.add_transposed_.default, (torch.randn(40, 5), logits.bfloat16()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros(3, 8, 2)),
        ("logits", torch.zeros(3, 16)[:, ::2]),
        ("targets", torch.zeros(4, dtype=torch.int64)),
        ("targets", torch.zeros(3, dtype=torch.int32)),
        ("temperature", torch.ones(2)),
        ("temperature", torch.ones(1, dtype=torch.float64)),
    ],
)
def test_wrong_arguments_are_refused(name: str, value: Tensor) -> None:
    arguments: list[object] = [torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64), torch.ones(1), 0, 8, -100]
    arguments[ARGUMENTS.index(name)] = value
    with pytest.raises(RuntimeError, match=name):
        torch.ops.megarl.logprob_stats(*arguments)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (16, 16), (37, 50), (300, 65)])
def test_a_transposed_piece_is_added(rows: int, width: int, dtype: torch.dtype) -> None:
    total, part = torch.randn(rows, width), torch.randn(width, rows + 3).to(dtype)[:, 2 : rows + 2]
    expected = total + part.t().float()
    torch.ops.megarl.add_transposed_(total, part)
    assert torch.equal(total, expected)


def test_without_the_extension_plain_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(83, 1001)
    with_kernels = run(*case)
    monkeypatch.setattr("megarl.ops.logprob._kernels", lambda: reference)
    for mine, other in zip(run(*case), with_kernels, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6)
