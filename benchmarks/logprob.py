"""Log-prob and entropy with gradients: from logits against plain torch, from hidden states against bare products.

    python -m benchmarks.logprob [--tokens 2048] [--vocab 49152] [--hidden 576] [--dtype auto]

`logits_*`: fp32 logits are given; forward and backward through log-prob and entropy. `linear_*`: hidden states are
given; a PPO loss with an entropy bonus, gradients of hidden states and weight, against the three matrix products of
the same shape and dtype alone, and against autograd over fp32 logits that are held whole. The gradient of the weight
goes to an fp32 buffer, as in the trainer.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.util
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import MIB, measure_peak_bytes, num_threads, report, time_in_turns
from megarl import device
from megarl.algo.objective import policy_objective
from megarl.ops import dispatch, reference
from megarl.ops.logprob import linear_logprob_entropy, logprob_entropy
from megarl.ops.policy_head import policy_head

Figures = dict[str, float | int | str]


def bench_logits(num_tokens: int, vocab: int) -> Figures:
    """Op 1: fp32 logits in, their gradient out."""
    where = device.device()
    targets = torch.randint(0, vocab, (num_tokens,), device=where)
    grads = torch.randn(2, num_tokens, device=where).unbind(0)
    fresh = torch.randn(num_tokens, vocab, device=where) * 3
    logits = fresh.clone().requires_grad_()

    def ours(overwrite: bool) -> Tensor:
        scores = logprob_entropy(
            logits, targets, temperature=1.0, vocab_start=0, vocab_size=vocab, overwrite_logits=overwrite
        )
        return torch.autograd.grad(scores, logits, grads)[0]

    def plain() -> Tensor:
        return torch.autograd.grad(reference.logprob_entropy(logits, targets, 1.0), logits, grads)[0]

    def selective() -> Tensor:  # log-prob only, as TRL computes it for fp32 logits
        chosen = logits.gather(1, targets[:, None]).squeeze(1)
        lse = torch.stack([torch.logsumexp(row, -1) for row in logits])
        return torch.autograd.grad(chosen - lse, logits, grads[0])[0]

    rivals: dict[str, Callable[[], object]] = {
        "in_place": functools.partial(ours, True),
        "out_of_place": functools.partial(ours, False),
        "plain": plain,
        "selective": selective,
        "megatron": build_megatron_cross_entropy(logits, targets, grads[0]),
    }
    peaks: dict[str, int] = {}
    for name, call in rivals.items():
        with torch.no_grad():
            logits.copy_(fresh)
        call()
        peaks[name] = measure_peak_bytes(call)
    with torch.no_grad():
        logits.copy_(fresh)
    del fresh
    times = time_in_turns(rivals, rounds=3)
    figures: Figures = {
        "logits_speedup": times["plain"] / times["in_place"],
        "logits_extra_peak_ratio": peaks["in_place"] / peaks["plain"],
        "logits_speedup_out_of_place": times["plain"] / times["out_of_place"],
        "logits_extra_peak_ratio_out_of_place": peaks["out_of_place"] / peaks["plain"],
    }
    for name in rivals:
        figures[f"logits_{name}_ms"] = times[name] * 1e3
        figures[f"logits_{name}_extra_peak_mib"] = peaks[name] / MIB
    return figures


def build_megatron_cross_entropy(logits: Tensor, targets: Tensor, grad: Tensor) -> Callable[[], object]:
    """Megatron's vocabulary-parallel cross entropy on one rank: log-prob only, and it overwrites fp32 logits."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    with device.megatron_build_scope():
        parallel_state.initialize_model_parallel()  # it finds its ranks there

    def run() -> object:
        with device.megatron_scope():
            loss = vocab_parallel_cross_entropy(logits[None].clone(), targets[None])
            return torch.autograd.grad(loss, logits, -grad[None])

    return run


def make_token_loss(num_tokens: int) -> Callable[[Tensor, Tensor, slice], tuple[Tensor, Mapping[str, Tensor]]]:
    """PPO with an entropy bonus over random advantages."""
    where = device.device()
    noise, advantages = torch.randn(2, num_tokens, device=where).unbind(0)
    weights = torch.full((num_tokens,), 1.0 / num_tokens, device=where)
    mask = torch.ones(num_tokens, dtype=torch.bool, device=where)

    def token_loss(logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
        return policy_objective(
            logprobs,
            entropy,
            logprobs.detach() + 0.1 * noise[part],
            advantages[part],
            weights[part],
            mask[part],
            clip_low=0.2,
            clip_high=0.2,
            clip_c=3.0,
            entropy_coeff=0.01,
        )

    return token_loss


def bench_linear(num_tokens: int, vocab: int, width: int, dtype: torch.dtype) -> Figures:
    """Op 2: hidden states in, their gradient and the weight's out."""
    where = device.device()
    hidden = torch.randn(num_tokens, width, device=where).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=where) * width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (num_tokens,), device=where)
    main_grad = torch.zeros(vocab, width, device=where)
    token_loss = make_token_loss(num_tokens)
    everything = slice(0, num_tokens)

    def one_pass(count: int = num_tokens) -> object:
        loss, _ = policy_head(
            hidden[:count],
            weight,
            targets[:count],
            token_loss,
            temperature=1.0,
            vocab_start=0,
            vocab_size=vocab,
            main_grad=main_grad,
        )
        return torch.autograd.grad(loss, hidden)

    def recomputing() -> object:
        scores = linear_logprob_entropy(hidden, weight, targets, temperature=1.0, vocab_start=0, vocab_size=vocab)
        grad_hidden, grad_weight = torch.autograd.grad(token_loss(*scores, everything)[0], (hidden, weight))
        main_grad.add_(grad_weight)
        return grad_hidden

    def autograd() -> object:
        logits = torch.mm(hidden, weight.t()).float()
        log_p = torch.log_softmax(logits, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
        grad_hidden, grad_weight = torch.autograd.grad(token_loss(logprobs, entropy, everything)[0], (hidden, weight))
        main_grad.add_(grad_weight)
        return grad_hidden

    own_bytes = hidden.numel() * hidden.element_size()  # the gradient of the hidden states is a result, not an extra
    one_pass()
    autograd()
    peaks = {count: measure_peak_bytes(functools.partial(one_pass, count)) for count in (num_tokens // 2, num_tokens)}
    autograd_peak = measure_peak_bytes(autograd)
    logits = torch.empty(num_tokens, vocab, dtype=dtype, device=where)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    @torch.no_grad()
    def products() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        torch.mm(logits.t(), hidden, out=grad_weight)

    rivals: dict[str, Callable[[], object]] = {
        "one_pass": one_pass,
        "products": products,
        "recomputing": recomputing,
        "autograd": autograd,
    }
    liger = build_liger(hidden, weight, targets)
    if liger is not None:
        rivals["liger"] = liger
    times = time_in_turns(rivals, rounds=5)
    flops = 6 * num_tokens * vocab * width
    figures: Figures = {
        "linear_time_over_matmuls": times["one_pass"] / times["products"],
        "linear_extra_peak_mib": (peaks[num_tokens] - own_bytes) / MIB,
        "linear_extra_peak_mib_half_the_tokens": (peaks[num_tokens // 2] - own_bytes) / MIB,
        "linear_speedup_over_autograd": times["autograd"] / times["one_pass"],
        "linear_extra_peak_share_of_autograd": (peaks[num_tokens] - own_bytes) / (autograd_peak - own_bytes),
        "linear_autograd_extra_peak_mib": (autograd_peak - own_bytes) / MIB,
        "linear_dtype": str(dtype).removeprefix("torch."),
        "linear_products_gflops": flops / times["products"] / 1e9,
        "linear_one_pass_gflops": flops / times["one_pass"] / 1e9,
    }
    return figures | {f"linear_{name}_ms": seconds * 1e3 for name, seconds in times.items()}


def build_liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], object] | None:
    """Liger's chunked GRPO head (no entropy bonus, one rank), 256 tokens a chunk; where `liger-kernel` is installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        print("liger-kernel is not installed: left out")
        return None
    chunked_loss = importlib.import_module("liger_kernel.chunked_loss")
    head = chunked_loss.LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, chunk_size=4, loss_type="bnpo"
    )
    rows = hidden.detach().view(-1, 64, hidden.shape[1]).requires_grad_()
    mask, advantages = torch.ones_like(targets).view(-1, 64), torch.randn(rows.shape[0], device=hidden.device)

    def run() -> object:
        loss = head(rows, weight, targets.view(-1, 64), mask, advantages)[0]
        return torch.autograd.grad(loss, (rows, weight))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(num_threads())
    print(dispatch.choose_implementation(require_extension=True))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    figures: Figures = {"tokens": arguments.tokens, "vocab": arguments.vocab, "hidden": arguments.hidden}
    figures |= bench_linear(arguments.tokens, arguments.vocab, arguments.hidden, device.pick_dtype(arguments.dtype))
    gc.collect()
    figures |= bench_logits(arguments.tokens, arguments.vocab)
    report("logprob", {**figures, "threads": torch.get_num_threads()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
