"""The checksum of a tensor is the sum of its slices', and anything else about the tensor changes it."""

from __future__ import annotations

import pytest
import torch

from megarl.weights.checksum import add_checksums, compute_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_add_up_whatever_the_cut(dtype: torch.dtype) -> None:
    weight = torch.randn(37, 23).to(dtype)
    whole = compute_checksum(weight)
    by_rows = [compute_checksum(weight[:5]), compute_checksum(weight[5:], row_start=5)]
    by_columns = [compute_checksum(weight[:, :9]), compute_checksum(weight[:, 9:], column_start=9)]
    assert add_checksums(by_rows) == add_checksums(by_columns) == whole


def test_tensors_larger_than_a_chunk_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 8)
    whole = compute_checksum(weight)
    monkeypatch.setattr("megarl.weights.checksum.CHUNK_ELEMENTS", 24)
    assert compute_checksum(weight) == whole


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.flip(0),
        lambda w: w.roll(1, 1),
        lambda w: w.nextafter(w + 1),
        lambda w: w.T.contiguous(),
        lambda w: -w,
    ],
)
def test_order_and_every_bit_count(change) -> None:
    weight = torch.randn(16, 16)
    assert compute_checksum(change(weight)) != compute_checksum(weight)


def test_a_slice_without_rows_adds_nothing() -> None:
    assert compute_checksum(torch.zeros(0, 4), row_start=3) == 0
