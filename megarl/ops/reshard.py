"""Many strided copies between live tensors in one call, as a plan says.

A plan is an int64 tensor [N, 8] on the host, one segment a row, everything counted in elements:

    src  src_offset  src_stride  dst  dst_offset  dst_stride  rows  width
    0    0           8           1    4           4           3     4

copies `rows` rows of `width` elements: row i begins at element src_offset + i * src_stride of srcs[src] and goes to
element dst_offset + i * dst_stride of dsts[dst], both tensors read as flat. Here the left half of three rows of 8 fills
elements 4..15 of dsts[1]. A plan is made once and run often:

    check_disjoint(dsts, plan)                   # once: no element is written twice
    device_plan = place_plan(plan, device)       # once: None on a CPU
    copy_segments(srcs, dsts, plan, device_plan)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.ops import dispatch, reference_segments

COLUMNS = ("src", "src_offset", "src_stride", "dst", "dst_offset", "dst_stride", "rows", "width")
TILE_ELEMENTS = 8192  # what one block of the CUDA kernel copies; kTileElements in csrc/segments.h


@functools.cache
def _kernel() -> Any | None:
    """The extension's op, or None for plain torch."""
    if not dispatch.has_extension():
        return None
    torch.library.register_fake("megarl::copy_segments", _fake)
    return torch.ops.megarl.copy_segments


def _fake(*args: Any) -> None:
    return None


def build_plan(segments: Iterable[Sequence[int]]) -> Tensor:
    """[N, 8] int64 from rows of `COLUMNS`."""
    return torch.tensor([tuple(segment) for segment in segments], dtype=torch.int64).view(-1, len(COLUMNS))


def place_plan(plan: Tensor, device: torch.device) -> Tensor | None:
    """The plan as the kernel on `device` reads it, with the number of tiles before each segment; None for a CPU."""
    if device.type == "cpu":
        return None
    tiles = (plan[:, 6] * plan[:, 7] + TILE_ELEMENTS - 1) // TILE_ELEMENTS
    return torch.cat([plan, (tiles.cumsum(0) - tiles)[:, None]], dim=1).to(device)


@torch.no_grad()
def copy_segments(
    srcs: Sequence[Tensor], dsts: Sequence[Tensor], plan: Tensor, device_plan: Tensor | None = None
) -> None:
    """Runs a plan: many segments, one launch.

    Args:
        srcs: contiguous tensors of any shape, not modified.
        dsts: contiguous tensors of any shape on the same device, written where the plan says. None of them may share
            memory with a source.
        plan: [N, 8] int64 on the host. Segments must not write the same element: `check_disjoint` shows it.
        device_plan: what `place_plan` made of this plan, to save its upload; GPU only.

    A segment may go from fp32 to bf16 (rounded to nearest even) or from bf16 to fp32; any dtype may go to itself.

    Raises:
        RuntimeError: a segment reaches outside a tensor, its own rows overlap, or its dtypes do not fit. Nothing has
            been written then.
    """
    kernel = _kernel()
    if kernel is None:
        reference_segments.copy_segments(srcs, dsts, plan)
        return
    kernel(srcs, dsts, plan, device_plan)
    torch.autograd.graph.increment_version([dst for dst in dsts if not dst.is_inference()])


def check_disjoint(dsts: Sequence[Tensor], plan: Tensor) -> None:
    """Raises ValueError naming two segments that write the same byte. Exact, also for columns that interleave.

    Args:
        dsts: the destinations of `copy_segments`; views of one buffer are seen as the same memory.
        plan: [N, 8] int64.
    """
    pieces: list[tuple[int, int, int, int, int]] = []  # first byte, stride, rows, width in bytes, index
    for index, (_, _, _, dst, offset, stride, rows, width) in enumerate(plan.tolist()):
        if rows and width:
            size = dsts[dst].element_size()
            first = dsts[dst].data_ptr() + offset * size
            is_one_piece = stride == width or rows == 1
            pieces.append(
                (first, 0, 1, rows * width * size, index)
                if is_one_piece
                else (first, stride * size, rows, width * size, index)
            )
    pieces.sort()
    active: list[tuple[int, int, int, int, int]] = []
    for piece in pieces:
        active = [other for other in active if other[0] + (other[2] - 1) * other[1] + other[3] > piece[0]]
        for other in active:
            if _do_meet(other, piece):
                tensor = int(plan[piece[4], 3])
                first, second = sorted((other[4], piece[4]))
                raise ValueError(f"segments {first} and {second} of the plan write the same bytes of dsts[{tensor}]")
        active.append(piece)


def _do_meet(one: tuple[int, int, int, int, int], other: tuple[int, int, int, int, int]) -> bool:
    """True when two sets of rows (first byte, stride, rows, width, index) share a byte."""
    if one[2] > other[2]:
        one, other = other, one
    if one[1] == other[1] and one[1]:  # equal strides: the rows of both lie on one grid, at most two rows apart
        shift, inside = divmod(other[0] - one[0], one[1])
        return (inside < one[3] and -other[2] < shift < one[2]) or (
            inside + other[3] > one[1] and -other[2] < shift + 1 < one[2]
        )
    first, stride, rows, width, _ = other
    for row in range(one[2]):
        begin = one[0] + row * one[1]
        end = begin + one[3]
        if stride == 0:
            if begin < first + width and first < end:
                return True
            continue
        nearest = max(0, -((first + width - 1 - begin) // stride))  # the first row of `other` that ends after `begin`
        if nearest < rows and first + nearest * stride < end:
            return True
    return False
