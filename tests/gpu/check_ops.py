"""Every op of the extension on one GPU: built, compared with fp64, timed against memcpy and matrix products.

    python tests/gpu/check_ops.py [--no-build] [--out table.txt]

Needs torch with CUDA and nvcc, nothing else of megarl's dependencies; a few minutes, most of them the compiler's.
Prints one line a check and one a time (`time_ops.py`), and exits with 1 when something is wrong. An op is right when
its error against fp64 is at most twice that of plain torch in the same dtype, when it repeats itself bit for bit and
leaves its inputs alone.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

GPU = torch.device("cuda")
LENGTHS = [[1], [0, 7, 0], [83, 1], [769, 4096, 16], [20000, 3, 5000], [9] * 700]
Check = tuple[str, Callable[[], str]]


def build() -> None:
    """Builds the extension in place for this GPU alone."""
    major, minor = torch.cuda.get_device_capability()
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"}
    begin = time.perf_counter()
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the build failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    print(f"built for sm_{major}{minor} in {time.perf_counter() - begin:.0f} s")


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def error_of(x: Tensor, exact: Tensor) -> float:
    return float((x.double().cpu() - exact.double().cpu()).abs().max()) if x.numel() else 0.0


def compare(ours: Tensor, plain: Tensor, exact: Tensor, what: str) -> str:
    """Raises when our error is more than twice the plain one and a rounding of the largest value.

    For fp64, in which the exact values are computed too, both have errors: a bound of its own.
    """
    mine, theirs = error_of(ours, exact), error_of(plain, exact)
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    bound = 2 * theirs + largest * torch.finfo(ours.dtype).eps
    if ours.dtype == torch.float64:
        bound = 1e-11 * max(1.0, largest)
    assert mine <= bound, f"{what}: error {mine:.3g}, plain torch {theirs:.3g}, allowed {bound:.3g}"
    return f"{mine:.1e} (plain {theirs:.1e})"


def check_gae(lengths: list[int], dtype: torch.dtype) -> str:
    from megarl.algo.advantages import compute_gae
    from megarl.ops.gae import gae

    total, cu = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    found = ""
    for kind, share in (("all", 2.0), ("scattered", 0.6), ("none", -1.0)):
        mask = torch.rand(total, generator=torch.Generator().manual_seed(1)) < share
        rewards, values = rand(total, seed=2, dtype=dtype), rand(total, seed=3, dtype=dtype)
        rewards[~mask], values[~mask] = torch.inf, torch.nan
        bootstrap = rand(len(lengths), seed=4, dtype=dtype)
        inputs = [x.to(GPU) for x in (rewards, values, mask, cu, bootstrap)]
        before = [x.clone() for x in inputs]
        r, v, m, boundaries, boot = inputs
        results = [gae(r, v, m, boundaries, 0.99, 0.95, boot) for _ in range(2)]
        exact = compute_gae(rewards.double(), values.double(), mask, cu, 0.99, 0.95, bootstrap.double())
        for ours, again, want in zip(*results, exact, strict=True):
            assert torch.equal(ours, again), f"{kind}: not repeatable"
            found = compare(ours, want.to(dtype), want, kind)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(inputs, before, strict=True))
    return found


def check_gae_per_sequence() -> str:
    from megarl.ops import reference_segments
    from megarl.ops.gae import gae

    lengths, cu = [900, 3, 0, 70], torch.tensor([0, 900, 903, 903, 973])
    rewards, values, gamma, lam = rand(973, seed=1), rand(973, seed=2), rand(4, seed=3).sigmoid(), rand(4).sigmoid()
    mask = torch.arange(973) % 7 > 1
    exact = reference_segments.gae(rewards.double(), values.double(), mask, cu, gamma.double(), lam.double())[0]
    assert len(lengths) == 4
    ours, _ = gae(*(x.to(GPU) for x in (rewards, values, mask, cu, gamma, lam)))
    r, v, m = (torch.cat([x[:1], x]).to(GPU)[1:] for x in (rewards, values, mask))
    again, _ = gae(r, v, m, cu.to(GPU), gamma.to(GPU), lam.to(GPU))
    assert torch.equal(ours, again), "an unaligned view gives other numbers"
    return compare(ours, exact.float(), exact, "per sequence")


def check_moments(length: int, dtype: torch.dtype) -> str:
    from megarl.algo import advantages
    from megarl.ops.moments import masked_moments, whiten

    mask = torch.rand(length, generator=torch.Generator().manual_seed(1)) < 0.7
    x = (rand(length, dtype=torch.float64) * 3 + 1e4).to(dtype).where(mask, torch.nan)
    count, mean, m2 = masked_moments(x.to(GPU), mask.to(GPU)).tolist()
    chosen = x[mask].double()
    assert count == chosen.numel()
    if count:
        centred = (chosen - chosen.mean()).square().sum()
        assert abs(mean - chosen.mean()) <= 1e-12 * 1e4 and abs(m2 - centred) <= 1e-9 * centred + 1e-12
    results = [whiten(x.to(GPU), mask.to(GPU)) for _ in range(2)]
    assert torch.equal(*results), "not repeatable"
    return compare(results[0], advantages.whiten(x, mask), advantages.whiten(x.double(), mask), "whiten")


def check_copy(src_dtype: torch.dtype, dst_dtype: torch.dtype) -> str:
    from megarl.ops import reference_segments
    from megarl.ops.reshard import build_plan, check_disjoint, copy_segments, place_plan

    num_segments = 0
    for seed in range(12):
        rng, shift = random.Random(seed), seed % 4
        srcs = [(rand(60_000, seed=i) * 50).to(src_dtype)[shift:] for i in range(2)]
        want = [torch.zeros(400_000 + i, dtype=dst_dtype)[shift:] for i in range(2)]
        rows, begin = [], [0, 0]
        while len(rows) < 40:
            dst, stride = rng.randrange(2), rng.choice([1, 7, 8, 64, 96, 129, 2048, 9000, 20000])
            count, width = rng.randint(0, 12), rng.randint(0, stride)
            width, stride = rng.choice([(width, stride), (stride, stride), (stride // 8 * 8, (stride + 7) // 8 * 8)])
            src_stride = rng.choice([width, width + 8, (width + 15) // 8 * 8])
            room = srcs[0].numel() - src_stride * max(0, count - 1) - width
            if room >= 0 and begin[dst] + stride * max(1, count) <= want[dst].numel():
                offset = rng.choice([0, room // 8 * 8, rng.randint(0, room)])
                rows.append((rng.randrange(2), offset, src_stride, dst, begin[dst], stride, count, width))
                begin[dst] += stride * max(1, count) + rng.choice([0, 0, 3, 8])
            elif rng.random() < 0.02:
                break
        plan, ours = build_plan(rows), [x.to(GPU) for x in want]
        # a slice of a new tensor begins at an aligned address: shift it again
        ours = [torch.cat([x.new_zeros(shift), x])[shift:] for x in ours]
        sources = [torch.cat([x[:shift], x]).to(GPU)[shift:] for x in srcs]
        check_disjoint(ours, plan)
        reference_segments.copy_segments(srcs, want, plan)
        copy_segments(sources, ours, plan, place_plan(plan, GPU) if seed % 2 else None)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, want, strict=True)), f"plan {seed} differs"
        num_segments += len(rows)
    return f"exact ({num_segments} segments)"


def check_copy_refuses() -> str:
    from megarl.ops.reshard import build_plan, copy_segments

    out = torch.zeros(8, device=GPU)
    try:
        plan = build_plan([(0, 0, 0, 0, 0, 0, 1, 4), (0, 0, 0, 0, 6, 0, 1, 4)])
        copy_segments([torch.ones(4, device=GPU)], [out], plan)
    except RuntimeError as error:
        assert "segment 1 writes elements up to 10 of dsts[0]" in str(error), str(error)
        assert not out.any(), "something was written"
        return "refused"
    raise AssertionError("a segment outside its destination was not refused")


def check_logprob(num_tokens: int, vocab: int, dtype: torch.dtype) -> str:
    from megarl.ops import reference
    from megarl.ops.logprob import logprob_entropy

    padded = vocab + 47  # an odd row length, and columns without a token
    logits = (rand(num_tokens, padded, seed=1) * 3).to(dtype)
    targets = torch.randint(0, vocab, (num_tokens,), generator=torch.Generator().manual_seed(2))
    targets[num_tokens // 2] = -100 if num_tokens > 1 else targets[0]
    grads = rand(num_tokens, seed=3), rand(num_tokens, seed=4)

    def run(form: str) -> tuple[Tensor, ...]:
        own = (logits.double() if form == "exact" else logits).to(GPU).requires_grad_()
        where = targets.to(GPU)
        if form == "ours":
            outs = logprob_entropy(own, where, temperature=0.7, vocab_start=0, vocab_size=vocab)
        else:
            outs = reference.logprob_entropy(own, where, 0.7, vocab)
        grad = torch.autograd.grad(outs, own, [g.to(GPU, outs[0].dtype) for g in grads])[0]
        return outs[0].detach(), outs[1].detach(), grad

    first, second, plain, exact = run("ours"), run("ours"), run("plain"), run("exact")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "not repeatable"
    assert not first[2][:, vocab:].any(), "a padded column has a gradient"
    names = ("log-prob", "entropy", "gradient")
    found = [compare(*each) for each in zip(first, plain, exact, names, strict=True)]
    return ", ".join(found)


def check_policy_head(dtype: torch.dtype, form: str) -> str:
    from megarl.ops import reference
    from megarl.ops.logprob import linear_logprob_entropy
    from megarl.ops.policy_head import policy_head
    from tests.gpu.time_ops import make_loss

    count, width, vocab = 769, 256, 5003
    hidden, weight = rand(count, width, seed=1, dtype=dtype), (rand(vocab, width, seed=2) * width**-0.5).to(dtype)
    targets, loss_fn = (
        torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(3)).to(GPU),
        make_loss(count),
    )

    def run(which: str) -> tuple[Tensor, ...]:
        wide = torch.float64 if which == "exact" else dtype
        h, w = hidden.to(GPU, wide).requires_grad_(), weight.to(GPU, wide).requires_grad_()
        shared = {"temperature": 0.9, "vocab_start": 0, "vocab_size": vocab, "chunk_tokens": 200}
        if which != "ours":
            loss = loss_fn(*reference.logprob_entropy(h @ w.t(), targets, 0.9), slice(0, count))[0]
        elif form == "one pass":
            loss = policy_head(h, w, targets, loss_fn, **shared)[0]
        else:
            loss = loss_fn(*linear_logprob_entropy(h, w, targets, **shared), slice(0, count))[0]
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    ours, plain, exact = run("ours"), run("plain"), run("exact")
    names = ("loss", "gradient of hidden", "gradient of weight")
    found = [compare(*each) for each in zip(ours, plain, exact, names, strict=True)]
    return ", ".join(found)


def check_opcheck() -> str:
    from megarl.ops.reshard import build_plan

    ops = torch.ops.megarl
    mask, cu = (torch.arange(16) % 3 > 0).to(GPU), torch.tensor([0, 7, 16], device=GPU)
    x, moments = rand(16).to(GPU), torch.tensor([9.0, 0.1, 3.0], dtype=torch.float64, device=GPU)
    logits, targets, temperature = rand(16, 33).to(GPU), torch.arange(16, device=GPU), torch.ones(1, device=GPU)
    joined, plan = rand(3, 16).to(GPU), build_plan([(0, 0, 3, 0, 2, 4, 2, 3)])
    shard = (0, 30, -100)
    cases = [
        (ops.gae, (x, x, mask, cu, 0.99, 0.95)),
        (ops.masked_moments, (x, mask)),
        (ops.whiten, (x, mask, moments, 1e-8)),
        (ops.copy_segments, ([x], [torch.zeros(12, device=GPU)], plan)),
        (ops.logprob_stats, (logits, targets, temperature, *shard)),
        (ops.logprob_grad, (logits, targets, temperature, joined, x, x, *shard, torch.empty_like(logits))),
        (ops.logprob_grad_, (logits.clone(), targets, temperature, joined, x, x, *shard)),
        (ops.add_transposed_, (torch.zeros(16, 33, device=GPU), rand(33, 16, dtype=torch.bfloat16).to(GPU))),
    ]
    for op, arguments in cases:
        torch.library.opcheck(op, arguments)
    return f"{len(cases)} ops"


def list_checks() -> Iterator[Check]:
    for lengths in LENGTHS:
        for dtype in (torch.float32, torch.float64):
            name = f"gae {len(lengths)} sequences up to {max(lengths)}, {short(dtype)}"
            yield name, lambda lengths=lengths, dtype=dtype: check_gae(lengths, dtype)
    yield "gae, discounts by sequence, unaligned", check_gae_per_sequence
    for length in (0, 1, 83, 769, 4096, 3_000_001):
        yield f"moments and whitening, {length} tokens", lambda length=length: check_moments(length, torch.float32)
    yield "moments and whitening, fp64", lambda: check_moments(50_000, torch.float64)
    float32, bfloat16 = torch.float32, torch.bfloat16
    pairs = [(float32, float32), (bfloat16, bfloat16), (float32, bfloat16), (bfloat16, float32), (torch.float64,) * 2]
    for src, dst in [*pairs, (torch.int8, torch.int8)]:
        yield f"copy_segments {short(src)} to {short(dst)}", lambda src=src, dst=dst: check_copy(src, dst)
    yield "copy_segments outside a tensor", check_copy_refuses
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count, vocab in ((1, 50257), (83, 33), (769, 50257)):
            name = f"logprob_entropy T={count} V={vocab} {short(dtype)}"
            yield name, lambda count=count, vocab=vocab, dtype=dtype: check_logprob(count, vocab, dtype)
    for form in ("recomputing", "one pass"):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"head, {form}, {short(dtype)}", lambda form=form, dtype=dtype: check_policy_head(dtype, form)
    yield "opcheck", check_opcheck  # last: the calls before gave the ops their fake kernels


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-build", action="store_true", help="use the extension that is there")
    parser.add_argument("--out", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    if not arguments.no_build:
        build()
    from megarl.ops import dispatch
    from tests.gpu.time_ops import TIMES

    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    say(dispatch.choose_implementation(require_extension=True))
    num_wrong = 0
    for name, check in list_checks():
        try:
            say(f"  ok    {name:<52} {check()}")
        except Exception as error:  # noqa: BLE001  # every check is run; the exit code tells
            num_wrong += 1
            say(f"  WRONG {name:<52} {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            traceback.print_exc()
    for times in TIMES:
        try:
            for line in times():
                say(f"  time  {line}")
        except Exception as error:  # noqa: BLE001
            num_wrong += 1
            say(f"  WRONG {times.__name__}: {error}")
            traceback.print_exc()
        torch.cuda.empty_cache()
    say(f"{num_wrong} wrong")
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
