"""Log-probability and entropy of given tokens, from logits or straight from hidden states, over a cut vocabulary.

Each rank reduces its own columns to four numbers a token in one pass (csrc/logprob.h explains them); one small
all-gather joins the ranks; the gradient of the logits is one more pass, in place where allowed:

    logits [T, Vp] ── logprob_stats ──> [4, T] ── join ──> log-probs, entropies [T]
    logits, joined [3, T], gradients [T] ── logprob_grad ──> gradient of the logits [T, Vp]

From hidden states the logits exist for one chunk of tokens only, in the dtype of the matrix product, and are computed
again in the backward pass: 8·T·V·H floating-point operations. `policy_head.py` needs only 6.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.ops import dispatch, reference

IGNORE_INDEX = -100
CHUNK_BYTES = 56 << 20  # what a chunk of tokens may hold: logits, and a few rows of hidden states
MIN_CHUNK_TOKENS = 16
TILE_ELEMENTS = 1 << 19  # of a narrow weight gradient, made before they are added: 1 MiB fits a second-level cache


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary this rank holds: ids `start`, `start + 1`, ...

    Attributes:
        start: the id of the first column.
        size: ids at or beyond it are padding and take no mass.
        group: the ranks that share the vocabulary, all of which call; None = this one has all of it.
        ignore_index: this target gives log-prob and entropy 0 and no gradient, whatever its row holds.
    """

    start: int
    size: int
    group: dist.ProcessGroup | None = None
    ignore_index: int = IGNORE_INDEX

    @property
    def num_ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


class Joined(NamedTuple):
    """logprobs [T], entropy [T]; state [3, T]: what `write_logits_grad_` needs of them."""

    logprobs: Tensor
    entropy: Tensor
    state: Tensor


def logprob_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
    ignore_index: int = IGNORE_INDEX,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies, differentiable in `logits`.

    Args:
        logits: [T, Vp] fp32, bf16, fp16 or fp64, this rank's columns; a row's lie side by side. T may be 0.
        targets: [T] int64, ids of the whole vocabulary; one outside it gives NaN.
        temperature: logits are divided by it: a number, or [T], one for each token. Above 0.
        vocab_start: the id of this rank's first column.
        vocab_size: ids at or beyond it are padding and take no mass.
        tp_group: the ranks that share the vocabulary; all of them must call. None = this rank has all of it.
        ignore_index: a target with this value gives 0, 0 and no gradient.
        overwrite_logits: the backward pass may write the gradient over the logits (nobody reads them afterwards).

    Returns:
        logprobs [T], entropy [T], fp32 (fp64 for fp64 logits), the same on every rank.
    """
    shard = VocabShard(vocab_start, vocab_size, tp_group, ignore_index)
    return _LogprobEntropy.apply(logits, targets, make_temperature(temperature, logits), shard, overwrite_logits)


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
    ignore_index: int = IGNORE_INDEX,
    bias: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`logprob_entropy` of hidden @ weightᵀ + bias, differentiable in all three, without a [K, Vp] tensor.

    Args:
        hidden: [K, H], the same on every rank of `tp_group`; K may be 0.
        weight: [Vp, H], this rank's rows of the output projection; bias: [Vp].
        chunk_tokens: tokens projected at a time; by default as many as fit `CHUNK_BYTES`.
        targets, temperature, vocab_start, vocab_size, tp_group, ignore_index: as for `logprob_entropy`.

    Returns:
        logprobs [K], entropy [K], fp32 (fp64 for fp64 input), the same on every rank.
    """
    shard = VocabShard(vocab_start, vocab_size, tp_group, ignore_index)
    temperatures = make_temperature(temperature, hidden)
    return _LinearLogprobEntropy.apply(hidden, weight, bias, targets, temperatures, shard, chunk_tokens)


@functools.cache
def _kernels() -> Any:
    """Where `logprob_stats`, `logprob_grad`, `logprob_grad_` and `add_transposed_` are found."""
    if not dispatch.has_extension():
        return reference
    torch.library.register_fake("megarl::logprob_stats", _fake_stats)
    torch.library.register_fake("megarl::logprob_grad", _fake_in_place)
    torch.library.register_fake("megarl::logprob_grad_", _fake_in_place)
    torch.library.register_fake("megarl::add_transposed_", _fake_in_place)
    return torch.ops.megarl


def _fake_stats(logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(4, logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


def _fake_in_place(*args: Any) -> None:
    return None


def make_temperature(temperature: float | Tensor, like: Tensor) -> Tensor:
    """[1] or [T] fp32 (fp64 for fp64 `like`) on the device of `like`."""
    wide = torch.promote_types(like.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        return temperature.to(like.device, wide).reshape(-1).contiguous()
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0: logits are divided by it")
    return torch.full((1,), temperature, dtype=wide, device=like.device)


def compute_stats(logits: Tensor, targets: Tensor, temperature: Tensor, shard: VocabShard) -> Tensor:
    """[4, T]: what this rank's columns say of each token."""
    return _kernels().logprob_stats(logits, targets, temperature, shard.start, shard.size, shard.ignore_index)


def join_stats(stats: Tensor, targets: Tensor, temperature: Tensor, shard: VocabShard) -> Joined:
    """Joins the ranks of the vocabulary, in the same order on each, so that all get the same bits. A collective."""
    if shard.num_ranks > 1 and targets.numel():
        gathered = stats.new_empty(shard.num_ranks * stats.shape[0], stats.shape[1])
        dist.all_gather_into_tensor(gathered, stats, group=shard.group)
        parts = gathered.view(shard.num_ranks, *stats.shape)
    else:
        parts = stats[None]
    top = parts[:, 0].amax(0)
    shift = ((parts[:, 0] - top) / temperature).clamp_(min=-1000.0)  # exp of it is 0 long before
    shrink = shift.exp()
    total = (shrink * parts[:, 1]).sum(0)
    log_sum = total.log()
    entropy = log_sum - (shrink * (parts[:, 3] + shift * parts[:, 1])).sum(0) / total
    logprobs = (parts[:, 2].sum(0) - top) / temperature - log_sum
    is_kept = targets != shard.ignore_index
    state = torch.stack((top, total, entropy))
    return Joined(torch.where(is_kept, logprobs, 0.0), torch.where(is_kept, entropy, 0.0), state)


def write_logits_grad_(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    state: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    shard: VocabShard,
) -> None:
    """Writes the gradient of the logits [T, Vp] over them."""
    _kernels().logprob_grad_(
        logits, targets, temperature, state, grad_logprobs, grad_entropy, shard.start, shard.size, shard.ignore_index
    )


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, shard: VocabShard, overwrite_logits: bool
    ) -> tuple[Tensor, Tensor]:
        if logits.shape[1] > 1 and logits.stride(1) != 1:
            logits, overwrite_logits = logits.contiguous(), False
        targets = targets.contiguous()
        joined = join_stats(compute_stats(logits, targets, temperature, shard), targets, temperature, shard)
        ctx.save_for_backward(logits, targets, temperature, joined.state)
        ctx.options = shard, overwrite_logits
        return joined.logprobs, joined.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, temperature, state = ctx.saved_tensors
        shard, overwrite_logits = ctx.options
        grad_logprobs, grad_entropy = (grad.contiguous() for grad in grads)
        if overwrite_logits:
            write_logits_grad_(logits, targets, temperature, state, grad_logprobs, grad_entropy, shard)
            return logits, None, None, None, None
        out = torch.empty_like(logits)
        _kernels().logprob_grad(
            logits,
            targets,
            temperature,
            state,
            grad_logprobs,
            grad_entropy,
            shard.start,
            shard.size,
            shard.ignore_index,
            out,
        )
        return out, None, None, None, None


class Projection:
    """Logits of one chunk of tokens after the other, in a buffer that lives as long as this object."""

    def __init__(self, weight: Tensor, bias: Tensor | None, num_tokens: int, chunk_tokens: int | None) -> None:
        self.weight, self.bias, self.num_tokens = weight, bias, num_tokens
        self.chunk_tokens = _plan_chunk(weight, num_tokens) if chunk_tokens is None else chunk_tokens
        self.buffer = weight.new_empty(min(self.chunk_tokens, num_tokens), weight.shape[0])

    def chunks(self) -> Iterator[slice]:
        for begin in range(0, self.num_tokens, self.chunk_tokens):
            yield slice(begin, min(begin + self.chunk_tokens, self.num_tokens))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[C, Vp] in the dtype of the weight, until the next call."""
        out = self.buffer[: hidden.shape[0]]
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)


def _plan_chunk(weight: Tensor, num_tokens: int) -> int:
    """Tokens of a chunk: within `CHUNK_BYTES`, and the chunks of about one size."""
    token_bytes = (weight.shape[0] + 3 * weight.shape[1]) * weight.element_size()
    most = max(MIN_CHUNK_TOKENS, CHUNK_BYTES // token_bytes)
    count = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // count))


class WeightGrad:
    """The gradient of weight and bias, added up over chunks in fp32 at least.

    `into` [Vp, H], where given, is what it is added to (Megatron's `main_grad`); without it `finish` returns it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, num_chunks: int, into: Tensor | None) -> None:
        self.dtype, self.is_fresh, self.is_elsewhere = weight.dtype, into is None, into is not None
        wide = torch.promote_types(weight.dtype, torch.float32)
        # One chunk needs no adding up. Otherwise only an fp32 sum keeps what later chunks add.
        self.total = (
            into if into is not None else weight.new_empty(weight.shape, dtype=wide if num_chunks != 1 else None)
        )
        self.bias_total = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
        if num_chunks == 0 and into is None:
            self.total.zero_()

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        if self.bias_total is not None:
            self.bias_total += grad_logits.sum(0, dtype=self.bias_total.dtype)
        if self.total.dtype == grad_logits.dtype:
            if self.is_fresh:
                torch.mm(grad_logits.t(), hidden, out=self.total)
            else:
                self.total.addmm_(grad_logits.t(), hidden)
        else:
            if self.is_fresh:
                self.total.zero_()
            transposed = hidden.t().contiguous()
            rows = max(16, TILE_ELEMENTS // hidden.shape[1])
            for total, columns in zip(self.total.split(rows), grad_logits.split(rows, dim=1), strict=True):
                _kernels().add_transposed_(total, torch.mm(transposed, columns))
        self.is_fresh = False

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients in the dtype of the weight; None for a weight whose gradient lies in `into`."""
        own = None if self.is_elsewhere else self.total.to(self.dtype)
        return own, None if self.bias_total is None else self.bias_total.to(self.dtype)


class _LinearLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        shard: VocabShard,
        chunk_tokens: int | None,
    ) -> tuple[Tensor, Tensor]:
        projection = Projection(weight, bias, targets.numel(), chunk_tokens)
        targets = targets.contiguous()
        stats = hidden.new_empty(4, targets.numel(), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for part in projection.chunks():
            logits = projection.compute_logits(hidden[part])
            stats[:, part] = compute_stats(logits, targets[part], pick(temperature, part), shard)
        joined = join_stats(stats, targets, temperature, shard)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, joined.state)
        ctx.options = shard, chunk_tokens
        return joined.logprobs, joined.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, state = ctx.saved_tensors
        shard, chunk_tokens = ctx.options
        grad_logprobs, grad_entropy = (grad.contiguous() for grad in grads)
        projection = Projection(weight, bias, targets.numel(), chunk_tokens)
        parts = list(projection.chunks())
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        needs_weight = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        grad_weight = WeightGrad(weight, bias, len(parts), None) if needs_weight else None
        for part in parts:
            logits = projection.compute_logits(hidden[part])
            write_logits_grad_(
                logits,
                targets[part],
                pick(temperature, part),
                state[:, part].contiguous(),
                grad_logprobs[part],
                grad_entropy[part],
                shard,
            )
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.add(logits, hidden[part])
        if grad_hidden is not None and shard.num_ranks > 1:
            dist.all_reduce(grad_hidden, group=shard.group)
        weight_grads = (None, None) if grad_weight is None else grad_weight.finish()
        return grad_hidden, *weight_grads, *(None,) * 4


def pick(temperature: Tensor, part: slice) -> Tensor:
    """The temperatures of a chunk."""
    return temperature if temperature.numel() == 1 else temperature[part]
