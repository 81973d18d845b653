"""The policy's loss and its gradients straight from hidden states, each logit computed once.

A policy loss depends on a token's logits only through its log-prob and entropy, so its derivative by these two is
known as soon as the softmax statistics of the token are joined over the vocabulary's ranks. For each chunk of tokens,
in the forward pass:

    hidden ─ mm ─> logits ─ stats, join ─> log-probs, entropies ─ loss_fn ─> loss, d loss / d log-prob, d / d entropy
                     └─────────────── gradient, in place ───────────────┘
                     └─ mm ─> gradient of the hidden states        └─ mm ─> gradient of the weight, added up

That is 6·K·V·H floating-point operations, where kernels that compute the logits again need 8, and one chunk of logits
whatever K. The backward pass only hands the gradients out.

A loss that looks at several tokens together (GSPO: the ratio of a whole sequence) cannot be known from one chunk. With
`whole=True` a first pass finds all log-probs and entropies, `loss_fn` sees them together, and a second pass computes
the logits again: 8·K·V·H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.ops.logprob import (
    IGNORE_INDEX,
    Joined,
    Projection,
    VocabShard,
    WeightGrad,
    compute_stats,
    join_stats,
    make_temperature,
    pick,
    write_logits_grad_,
)

# (logprobs [C], entropy [C], which of the K tokens these are) -> the sum of the tokens' losses, and statistics that
# are sums over tokens too. Differentiable in the first two; the same on every rank of the vocabulary.
TokenLoss = Callable[[Tensor, Tensor, slice], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class _Call:
    """The arguments of `policy_head` that are no tensors with a gradient; `stats` is filled by the forward pass."""

    targets: Tensor
    rows: Tensor | None
    temperature: Tensor
    shard: VocabShard
    loss_fn: TokenLoss
    sequence_parallel: bool
    main_grad: Tensor | None
    whole: bool
    chunk_tokens: int | None
    needs_grad: bool
    stats: dict[str, Tensor]


def policy_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: TokenLoss,
    *,
    temperature: float | Tensor,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
    rows: Tensor | None = None,
    sequence_parallel: bool = False,
    ignore_index: int = IGNORE_INDEX,
    bias: Tensor | None = None,
    main_grad: Tensor | None = None,
    whole: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of `loss_fn` over K tokens; its backward pass gives the gradients that this call has computed already.

    Args:
        hidden: [S, H], not modified; with `sequence_parallel` this rank's S of the S·tp rows, else the same everywhere.
        weight: [Vp, H], this rank's rows of the output projection.
        targets: [K] int64, ids of the whole vocabulary.
        loss_fn: see `TokenLoss`; called once for each chunk, in order, and for a chunk of none when K is 0.
        rows: [K] int64, which of all rows each token's logits come from, repeats allowed; None = K is S, in order.
        main_grad: [Vp, H] fp32; given = the gradient of the weight is added to it during this call (not when the
            weight needs none) and autograd gets none. The loss must then be differentiated with gradient 1.
        whole: `loss_fn` needs all tokens at once and is called once.
        temperature, vocab_start, vocab_size, tp_group, ignore_index, bias, chunk_tokens: see
            `logprob.linear_logprob_entropy`.

    Returns:
        loss: scalar fp32 (fp64 for fp64 input), differentiable in `hidden`, `weight` and `bias`.
        stats: the sums of the statistics, detached.
    """
    assert not sequence_parallel or rows is not None, "sequence_parallel needs rows"
    call = _Call(
        targets=targets.contiguous(),
        rows=rows,
        temperature=make_temperature(temperature, hidden),
        shard=VocabShard(vocab_start, vocab_size, tp_group, ignore_index),
        loss_fn=loss_fn,
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
        whole=whole,
        chunk_tokens=chunk_tokens,
        needs_grad=torch.is_grad_enabled(),
        stats={},
    )
    loss: Tensor = _PolicyHead.apply(hidden, weight, bias, call)  # type: ignore[assignment]
    return loss, call.stats


class _PolicyHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        needs_hidden, needs_weight, needs_bias = (call.needs_grad and need for need in ctx.needs_input_grad[:3])
        projection = Projection(weight, bias, call.targets.numel(), call.chunk_tokens)
        parts = list(projection.chunks())
        grad_hidden = None
        if needs_hidden:  # every row is written once where there are no `rows`; with them, added to
            grad_hidden = torch.empty_like(hidden) if call.rows is None else torch.zeros_like(hidden)
        grad_weight = None
        if needs_weight or needs_bias:
            grad_weight = WeightGrad(weight, bias, len(parts), call.main_grad if needs_weight else None)
        losses = _losses_of_whole(hidden, projection, parts, call) if call.whole else None
        loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for part in parts or [slice(0, 0)]:
            chunk = _read(hidden, part, call)
            logits = projection.compute_logits(chunk)
            if losses is None:
                stats = compute_stats(logits, call.targets[part], pick(call.temperature, part), call.shard)
                joined = join_stats(stats, call.targets[part], pick(call.temperature, part), call.shard)
                state, derived = joined.state, _derive(joined, part, call)
            else:
                state, derived = losses.state[:, part].contiguous(), losses.narrow(part)
            loss += derived.loss
            if grad_hidden is None and grad_weight is None:
                continue
            write_logits_grad_(
                logits,
                call.targets[part],
                pick(call.temperature, part),
                state,
                derived.grad_logprobs,
                derived.grad_entropy,
                call.shard,
            )
            if grad_hidden is not None:
                _write(grad_hidden, logits, weight, part, call)
            if grad_weight is not None:
                grad_weight.add(logits, chunk)
        weight_grads = (None, None) if grad_weight is None else grad_weight.finish()
        ctx.grads = grad_hidden, *weight_grads  # handed out once and let go: saved tensors would be copied
        ctx.adds_to_main_grad = needs_weight and call.main_grad is not None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        assert ctx.grads is not None, "policy_head holds its gradients for one backward pass, this is the second"
        own, ctx.grads = ctx.grads, None
        if ctx.adds_to_main_grad:
            torch._assert_async((grad == 1).all(), "a loss whose weight gradient went to main_grad was scaled")
        if grad.is_cuda or grad != 1:  # a GPU would have to wait for the answer
            own = tuple(None if each is None else each.mul_(grad.to(each.dtype)) for each in own)
        return *own, None


@dataclass(frozen=True)
class _Derived:
    """The loss of some tokens, and its derivatives [C]; `state` [3, C] where a first pass has found it."""

    loss: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor
    state: Tensor

    def narrow(self, part: slice) -> _Derived:
        """The derivatives of a chunk; the loss counts with the first one."""
        loss = self.loss if part.start == 0 else torch.zeros_like(self.loss)
        return _Derived(loss, self.grad_logprobs[part], self.grad_entropy[part], self.state[:, part])


def _derive(joined: Joined, part: slice, call: _Call) -> _Derived:
    """Asks `loss_fn` for the loss of some tokens and autograd for its derivatives; adds to the statistics."""
    with torch.enable_grad():
        inputs = joined.logprobs.detach().requires_grad_(), joined.entropy.detach().requires_grad_()
        loss, stats = call.loss_fn(*inputs, part)
        grads: tuple[Tensor | None, ...] = (None, None)
        if call.needs_grad and loss.requires_grad:
            grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    for name, value in stats.items():
        value = value.detach()
        call.stats[name] = call.stats[name] + value if name in call.stats else value
    first, second = (torch.zeros_like(joined.logprobs) if grad is None else grad.contiguous() for grad in grads)
    return _Derived(loss.detach(), first, second, joined.state)


def _losses_of_whole(hidden: Tensor, projection: Projection, parts: list[slice], call: _Call) -> _Derived:
    """The first pass for a loss that needs all tokens."""
    num_tokens = call.targets.numel()
    stats = hidden.new_empty(4, num_tokens, dtype=torch.promote_types(hidden.dtype, torch.float32))
    for part in parts:
        logits = projection.compute_logits(_read(hidden, part, call))
        stats[:, part] = compute_stats(logits, call.targets[part], pick(call.temperature, part), call.shard)
    joined = join_stats(stats, call.targets, call.temperature, call.shard)
    return _derive(joined, slice(0, num_tokens), call)


def _find_own(part: slice, hidden: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """Of a chunk's rows, the places among this rank's, and which are this rank's."""
    assert call.rows is not None
    place = call.rows[part] - hidden.shape[0] * dist.get_rank(call.shard.group)
    is_own = (place >= 0) & (place < hidden.shape[0])
    return torch.where(is_own, place, 0), is_own


def _read(hidden: Tensor, part: slice, call: _Call) -> Tensor:
    """[C, H]: the hidden states of a chunk of tokens, on every rank."""
    if call.rows is None:
        return hidden[part]
    if not call.sequence_parallel or call.shard.num_ranks == 1:
        return hidden.index_select(0, call.rows[part])
    place, is_own = _find_own(part, hidden, call)
    chunk = hidden.index_select(0, place).masked_fill_(~is_own[:, None], 0.0)
    dist.all_reduce(chunk, group=call.shard.group)  # one rank has each row, the others add zeros: exact
    return chunk


def _write(grad_hidden: Tensor, grad_logits: Tensor, weight: Tensor, part: slice, call: _Call) -> None:
    """The gradient of a chunk's hidden states, summed over the vocabulary's ranks, to where they came from."""
    if call.rows is None:
        grad = torch.mm(grad_logits, weight, out=grad_hidden[part])
    else:
        grad = torch.mm(grad_logits, weight)
    if call.shard.num_ranks > 1:
        dist.all_reduce(grad, group=call.shard.group)
    if call.rows is None:
        return
    if not call.sequence_parallel or call.shard.num_ranks == 1:
        grad_hidden.index_add_(0, call.rows[part], grad)
        return
    place, is_own = _find_own(part, grad_hidden, call)
    grad_hidden.index_add_(0, place, grad.masked_fill_(~is_own[:, None], 0.0))
