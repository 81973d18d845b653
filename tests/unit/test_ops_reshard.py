"""Copies of segments against a loop in Python, and what is refused before anything is written."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megarl.ops import reference_segments
from megarl.ops.reshard import build_plan, check_disjoint, copy_segments

Rows = list[tuple[int, ...]]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int8, torch.complex128]


def loop(srcs: list[Tensor], dsts: list[Tensor], rows: Rows) -> list[Tensor]:
    """Element by element into clones of the destinations."""
    out = [dst.clone() for dst in dsts]
    for src, src_offset, src_stride, dst, dst_offset, dst_stride, count, width in rows:
        for row in range(count):
            begin, end = src_offset + row * src_stride, dst_offset + row * dst_stride
            out[dst].view(-1)[end : end + width] = srcs[src].view(-1)[begin : begin + width].to(out[dst].dtype)
    return out


def random_rows(rng: random.Random, srcs: list[Tensor], dsts: list[Tensor], pairs: list[tuple[int, int]]) -> Rows:
    """Segments of any shape: each destination is cut into slabs, and a segment fills some columns of its slab."""
    rows: Rows = []
    for src, dst in pairs:
        begin = 0
        while begin < dsts[dst].numel():
            stride = rng.choice([1, 3, 8, 17, 64, 129])
            width, count = rng.randint(0, stride), rng.randint(0, 9)
            slab = stride * max(count, 1)
            if begin + slab > dsts[dst].numel():
                break
            src_stride = rng.choice([0, width, width + 1, 64, 200])
            furthest = src_stride * max(0, count - 1) + width
            if furthest <= srcs[src].numel():
                offset = rng.randint(0, srcs[src].numel() - furthest)
                rows.append((src, offset, src_stride, dst, begin, stride, count, width))
            begin += slab + rng.randint(0, 5)
    return rows


def _random_tensor(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=rng) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_equal_the_loop(dtype, shift, seed):
    srcs = [_random_tensor(size, dtype, size)[shift:] for size in (700, 2000)]
    dsts = [torch.zeros(size, dtype=dtype)[shift:] for size in (1500, 3000)]
    rows = random_rows(random.Random(seed), srcs, dsts, [(0, 0), (1, 1)])
    expected = loop(srcs, dsts, rows)
    copy_segments(srcs, dsts, build_plan(rows))
    assert all(torch.equal(a, b) for a, b in zip(dsts, expected, strict=True))
    assert any(bool(dst.any()) for dst in dsts)


@pytest.mark.parametrize(("src_dtype", "dst_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("shift", [0, 1])
def test_random_plans_that_cast_equal_the_loop(src_dtype, dst_dtype, shift):
    srcs, dsts = [_random_tensor(3000, src_dtype, 1)[shift:]], [torch.zeros(5000, dtype=dst_dtype)[shift:]]
    rows = random_rows(random.Random(shift), srcs, dsts, [(0, 0)])
    expected = loop(srcs, dsts, rows)
    copy_segments(srcs, dsts, build_plan(rows))
    assert torch.equal(dsts[0], expected[0])


def test_one_plan_mixes_dtypes():
    srcs = [torch.arange(8.0), torch.arange(8).to(torch.bfloat16), torch.arange(8)]
    dsts = [torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8), torch.zeros(8, dtype=torch.int64)]
    rows = [(i, 0, 8, i, 0, 8, 1, 8) for i in range(3)]
    copy_segments(srcs, dsts, build_plan(rows))
    assert all(dst.tolist() == list(range(8)) for dst in dsts)


def test_bf16_is_rounded_as_torch_rounds_it():
    """Ties, the largest number, denormals, infinities and NaN."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00012345, 0x80008000 - 2**32, 0x7F800000])
    x = torch.cat([bits.int().view(torch.float32), torch.tensor([-torch.inf, torch.nan, -0.0])])
    out = torch.zeros(x.numel(), dtype=torch.bfloat16)
    copy_segments([x], [out], build_plan([(0, 0, 0, 0, 0, 0, 1, x.numel())]))
    assert torch.equal(out[:8].view(torch.int16), x[:8].to(torch.bfloat16).view(torch.int16))
    assert out[8].isnan() and out[9].view(torch.int16) == x[9].to(torch.bfloat16).view(torch.int16)


def test_columns_of_a_matrix_reach_their_place():
    whole, shards = torch.arange(24.0).view(4, 6), [torch.zeros(4, 3), torch.zeros(4, 3)]
    copy_segments([whole], shards, build_plan([(0, 3 * i, 6, i, 0, 3, 4, 3) for i in range(2)]))
    assert torch.equal(shards[0], whole[:, :3]) and torch.equal(shards[1], whole[:, 3:])


def test_a_row_stride_of_zero_repeats_a_row():
    out = torch.zeros(6)
    copy_segments([torch.tensor([1.0, 2.0])], [out], build_plan([(0, 0, 0, 0, 0, 2, 3, 2)]))
    assert out.tolist() == [1, 2] * 3


@pytest.mark.parametrize("rows", [[], [(0, 5, 3, 0, 9, 3, 0, 4)], [(0, 5, 3, 0, 9, 3, 4, 0)]])
def test_an_empty_plan_or_segment_writes_nothing(rows):
    out = torch.zeros(4)
    copy_segments([torch.ones(4)], [out], build_plan(rows))
    assert not out.any()


def test_large_copies_are_the_same_on_one_and_two_threads():
    src = _random_tensor(3_000_001, torch.float32, 0)
    rows = [(0, 1, 1000, 0, 7, 1001, 2500, 999), (0, 0, 0, 1, 3, 0, 1, 3_000_001), (0, 0, 0, 2, 0, 0, 1, 3_000_000)]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            dtypes = (torch.float32, torch.bfloat16, torch.float32)
            results.append([torch.zeros(3_000_004, dtype=dtype) for dtype in dtypes])
            copy_segments([src], results[-1], build_plan(rows))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(results[0][1][3:], src.bfloat16())
    assert torch.equal(results[0][2][:3_000_000], src[:3_000_000])
    strided = results[0][0][7:].as_strided((2500, 999), (1001, 1), 7)
    assert torch.equal(strided, src.as_strided((2500, 999), (1000, 1), 1))


REFUSED: dict[str, tuple[Rows, str]] = {
    "source too short": ([(0, 4, 4, 0, 0, 4, 2, 3)], r"segment 1 reads .*11 of srcs\[0\].*10"),
    "destination too short": ([(0, 0, 0, 0, 9, 0, 1, 4)], r"segment 1 writes .*13 of dsts\[0\].*12"),
    "unknown source": ([(1, 0, 0, 0, 0, 0, 1, 1)], r"segment 1 names srcs\[1\], there are 1"),
    "unknown destination": ([(0, 0, 0, -1, 0, 0, 1, 1)], r"names dsts\[-1\], there are 2"),
    "negative offset": ([(0, -1, 0, 0, 0, 0, 1, 1)], r"offset -1 and row stride 0 in srcs\[0\]"),
    "negative rows": ([(0, 0, 0, 0, 0, 0, -1, 1)], "-1 rows of 1"),
    "own rows overlap": ([(0, 0, 2, 0, 0, 2, 2, 3)], r"every 2 elements of dsts\[0\]: they overlap"),
    "dtypes": ([(0, 0, 0, 1, 0, 0, 1, 1)], r"segment 1 goes from srcs\[0\] .* dsts\[1\]"),
    "overflow": ([(0, 2**62, 2**62, 0, 0, 4, 3, 4)], "segment 1 reads"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("run", [copy_segments, reference_segments.copy_segments], ids=["kernel", "reference"])
def test_a_wrong_segment_is_refused_by_name_and_nothing_is_written(name, run):
    rows, message = REFUSED[name]
    out = torch.zeros(12)
    with pytest.raises(RuntimeError, match=message):
        run([torch.ones(10)], [out, torch.zeros(4, dtype=torch.float64)], build_plan([(0, 0, 0, 0, 0, 0, 1, 1), *rows]))
    assert not out.any()


def test_a_source_inside_a_destination_is_refused():
    buffer = torch.arange(10.0)
    with pytest.raises(RuntimeError, match=r"srcs\[0\] shares memory with one of dsts"):
        copy_segments([buffer[2:6]], [torch.zeros(3), buffer[5:]], build_plan([(0, 0, 0, 0, 0, 0, 1, 1)]))
    copy_segments([buffer[2:5]], [buffer[5:8], buffer[:2]], build_plan([(0, 0, 0, 0, 0, 0, 1, 3)]))
    assert buffer[5:8].tolist() == [2, 3, 4]


def test_a_tensor_with_gaps_is_refused():
    with pytest.raises(RuntimeError, match=r"dsts\[0\] is not contiguous"):
        copy_segments([torch.ones(4)], [torch.zeros(4, 2)[:, 0]], build_plan([(0, 0, 0, 0, 0, 0, 1, 1)]))


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, 0, 0, 0, 0, 1, 5), (0, 0, 0, 0, 4, 0, 1, 2)],
        [(0, 0, 0, 0, 0, 10, 4, 5), (0, 0, 0, 0, 14, 10, 2, 2)],
        [(0, 0, 0, 0, 0, 10, 4, 5), (0, 0, 0, 0, 8, 10, 2, 3)],
        [(0, 0, 0, 0, 0, 10, 4, 5), (0, 0, 0, 0, 5, 7, 3, 5)],
        [(0, 0, 0, 0, 0, 10, 4, 5), (0, 0, 0, 0, 5, 0, 1, 6)],
    ],
)
def test_two_segments_that_write_one_element_are_found(rows):
    plan = build_plan(rows)
    with pytest.raises(ValueError, match=r"segments 0 and 1 of the plan write the same bytes of dsts\[0\]"):
        check_disjoint([torch.zeros(64)], plan)


@pytest.mark.parametrize("seed", range(20))
def test_the_search_for_double_writes_equals_a_count(seed):
    rng, rows = random.Random(seed), []
    for _ in range(3):
        stride = rng.choice([4, 7, 10])
        rows.append((0, 0, 0, 0, rng.randint(0, 40), stride, rng.randint(0, 4), rng.randint(0, 4)))
    written = torch.zeros(128)
    for _, _, _, _, offset, stride, count, width in rows:
        for row in range(count):
            written[offset + row * stride : offset + row * stride + width] += 1
    try:
        check_disjoint([torch.zeros(128)], build_plan(rows))
        is_refused = False
    except ValueError:
        is_refused = True
    assert is_refused == bool((written > 1).any())


def test_views_of_one_buffer_are_seen_as_the_same_memory():
    bucket = torch.zeros(64, dtype=torch.uint8)
    views = [bucket.view(torch.float32), bucket[8:].view(torch.bfloat16)]
    check_disjoint(views, build_plan([(0, 0, 0, 0, 0, 0, 1, 2), (0, 0, 0, 1, 0, 0, 1, 4)]))
    with pytest.raises(ValueError, match="segments 0 and 1"):
        check_disjoint(views, build_plan([(0, 0, 0, 0, 0, 0, 1, 3), (0, 0, 0, 1, 0, 0, 1, 4)]))


def test_a_write_is_seen_by_autograd():
    """A tensor kept for a backward pass and overwritten afterwards must not go unnoticed."""
    weight = torch.ones(3, requires_grad=True)
    result = (weight * weight).sum()
    copy_segments([torch.zeros(3)], [weight], build_plan([(0, 0, 0, 0, 0, 0, 1, 3)]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_copy_segments_passes_opcheck():
    plan = build_plan([(0, 0, 3, 1, 2, 4, 2, 3), (1, 0, 0, 0, 0, 0, 1, 2)])
    srcs, dsts = [torch.ones(6), torch.ones(2)], [torch.zeros(3), torch.zeros(12)]
    copy_segments(srcs, dsts, plan)  # gives the op its fake kernel
    torch.library.opcheck(torch.ops.megarl.copy_segments, (srcs, dsts, plan))
