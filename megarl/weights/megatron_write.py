"""Writes a Megatron checkpoint from any source of Hugging Face tensors, in one process, for a grid of any size.

One file for each rank of the grid, as if that rank had saved its part. One parameter is in memory at a time:

    for each rank: for each of its parameters: slices of the source -> parameter -> patches -> the rank's file

The grid decides only how the tensors are cut into files: a run on another grid reads the checkpoint all the same.
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.models.layout import Family, HeadKind, ModelSpec, ParamLayout, plan_stage
from megarl.weights.hf import load_shard
from megarl.weights.partial import list_done, note_done
from megarl.weights.patches import WholeModel, plan_patches, plan_whole_model
from megarl.weights.source import TensorSource
from megarl.weights.torch_dist import Chunk, StoredTensor, write_index


@dataclass(frozen=True)
class Grid:
    """How many ways the model is cut; ranks are counted tp fastest, then ep, then pp."""

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size * self.ep_size


@dataclass(frozen=True)
class WrittenPatch:
    """A rectangle of the checkpoint's tensor `key` that lies in a file."""

    key: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    chunk: Chunk


def list_rank_layouts(
    family: Family, spec: ModelSpec, grid: Grid, rank: int, head: HeadKind = "policy"
) -> list[ParamLayout]:
    """What a rank writes: its parameters without those that a rank before it writes too."""
    tp_rank, ep_rank = rank % grid.tp_size, rank // grid.tp_size % grid.ep_size
    stage = rank // (grid.tp_size * grid.ep_size)
    layouts = plan_stage(
        family, spec, grid.tp_size, tp_rank, grid.pp_size, stage, head, ep_size=grid.ep_size, ep_rank=ep_rank
    )
    return [
        layout
        for layout in layouts
        if not layout.is_tied_copy
        and not (layout.is_replicated and tp_rank > 0)
        and not (layout.expert is None and ep_rank > 0)
    ]


def pick_dtypes(
    source: TensorSource, family: Family, spec: ModelSpec, head: HeadKind, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype of each tensor of the checkpoint, by the parameters' `stem`: `dtype`, or the source's own.

    Raises:
        ValueError: parts of one tensor that the source stores in several dtypes.
    """
    found: dict[str, dict[torch.dtype, str]] = defaultdict(dict)
    for layout in plan_stage(family, spec, tp_size=1, tp_rank=0, pp_size=1, stage=0, head=head):
        for piece in layout.slices:
            if piece.hf_name in source.names:
                found[layout.stem].setdefault(source.dtype(piece.hf_name), piece.hf_name)
            else:
                found[layout.stem].setdefault(torch.float32, piece.hf_name)  # a value head that starts fresh
    picked: dict[str, torch.dtype] = {}
    for stem, dtypes in found.items():
        if dtype is None and len(dtypes) > 1:
            told = ", ".join(f"{name} {each}" for each, name in dtypes.items())
            raise ValueError(f"{source.folder}: one tensor of the checkpoint needs one dtype ({told}); use --dtype")
        picked[stem] = dtype or next(iter(dtypes))
    return picked


def write_checkpoint(
    source: TensorSource,
    family: Family,
    spec: ModelSpec,
    grid: Grid,
    partial: Path,
    head: HeadKind = "policy",
    dtype: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Writes every rank's file that is not done yet, then the index.

    Args:
        source: a folder that `check_folder` accepted.
        partial: the folder to write into, see `partial.py`.
        dtype: None = as stored.
        advance: told the bytes of each parameter written, and of each file found done.
    """
    dtypes = pick_dtypes(source, family, spec, head, dtype)
    whole = plan_whole_model(family, spec, head)
    done = list_done(partial)
    pieces: list[WrittenPatch] = []
    for rank in range(grid.num_ranks):
        name = f"__{rank}_0.distcp"
        if name in done:
            written = [_from_json(entry) for entry in done[name]]
            advance(sum(piece.chunk.length for piece in written))
        else:
            layouts = list_rank_layouts(family, spec, grid, rank, head)
            written = list(_write_file(partial / name, source, whole, layouts, dtypes, advance))
            note_done(partial, name, [_to_json(piece) for piece in written])
        pieces += written
    tensors: dict[str, StoredTensor] = {}
    for piece in pieces:
        before = tensors.get(piece.key, StoredTensor(piece.global_shape, piece.dtype, ()))
        tensors[piece.key] = dataclasses.replace(before, chunks=(*before.chunks, piece.chunk))
    write_index(partial, tensors)


def _write_file(
    path: Path,
    source: TensorSource,
    whole: WholeModel,
    layouts: list[ParamLayout],
    dtypes: dict[str, torch.dtype],
    advance: Callable[[int], None],
) -> Iterator[WrittenPatch]:
    with path.open("wb") as stream:
        for layout in layouts:
            parameter = torch.zeros(layout.shape, dtype=dtypes[layout.stem])
            load_shard(source, [layout], {layout.name: parameter})
            for patch in plan_patches(layout, whole):
                part = parameter[tuple(slice(a, a + n) for a, n in zip(patch.offset, patch.shape, strict=True))]
                if part.numel() < parameter.numel():
                    part = part.clone(memory_format=torch.contiguous_format)  # a view would be saved as a whole
                start = stream.tell()
                torch.save(part.reshape(patch.whole_extent), stream)
                chunk = Chunk(patch.whole_offset, patch.whole_extent, path.name, start, stream.tell() - start)
                yield WrittenPatch(patch.key, patch.whole_shape, parameter.dtype, chunk)
            advance(parameter.nbytes)
        stream.flush()
        os.fsync(stream.fileno())


def _to_json(piece: WrittenPatch) -> dict[str, object]:
    return {**dataclasses.asdict(piece), "dtype": str(piece.dtype).removeprefix("torch.")}


def _from_json(entry: dict[str, Any]) -> WrittenPatch:
    chunk = entry["chunk"] | {"offset": tuple(entry["chunk"]["offset"]), "shape": tuple(entry["chunk"]["shape"])}
    return WrittenPatch(entry["key"], tuple(entry["global_shape"]), getattr(torch, entry["dtype"]), Chunk(**chunk))
