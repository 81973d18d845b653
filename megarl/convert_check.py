"""`megarl convert check A B`: the largest difference of each tensor, and of the logits of a text.

Weights are compared block by block. Logits are computed by each form's own program: transformers for a Hugging Face
folder, megarl's Megatron model for a Megatron checkpoint, both in fp32. So a comparison across forms also proves that
the weights mean the same to both.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megarl import device
from megarl.convert import open_megatron
from megarl.models.layout import Family, ModelSpec, plan_stage
from megarl.models.registry import read_model_spec
from megarl.records import PackedBatch
from megarl.rollout.tokenizer import load_tokenizer
from megarl.weights.hf import HFFolder, check_folder, load_shard
from megarl.weights.megatron_folder import MegatronFolder
from megarl.weights.source import TensorSource

BLOCK_ELEMENTS = 1 << 24
SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """The largest |a - b| of a tensor that both folders hold; infinite where the shapes differ or a NaN has no twin."""

    name: str
    largest: float


@dataclass(frozen=True)
class Opened:
    """A folder of either form; `described_in` holds its config.json and tokenizer."""

    described_in: Path
    family: Family
    spec: ModelSpec
    source: TensorSource

    @property
    def is_megatron(self) -> bool:
        return isinstance(self.source, MegatronFolder)

    def find(self, name: str) -> str | None:
        """The name under which this folder holds a tensor: a tied head is the embedding."""
        if name == self.family.head and self.spec.is_tied:
            return self.family.embedding
        return name if name in self.source.names else None


def open_folder(folder: Path, role: str | None = None, allow_pickle: bool = False) -> Opened:
    """Raises ValueError for a folder that is neither, or does not hold the model its config.json describes."""
    if not list(folder.glob("*.safetensors")) and not list(folder.glob("*.bin")):
        megatron, family, spec, described_in = open_megatron(folder, role)
        return Opened(described_in, family, spec, megatron)
    family, spec = read_model_spec(folder, is_computed=False)
    source = HFFolder(folder, family, allow_pickle)
    check_folder(source, family, spec, "policy" if family.head in source.names or spec.is_tied else "value")
    return Opened(folder, family, spec, source)


def compare_tensor(first: TensorSource, name: str, second: TensorSource, other: str) -> float:
    """max |a - b| in fp64 over equal shapes; equal NaNs and infinities count as equal."""
    shape = first.shape(name)
    if shape != second.shape(other):
        return math.inf
    rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    largest = 0.0
    for start in range(0, shape[0], rows):
        length = min(rows, shape[0] - start)
        a, b = (each.read(key, 0, start, length) for each, key in ((first, name), (second, other)))
        if a.dtype == b.dtype and torch.equal(a, b):
            continue
        a, b = a.double(), b.double()
        gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
        largest = max(largest, gap.nan_to_num(nan=math.inf).max().item())
    return largest


def compare_weights(first: Opened, second: Opened) -> tuple[list[Difference], list[str]]:
    """Every tensor that both hold, and a line for each that only one holds."""
    differences: list[Difference] = []
    alone: list[str] = []
    for name in dict.fromkeys([*first.source.names, *second.source.names]):
        one, other = first.find(name), second.find(name)
        if one is None or other is None:
            alone.append(f"{name} is in {(second if one is None else first).source.folder} only")
        else:
            differences.append(Difference(name, compare_tensor(first.source, one, second.source, other)))
    return differences, alone


def run_check(options: argparse.Namespace, console: Console) -> int:
    """Prints the comparison; returns 0 where everything is equal up to `--atol`, else 1."""
    first, second = (
        open_folder(folder, options.role, options.allow_pickle) for folder in (options.first, options.second)
    )
    differences, alone = compare_weights(first, second)
    differing = sorted((d for d in differences if d.largest > options.atol), key=lambda d: -d.largest)
    print_differences(console, differences, differing, alone)
    is_equal = not differing and not alone
    if options.text is not None:
        largest, same, count = compare_logits(first, second, options.text)
        console.print(
            f"logits of {count} tokens: largest difference {largest:.3g}, same most likely token {same}/{count}"
        )
    return 0 if is_equal else 1


def print_differences(
    console: Console, differences: list[Difference], differing: list[Difference], alone: list[str]
) -> None:
    """A table of the tensors that differ most, and the sum in one line."""
    if differing:
        table = Table(title="largest differences", title_justify="left")
        table.add_column("tensor")
        table.add_column("max |a - b|", justify="right")
        for each in differing[:SHOWN]:
            table.add_row(each.name, "shapes differ" if math.isinf(each.largest) else f"{each.largest:.3g}")
        console.print(table)
    for line in alone[:SHOWN]:
        console.print(line, highlight=False, soft_wrap=True)
    equal = len(differences) - len(differing)
    console.print(f"{equal} of {len(differences) + len(alone)} tensors equal", highlight=False)


def compare_logits(first: Opened, second: Opened, text: str) -> tuple[float, int, int]:
    """Largest difference of the logits of `text`, positions with the same most likely token, positions.

    Raises:
        ValueError: a critic, a text without tokens, or a Megatron checkpoint that megarl does not run.
    """
    for each in (first, second):
        if each.find(each.family.head) is None:
            raise ValueError(f"--text: {each.source.folder} holds a critic, which gives no logits")
        if each.is_megatron:
            read_model_spec(each.described_in)  # refuses what megarl does not compute
    ids = load_tokenizer(str(first.described_in), "A").encode(text)
    if not ids:
        raise ValueError("--text holds no token")
    one, other = (compute_logits(each, torch.tensor(ids)) for each in (first, second))
    same = int((one.argmax(-1) == other.argmax(-1)).sum())
    return (one - other).abs().max().item(), same, len(ids)


@torch.no_grad()
def compute_logits(opened: Opened, ids: Tensor) -> Tensor:
    """[T, V] fp32 logits of the tokens `ids` [T] int64."""
    if opened.is_megatron:
        return run_megatron(opened, ids)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(opened.source.folder, dtype=torch.float32, local_files_only=True)
    return model(ids[None]).logits[0].float()


def run_megatron(opened: Opened, ids: Tensor) -> Tensor:
    """The logits of megarl's own model, built on this one process; [T, V] fp32."""
    from megarl.models import forward
    from megarl.models.build import BuildOptions, build_chunks, named_weights
    from megarl.models.micro_batch import build_micro_batch
    from megarl.parallel.groups import GroupCache, build_groups
    from megarl.parallel.topology import plan_topology

    if not dist.is_initialized():
        dist.init_process_group(device.backend(), store=dist.HashStore(), rank=0, world_size=1)
    groups = build_groups(plan_topology("actor", 1, ranks=[0]), GroupCache(timeout_s=600))
    assert groups is not None, "rank 0 is part of its own role"
    chunks = build_chunks(opened.spec, groups, BuildOptions(dtype=torch.float32))
    layouts = plan_stage(opened.family, opened.spec, tp_size=1, tp_rank=0, pp_size=1, stage=0)
    load_shard(opened.source, layouts, named_weights(chunks))
    batch = PackedBatch(
        tokens=ids,
        cu_seqlens=torch.tensor([0, len(ids)]),
        response_mask=torch.arange(len(ids)) > 0,
        rollout_logprobs=torch.zeros(len(ids)),
        group=torch.zeros(1, dtype=torch.int64),
        is_finished=torch.ones(1, dtype=torch.bool),
    )
    with device.megatron_scope():
        hidden = forward.run_stage(chunks[0], build_micro_batch(batch, range(1), 1), None)
    logits = torch.nn.functional.linear(hidden[: len(ids), 0], chunks[0].head_weight())
    return logits[:, : opened.spec.vocab_size].float().cpu()
