"""Segment copies of a Llama-shaped model against one memcpy of the same bytes.

    python -m benchmarks.copy [--layers 4] [--hidden 2048] [--ffn 5632] [--heads 32] [--kv-heads 4] [--tp 2]

`direct`: the shards of `--tp` trainer ranks, as Megatron lays them out, into an engine's fused parameters: rows of
query, key and value groups, halves of gate and up, columns of the output and down projections. `pack`: the columns of
one rank's projections into a flat bucket. `cast`: as `direct`, fp32 shards into bf16 parameters. Times are compared to
one copy of a flat buffer that reads and writes as many bytes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import MIB, num_threads, report, time_in_turns
from megarl import device
from megarl.ops import dispatch
from megarl.ops.reshard import build_plan, check_disjoint, copy_segments, place_plan

Rows = list[tuple[int, ...]]


@dataclass(frozen=True)
class Shape:
    """One layer of a Llama and its cut over the trainer's ranks."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    tp: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def trainer_shapes(self) -> list[tuple[int, int]]:
        """qkv, output, gate and up, down of one rank."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim // self.tp
        return [
            (qkv, self.hidden),
            (self.hidden, self.hidden // self.tp),
            (2 * self.ffn // self.tp, self.hidden),
            (self.hidden, self.ffn // self.tp),
        ]

    def engine_shapes(self) -> list[tuple[int, int]]:
        whole = Shape(self.hidden, self.ffn, self.heads, self.kv_heads, tp=1)
        return whole.trainer_shapes()


def plan_layer(shape: Shape, first_src: int, first_dst: int) -> Rows:
    """Rows of the plan of one layer; sources are rank-major, four tensors a rank."""
    rows: Rows = []
    hidden, head = shape.hidden, shape.head_dim * shape.hidden
    queries_of_group = shape.heads // shape.kv_heads
    groups = shape.kv_heads // shape.tp
    up_rows = shape.ffn // shape.tp
    for rank in range(shape.tp):
        src = first_src + 4 * rank
        for local in range(groups):
            group = rank * groups + local
            start = local * (queries_of_group + 2) * head
            pieces = (  # elements, where they begin among the engine's q, k, v blocks
                (queries_of_group * head, group * queries_of_group * head),
                (head, (shape.heads + group) * head),
                (head, (shape.heads + shape.kv_heads + group) * head),
            )
            for size, offset in pieces:
                rows.append((src, start, size, first_dst, offset, size, 1, size))
                start += size
        rows.append(_columns(src + 1, first_dst + 1, rank, hidden, hidden, shape.tp))
        for half in range(2):
            size = up_rows * hidden
            rows.append(
                (src + 2, half * size, size, first_dst + 2, (half * shape.ffn + rank * up_rows) * hidden, size, 1, size)
            )
        rows.append(_columns(src + 3, first_dst + 3, rank, hidden, shape.ffn, shape.tp))
    return rows


def _columns(src: int, dst: int, rank: int, rows: int, columns: int, tp: int) -> tuple[int, ...]:
    width = columns // tp
    return (src, 0, width, dst, rank * width, columns, rows, width)


def plan_pack(shape: Shape, num_layers: int) -> Rows:
    """Rank 0's columns of every whole output and down projection into one flat bucket."""
    rows: Rows = []
    begin = 0
    for layer in range(num_layers):
        for tensor, columns in ((4 * layer + 1, shape.hidden), (4 * layer + 3, shape.ffn)):
            width = columns // shape.tp
            rows.append((tensor, 0, columns, 0, begin, width, shape.hidden, width))
            begin += shape.hidden * width
    return rows


def compare(name: str, srcs: list[Tensor], dsts: list[Tensor], rows: Rows) -> dict[str, float | int | str]:
    """The figures of one plan."""
    plan = build_plan(rows)
    check_disjoint(dsts, plan)
    placed = place_plan(plan, dsts[0].device)
    elements = int((plan[:, 6] * plan[:, 7]).sum())
    num_bytes = elements * (srcs[0].element_size() + dsts[0].element_size())
    flat = torch.ones(num_bytes // 2, dtype=torch.uint8, device=dsts[0].device)
    other = torch.zeros_like(flat)
    times = time_in_turns(
        {"copy": lambda: copy_segments(srcs, dsts, plan, placed), "memcpy": lambda: other.copy_(flat)},
        rounds=9,
        warm_ups=2,
    )
    key = "share_of_memcpy" if name == "direct" else f"{name}_share_of_memcpy"
    return {
        key: times["memcpy"] / times["copy"],
        f"{name}_segments": len(rows),
        f"{name}_moved_mib": num_bytes / MIB,
        f"{name}_gb_per_s": num_bytes / times["copy"] / 1e9,
        f"{name}_memcpy_gb_per_s": num_bytes / times["memcpy"] / 1e9,
    }


def build(shapes: list[tuple[int, int]], dtype: torch.dtype) -> list[Tensor]:
    return [torch.ones(shape, dtype=dtype, device=device.device()) for shape in shapes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("hidden", 2048), ("ffn", 5632), ("heads", 32), ("kv-heads", 4), ("tp", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(num_threads())
    print(dispatch.choose_implementation(require_extension=True))
    shape = Shape(arguments.hidden, arguments.ffn, arguments.heads, arguments.kv_heads, arguments.tp)
    layers = range(arguments.layers)
    rows = [row for layer in layers for row in plan_layer(shape, 4 * shape.tp * layer, 4 * layer)]
    engine = build(shape.engine_shapes() * arguments.layers, torch.bfloat16)
    figures: dict[str, float | int | str] = {}
    for name, dtype in (("direct", torch.bfloat16), ("cast", torch.float32)):
        shards = build(shape.trainer_shapes() * shape.tp * arguments.layers, dtype)
        figures |= compare(name, shards, engine, rows)
    del shards
    bucket = build([(arguments.layers * shape.hidden, (shape.hidden + shape.ffn) // shape.tp)], torch.bfloat16)
    figures |= compare("pack", engine, bucket, plan_pack(shape, arguments.layers))
    report("copy", {**figures, "threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
