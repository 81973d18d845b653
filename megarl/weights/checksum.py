"""Checksums of weights that can be added up over slices: a sum that shows whether live weights are what was sent.

The checksum of a matrix is the sum over its elements of bits(x[i, j]) · r(i) · c(j), modulo 2**64, where r and c are
pseudo-random odd numbers. Slices of one matrix, each taken with its own offsets, add up to the checksum of the whole,
whatever the cut; a swapped row, a wrong block order or a single flipped bit changes it.

    whole = compute_checksum(weight)                                     # weight: [8, 4]
    whole == add_checksums([compute_checksum(weight[:3]), compute_checksum(weight[3:], row_start=3)])
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20
ROW_KEY, COLUMN_KEY = 0x5851F42D4C957F2D, 0x14057B7EF767814F
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compute_checksum(tensor: Tensor, row_start: int = 0, column_start: int = 0) -> int:
    """The checksum of a slice.

    Args:
        tensor: [rows, columns] or [rows], any dtype of 1, 2, 4 or 8 bytes, any device; not modified.
        row_start, column_start: where the slice begins in the whole tensor.

    Returns:
        An integer in [-2**63, 2**63). Depends on the dtype: cast to the receiver's dtype first.
    """
    if tensor.numel() == 0:  # a rank whose rows are all padding
        return 0
    bits = tensor.detach().contiguous().view(BITS[tensor.element_size()])
    bits = bits.reshape(bits.shape[0], -1)
    rows = _multipliers(row_start, bits.shape[0], ROW_KEY, bits.device)
    columns = _multipliers(column_start, bits.shape[1], COLUMN_KEY, bits.device)
    step = max(1, CHUNK_ELEMENTS // max(1, bits.shape[1]))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.shape[0], step):
        by_row = (bits[start : start + step].to(torch.int64) * columns).sum(dim=1)
        total += (by_row * rows[start : start + step]).sum()
    return int(total)


def add_checksums(parts: Iterable[int]) -> int:
    """The checksum of a tensor from those of its slices."""
    return (sum(parts) + 2**63) % 2**64 - 2**63


def _multipliers(start: int, count: int, key: int, device: torch.device) -> Tensor:
    """[count] int64, odd: one pseudo-random number for each position from `start` on (the mixing of SplitMix64)."""
    mixed = (torch.arange(start, start + count, dtype=torch.int64, device=device) + 1) * key
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)) | 1
