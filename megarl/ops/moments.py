"""Mean and variance of policy tokens, over one rank or several, and whitening with them.

rank 0: x, mask ──masked_moments──> (count, mean, M2) ─┐
rank 1: x, mask ──masked_moments──> (count, mean, M2) ─┴─ one all-reduce of [ranks, 3] ── join ──> whiten
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops import dispatch, reference_segments


@functools.cache
def _kernels() -> Any:
    """Where `masked_moments` and `whiten` are found."""
    if not dispatch.has_extension():
        return reference_segments
    torch.library.register_fake("megarl::masked_moments", _fake_moments)
    torch.library.register_fake("megarl::whiten", _fake_whiten)
    return torch.ops.megarl


def _fake_moments(x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty(3, dtype=torch.float64)


def _fake_whiten(x: Tensor, mask: Tensor, moments: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.no_grad()
def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, mean and sum of squared distances from the mean, in one pass.

    Args:
        x: [T] float; what it holds outside the mask has no effect.
        mask: [T] bool.

    Returns:
        [3] fp64 on the device of `x`; zeros for an empty mask.
    """
    return _kernels().masked_moments(_wide(x), mask.contiguous())


def join_moments(moments: Tensor) -> Tensor:
    """The moments of the union of several groups (Chan et al. 1983).

    Args:
        moments: [G, 3] fp64, rows as `masked_moments` returns them; groups with count 0 have no effect.

    Returns:
        [3] fp64.
    """
    counts, means, m2s = moments.unbind(1)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return torch.stack([count, mean, m2s.sum() + (counts * (means - mean).square()).sum()])


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None, eps: float = 1e-8) -> Tensor:
    """Shifts and scales policy tokens to mean 0 and (unbiased) variance 1.

    Args:
        x: [T] float, not modified; the tokens of this rank.
        mask: [T] bool.
        group: ranks that each hold other tokens of the same batch; all of them must call, also with nothing under
            the mask. One all-reduce of 24 bytes a rank.
        eps: added to the variance.

    Returns:
        [T] fp32 (fp64 for fp64 input), 0 outside the mask. Fewer than two policy tokens in all have no variance: all 0.
    """
    x, mask = _wide(x), mask.contiguous()
    moments = masked_moments(x, mask)
    if group is not None and group.size() > 1:
        everyone = moments.new_zeros(group.size(), 3)
        everyone[group.rank()] = moments
        dist.all_reduce(everyone, group=group)
        moments = join_moments(everyone)
    return _kernels().whiten(x, mask, moments, eps)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
