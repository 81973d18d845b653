"""Packed sequences inside the model: attention of each segment to itself only, without padding outside of it.

`plan_segments` looks once per micro-batch at the segment lengths and decides how attention batches them: segments of
like length are laid side by side in a [b, L] block, attention runs causally in each block, and only real tokens are
read back. Fill-up positions come after the real ones, so causality alone keeps them from being seen.

    lengths 5 4 12 11   ->   block [2, 12] for 12 11,   block [2, 5] for 5 4
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


def plan_segments(lengths: Sequence[int], device: torch.device) -> tuple[Block, ...]:
    """Groups segments into blocks of like length (at least half of the block's longest).

    Args:
        lengths: tokens of each segment, in packed order; zero-length segments are allowed and ignored.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: (-lengths[row], row))
    blocks: list[Block] = []
    begin = 0
    while begin < len(order):
        longest = lengths[order[begin]]
        end = begin
        while end < len(order) and (longest <= SHORT or 2 * lengths[order[end]] >= longest):
            end += 1
        blocks.append(_build_block(sorted(order[begin:end]), lengths, starts, longest, device))
        begin = end
    return tuple(blocks)


def _build_block(
    rows: list[int], lengths: Sequence[int], starts: list[int], longest: int, device: torch.device
) -> Block:
    if len(rows) * longest == starts[-1]:  # every token, in order, without fill-up
        return Block(len(rows), longest, None, None, None)
    start = torch.tensor([starts[row] for row in rows])
    length = torch.tensor([lengths[row] for row in rows])
    column = torch.arange(longest)
    is_real = column < length[:, None]
    index = torch.where(is_real, start[:, None] + column, start[:, None])
    cells = is_real.flatten().nonzero().flatten()
    return Block(len(rows), longest, index.flatten().to(device), cells.to(device), index.flatten()[cells].to(device))


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
