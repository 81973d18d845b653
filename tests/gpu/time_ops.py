"""Times of the ops on one GPU, next to a memcpy of the same bytes or the matrix products of the same shape.

`check_ops.py` prints them; each function yields lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

GPU = torch.device("cuda")
CALLS = 4  # between two clock readings: launching is part of the time only where the GPU waits for it


def make_loss(num_tokens: int) -> Callable[[Tensor, Tensor, slice], tuple[Tensor, dict[str, Tensor]]]:
    """PPO's clipped loss with an entropy bonus, over random old log-probs and advantages."""
    noise, advantages = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(8)).to(GPU)

    def loss(logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (logprobs - logprobs.detach() + 0.1 * noise[part]).exp()
        gain = torch.minimum(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
        return -(gain + 0.01 * entropy).sum() / num_tokens, {}

    return loss


def seconds_of(call: Callable[[], object], rounds: int = 10) -> float:
    """Best of a few, by CUDA events around several calls."""
    for _ in range(2):
        call()
    best = float("inf")
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / CALLS)
    return best


def memcpy_seconds(num_bytes: int) -> float:
    """A device copy that reads and writes `num_bytes` in all."""
    x = torch.ones(max(1, num_bytes // 2), dtype=torch.uint8, device=GPU)
    y = torch.empty_like(x)
    return seconds_of(lambda: y.copy_(x))


def time_gae() -> Iterator[str]:
    from megarl.ops.gae import gae
    from megarl.ops.moments import masked_moments, whiten

    for name, lengths in (
        ("1024 long-tailed", torch.linspace(2.77, 9.01, 1024).exp().long()),
        ("1024 of 8192", torch.full((1024,), 8192)),
        ("8192 of 8192", torch.full((8192,), 8192)),
    ):
        total = int(lengths.sum())
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(GPU)
        rewards, values = torch.randn(2, total, device=GPU)
        mask = torch.rand(total, device=GPU) < 0.9
        ours, copy = seconds_of(partial(gae, rewards, values, mask, cu, 1.0, 0.95)), memcpy_seconds(17 * total)
        yield f"gae {name}: {ours * 1e6:.0f} us, {ours / copy:.2f} x memcpy, {17 * total / ours / 1e12:.2f} TB/s"
    ours, copy = seconds_of(partial(masked_moments, values, mask)), memcpy_seconds(5 * total)
    yield f"masked_moments {total} tokens: {ours * 1e6:.0f} us, {ours / copy:.2f} x memcpy"
    ours, copy = seconds_of(partial(whiten, values, mask)), memcpy_seconds(14 * total)
    yield f"whiten {total} tokens: {ours * 1e6:.0f} us, {ours / copy:.2f} x memcpy"


def time_copy() -> Iterator[str]:
    from benchmarks.copy import Shape, plan_layer, plan_pack
    from benchmarks.copy import build as build_tensors
    from megarl.ops.reshard import build_plan, copy_segments, place_plan

    shape, num_layers = Shape(hidden=8192, ffn=28672, heads=64, kv_heads=8, tp=8), 4
    rows = [row for layer in range(num_layers) for row in plan_layer(shape, 32 * layer, 4 * layer)]
    engine = build_tensors(shape.engine_shapes() * num_layers, torch.bfloat16)
    bucket = build_tensors([(num_layers * shape.hidden, (shape.hidden + shape.ffn) // 8)], torch.bfloat16)
    for name, dtype in (
        ("direct, bf16", torch.bfloat16),
        ("direct, fp32 to bf16", torch.float32),
        ("pack, bf16", None),
    ):
        if dtype is None:
            srcs, dsts, plan = engine, bucket, build_plan(plan_pack(shape, num_layers))
        else:
            srcs, dsts = build_tensors(shape.trainer_shapes() * 8 * num_layers, dtype), engine
            plan = build_plan(rows)
        placed = place_plan(plan, GPU)
        num_bytes = int((plan[:, 6] * plan[:, 7]).sum()) * (srcs[0].element_size() + 2)
        ours, copy = seconds_of(partial(copy_segments, srcs, dsts, plan, placed)), memcpy_seconds(num_bytes)
        rate = num_bytes / ours / 1e12
        yield f"copy_segments {name}: {rate:.2f} TB/s, {copy / ours:.2f} of memcpy ({len(plan)} segments)"


def time_logprob() -> Iterator[str]:
    from megarl.ops import reference
    from megarl.ops.logprob import logprob_entropy

    count, vocab = 4096, 128256
    targets = torch.randint(0, vocab, (count,), device=GPU)
    grads = torch.randn(2, count, device=GPU).unbind(0)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(count, vocab, device=GPU).to(dtype).requires_grad_()

        def ours(logits: Tensor = logits) -> object:
            outs = logprob_entropy(
                logits, targets, temperature=1.0, vocab_start=0, vocab_size=vocab, overwrite_logits=True
            )
            return torch.autograd.grad(outs, logits, grads)

        def plain(logits: Tensor = logits) -> object:
            return torch.autograd.grad(reference.logprob_entropy(logits, targets, 1.0), logits, grads)

        num_bytes = 3 * count * vocab * logits.element_size()  # read, read again, written
        dtype_name = str(dtype).removeprefix("torch.")
        slow, fast, copy = seconds_of(plain, 3), seconds_of(ours), memcpy_seconds(num_bytes)
        yield (
            f"logprob_entropy fwd+bwd T={count} V={vocab} {dtype_name}: {fast * 1e3:.2f} ms, {fast / copy:.2f} x "
            f"memcpy of its three passes, {slow / fast:.1f} x faster than plain torch"
        )


def time_policy_head() -> Iterator[str]:
    from megarl.ops import reference
    from megarl.ops.logprob import linear_logprob_entropy
    from megarl.ops.policy_head import policy_head

    count, width, vocab = 8192, 4096, 128256
    hidden = torch.randn(count, width, device=GPU, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, width, device=GPU) * width**-0.5).bfloat16().requires_grad_()
    targets, loss_fn = torch.randint(0, vocab, (count,), device=GPU), make_loss(count)
    main_grad = torch.zeros(vocab, width, device=GPU)
    logits = torch.empty(count, vocab, device=GPU, dtype=torch.bfloat16)
    shared = {"temperature": 1.0, "vocab_start": 0, "vocab_size": vocab}

    @torch.no_grad()
    def products() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    def one_pass() -> object:
        loss, _ = policy_head(hidden, weight, targets, loss_fn, main_grad=main_grad, **shared)
        return torch.autograd.grad(loss, hidden)

    def recomputing() -> object:
        scores = linear_logprob_entropy(hidden, weight, targets, **shared)
        return torch.autograd.grad(loss_fn(*scores, slice(0, count))[0], (hidden, weight))

    def autograd() -> object:
        scores = reference.logprob_entropy(torch.mm(hidden, weight.t()), targets, 1.0)
        return torch.autograd.grad(loss_fn(*scores, slice(0, count))[0], (hidden, weight))

    floor = seconds_of(products, 5)
    for call in (one_pass, recomputing, autograd):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        took = seconds_of(call, 3)
        extra = (torch.cuda.max_memory_allocated() - before - 2 * count * width) / 2**20
        yield (
            f"head {call.__name__} T={count} H={width} V={vocab} bf16: {took * 1e3:.1f} ms, {took / floor:.2f} x its "
            f"three products, {extra:.0f} MiB extra"
        )


TIMES: tuple[Callable[[], Iterator[str]], ...] = (time_gae, time_copy, time_logprob, time_policy_head)
