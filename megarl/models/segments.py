"""Packed sequences inside the model: attention of each segment to itself only, without padding outside of it.

`plan_segments` looks once per micro-batch at the sequences and decides how attention batches them: those of like
length are laid side by side in a [b, L] block, attention runs causally in each block, and only real tokens are read
back. Fill-up cells come after the real ones, so causality alone keeps them from being seen.

    lengths 5 4 12 11   ->   block [2, 12] for 12 11,   block [2, 5] for 5 4

Answers to one prompt share its tokens: the packed tensor holds the prompt once, and only attention lays it out again
for each answer. Everything else of the model, most of the work, runs on each distinct token once:

    packed    p p p p a a b b b      two answers to one prompt
    block     p p p p a a .          one row an answer; results are read back where the row is the token's own
              p p p p b b b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

DENSE = 512  # up to this length a CPU computes all scores at once: 5 times faster than torch's blockwise backward
SHORT = 128  # segments up to this length always share a block: the cost is in the launch, not in the fill-up


@dataclass(frozen=True)
class Block:
    """Segments that attention handles as one batch.

    `index` [b * L] int64: the packed position that each cell of the block reads; `cells` [n] int64: the cells that
    hold real tokens; `tokens` [n] int64: their packed positions. All None when the block is the packed tensor itself.
    """

    num_segments: int
    length: int
    index: Tensor | None
    cells: Tensor | None
    tokens: Tensor | None


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's description of packed sequences with the attention plan added.

    `qkv_format` is "segments" for the attention of this file, which keeps Megatron from treating the tensors as THD,
    and "thd" for Transformer Engine.
    """

    blocks: tuple[Block, ...] = field(default=())


@dataclass(frozen=True)
class Span:
    """One sequence as attention sees it: `prefix` (packed positions it shares with a sequence that came before, may be
    empty), then `own` (packed positions that only it holds). Attention gives results for `own`."""

    prefix: range
    own: range

    @property
    def length(self) -> int:
        return len(self.prefix) + len(self.own)


def plan_segments(spans: Sequence[Span], num_tokens: int, device: torch.device) -> tuple[Block, ...]:
    """Groups sequences into blocks of like length (at least half of the block's longest).

    Args:
        spans: every packed position lies in exactly one `own`; spans without `own` are ignored.
        num_tokens: packed positions.
    """
    order = sorted((span for span in spans if span.own), key=lambda span: (-span.length, span.own.start))
    blocks: list[Block] = []
    begin = 0
    while begin < len(order):
        longest = order[begin].length
        end = begin
        while end < len(order) and (longest <= SHORT or 2 * order[end].length >= longest):
            end += 1
        blocks.append(_build_block(sorted(order[begin:end], key=lambda span: span.own.start), num_tokens, device))
        begin = end
    return tuple(blocks)


def _build_block(spans: list[Span], num_tokens: int, device: torch.device) -> Block:
    longest = max(span.length for span in spans)
    if len(spans) * longest == num_tokens and not any(span.prefix for span in spans):
        return Block(len(spans), longest, None, None, None)  # every token, in order, without fill-up
    prefix = torch.tensor([len(span.prefix) for span in spans])[:, None]
    length = torch.tensor([span.length for span in spans])[:, None]
    prefix_start = torch.tensor([span.prefix.start for span in spans])[:, None]
    own_start = torch.tensor([span.own.start for span in spans])[:, None]
    column = torch.arange(longest)
    index = torch.where(column < prefix, prefix_start + column, own_start + column - prefix)
    index = torch.where(column < length, index, own_start).flatten()
    cells = ((column >= prefix) & (column < length)).flatten().nonzero().flatten()
    return Block(len(spans), longest, index.to(device), cells.to(device), index[cells].to(device))


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float) -> Tensor:
    """Causal attention of every segment to itself.

    Args:
        query: [T, N, D]; key, value: [T, G, D] with G dividing N.
        scale: factor on the scores.

    Returns:
        [T, N, D]; rows that no block covers are zero.
    """
    if key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    outputs: list[tuple[Block, Tensor]] = []
    for block in blocks:
        shape = (block.num_segments, block.length, query.shape[1], query.shape[2])
        parts = (query, key, value) if block.index is None else tuple(x[block.index] for x in (query, key, value))
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in parts)
        if query.is_cuda or block.length > DENSE:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            mixed = _DenseAttention.apply(q, k, v, scale)
        outputs.append((block, mixed.transpose(1, 2).reshape(-1, *shape[2:])))
    if len(outputs) == 1 and outputs[0][0].index is None:
        return outputs[0][1]
    tokens = torch.cat([block.tokens for block, _ in outputs if block.tokens is not None])
    mixed = torch.cat([output[block.cells] for block, output in outputs])
    return torch.zeros_like(query).index_copy(0, tokens, mixed)


class _DenseAttention(torch.autograd.Function):
    """Causal attention that keeps the probabilities: softmax(scale · q kᵀ) v over [b, N, L, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        length = query.shape[2]
        future = query.new_full((length, length), -torch.inf, dtype=torch.float32).triu_(1)
        scores = torch.matmul(query, key.transpose(-1, -2)).float().mul_(scale).add_(future)
        probs = scores.softmax(-1).to(query.dtype)
        ctx.save_for_backward(query, key, value, probs)
        ctx.scale = scale
        return torch.matmul(probs, value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, probs = ctx.saved_tensors
        grad_value = torch.matmul(probs.transpose(-1, -2), grad)
        grad_probs = torch.matmul(grad, value.transpose(-1, -2)).float()
        grad_scores = grad_probs.sub_((grad_probs * probs).sum(-1, keepdim=True)).mul_(probs).mul_(ctx.scale)
        grad_scores = grad_scores.to(query.dtype)
        return torch.matmul(grad_scores, key), torch.matmul(grad_scores.transpose(-1, -2), query), grad_value, None
