"""Root-mean-square norm as one operation with its own backward.

Written with separate tensor operations, a norm on a CPU costs as much as a matrix product: every intermediate is a trip
through main memory, and several are kept for the backward. Here the rows are worked off in blocks that stay in the
cache, statistics are fp32, and only the input and one number a row are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 16  # of fp32: a quarter of a mebibyte, a few of them fit a core's second-level cache


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019).

    Args:
        x: [..., H], not modified; weight: [H]. Statistics are fp32 (fp64 for fp64 input).

    Returns:
        The shape and dtype of `x`; rounded to that dtype before the weight, as transformers does.
    """
    return _RMSNorm.apply(x, weight, eps)


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of the first dimension: all of it on a GPU, pieces that fit the cache on a CPU."""
    count, width = rows.shape
    step = max(1, count) if rows.is_cuda else max(1, BLOCK_ELEMENTS // width)
    for begin in range(0, count, step):
        yield slice(begin, begin + step)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        wide_dtype = torch.promote_types(x.dtype, torch.float32)
        normed = torch.empty_like(rows)
        scale = rows.new_empty(rows.shape[0], 1, dtype=wide_dtype)
        for part in _blocks(rows):
            wide = rows[part].to(wide_dtype)
            scale[part] = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            normed[part] = wide * scale[part]
            normed[part] *= weight
        ctx.save_for_backward(rows, weight, scale)
        return normed.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        grad = grads[0].reshape(rows.shape)
        grad_x = torch.empty_like(rows)
        grad_weight = torch.zeros_like(weight, dtype=scale.dtype)
        wide_weight = weight.to(scale.dtype)
        for part in _blocks(rows):
            normed = rows[part] * scale[part]
            wide = grad[part].to(scale.dtype)
            grad_weight += (wide * normed).sum(0)
            wide = wide * wide_weight
            inner = (wide * normed).mean(-1, keepdim=True)
            grad_x[part] = wide.sub_(normed.mul_(inner)).mul_(scale[part])
        return grad_x.view(grads[0].shape), grad_weight.to(weight.dtype), None
