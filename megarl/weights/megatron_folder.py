"""A Megatron checkpoint read as if it were a Hugging Face folder: the same names, shapes and slices.

A Hugging Face tensor is put together from rectangles on disk. Both sides are boxes (start and stop along each axis):

    wanted rows of q_proj ──slices of the layout──> boxes of the whole linear_qkv ──chunks on disk──> copies

Only chunks that a wanted box meets are read. q, k and v (or gate and up) lie in the same chunks: those of the last
parameter are kept until another one is asked for.

`patches.py` says under which names and where; Megatron itself also writes a tensor for each layer ("non-homogeneous
layers"), calls norms by their own names where no kernel fuses them, and stores the padding of the vocabulary. All of
these are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.models.layout import Family, HeadKind, ModelSpec, ParamLayout, Slice, hf_shapes, plan_stage
from megarl.weights.patches import checkpoint_key, leading_axes
from megarl.weights.torch_dist import Chunk, StoredTensor, read_chunk, read_tensors

Box = tuple[tuple[int, int], ...]  # start and stop along each axis
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"


@dataclass(frozen=True)
class Home:
    """The tensor of a checkpoint that holds a parameter; `leading`: (index, extent) of the axes before its own."""

    key: str
    leading: tuple[tuple[int, int], ...]


class MegatronFolder:
    """The model of a Megatron checkpoint, by Hugging Face names.

    Args:
        family, spec: the model that the checkpoint holds.
        prefix: what stands before the model's keys, see `find_prefixes`.

    Raises:
        ValueError: not a checkpoint, or one that lacks parameters of this model or holds them in other shapes.
    """

    def __init__(self, folder: str | Path, family: Family, spec: ModelSpec, prefix: str = "") -> None:
        self.folder = Path(folder)
        self._tensors = {
            key.removeprefix(prefix): tensor
            for key, tensor in read_tensors(self.folder).items()
            if key.startswith(prefix)
        }
        self.head: HeadKind = find_head(self._tensors)
        self._shapes = hf_shapes(family, spec, self.head)
        self._parts: dict[str, list[tuple[ParamLayout, Slice]]] = {}
        self._homes: dict[str, tuple[Home, StoredTensor]] = {}
        problems: list[str] = []
        for layout in plan_stage(family, spec, tp_size=1, tp_rank=0, pp_size=1, stage=0, head=self.head):
            home = next((home for home in find_homes(layout, spec) if home.key in self._tensors), None)
            if home is None:
                problems.append(f"missing parameter {next(find_homes(layout, spec)).key}")
                continue
            stored = self._tensors[home.key]
            wanted = (*(extent for _, extent in home.leading), *layout.shape)
            if not _fits(stored.shape, wanted, layout, spec):
                problems.append(f"parameter {home.key} has shape {list(stored.shape)}, not {list(wanted)}")
            self._homes[layout.name] = (home, stored)
            for piece in layout.slices:
                self._parts.setdefault(piece.hf_name, []).append((layout, piece))
        if problems:
            unique = list(dict.fromkeys(problems))
            more = f"\n  ... and {len(unique) - 20} more" if len(unique) > 20 else ""
            raise ValueError(f"{folder} does not hold this model:\n  " + "\n  ".join(unique[:20]) + more)
        self._cached_of = ""
        self._cache: dict[Chunk, Tensor] = {}

    @property
    def names(self) -> Set[str]:
        """The tensors that are there."""
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a Hugging Face tensor, without Megatron's padding."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """dtype that it is stored in."""
        layout, _ = self._parts[name][0]
        return self._homes[layout.name][1].dtype

    def read(self, name: str, axis: int, start: int, length: int) -> Tensor:
        """`length` rows (axis 0) or columns (axis 1) of a tensor from `start` on."""
        wanted = [(0, extent) for extent in self._shapes[name]]
        wanted[axis] = (start, start + length)
        out = torch.empty([stop - first for first, stop in wanted], dtype=self.dtype(name))
        for layout, piece in self._parts[name]:
            box = list(wanted)
            box[piece.axis] = (piece.hf_start, piece.hf_start + piece.length)
            met = _meet(tuple(wanted), tuple(box))
            if met is not None:
                target = out[tuple(slice(a - w, b - w) for (a, b), (w, _) in zip(met, wanted, strict=True))]
                shift = piece.start - piece.hf_start
                whole = tuple(
                    (a + shift, b + shift) if each == piece.axis else (a, b) for each, (a, b) in enumerate(met)
                )
                self._fill(target, layout, whole)
        return out

    def _fill(self, target: Tensor, layout: ParamLayout, box: Box) -> None:
        """Copies a box of a whole parameter into `target`, from every chunk that it meets."""
        home, stored = self._homes[layout.name]
        full = (*((index, index + 1) for index, _ in home.leading), *box)
        filled = 0
        for chunk in stored.chunks:
            at = tuple((first, first + extent) for first, extent in zip(chunk.offset, chunk.shape, strict=True))
            met = _meet(full, at)
            if met is None:
                continue
            values = self._load(chunk, layout)
            part = values[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(met, at, strict=True))]
            inner = [(a - f, b - f) for (a, b), (f, _) in zip(met, full, strict=True)][len(home.leading) :]
            place = target[tuple(slice(a, b) for a, b in inner)]
            place.copy_(part.reshape(place.shape))
            filled += place.numel()
        if filled != target.numel():
            raise ValueError(f"{self.folder}: {home.key} is stored in part only: {filled} of {target.numel()} elements")

    def _load(self, chunk: Chunk, layout: ParamLayout) -> Tensor:
        if len({piece.hf_name for piece in layout.slices}) == 1:
            return read_chunk(self.folder, chunk)
        if self._cached_of != layout.name:
            self._cache.clear()
            self._cached_of = layout.name
        if chunk not in self._cache:
            self._cache[chunk] = read_chunk(self.folder, chunk)
        return self._cache[chunk]


def find_homes(layout: ParamLayout, spec: ModelSpec) -> Iterator[Home]:
    """Where a checkpoint may hold a parameter, the usual place first."""
    leading = leading_axes(layout, spec)
    for key in dict.fromkeys((checkpoint_key(layout, spec), layout.stem)):
        yield Home(key, leading)
        if layout.layer is not None:
            yield Home(key.replace("decoder.layers.", f"decoder.layers.{layout.layer}.", 1), leading[1:])


def find_head(tensors: dict[str, StoredTensor]) -> HeadKind:
    """A value head is one row."""
    return "value" if HEAD in tensors and tensors[HEAD].shape[0] == 1 else "policy"


def find_prefixes(folder: str | Path) -> list[str]:
    """What stands before the keys of each model in a checkpoint: `[""]`, or `["actor.", "critic."]`, ..."""
    keys = read_tensors(Path(folder)).keys()
    found = [key.removesuffix(EMBEDDING) for key in keys if key.endswith(EMBEDDING)]
    return sorted(prefix for prefix in found if "optimizer." not in prefix)


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...], layout: ParamLayout, spec: ModelSpec) -> bool:
    """Equal shapes; a vocabulary may be padded to another number of rows, but must hold all of its own."""
    if layout.name in (EMBEDDING, HEAD) and not layout.is_replicated:
        return shape[0] >= spec.vocab_size and shape[1:] == wanted[1:]
    return shape == wanted


def _meet(one: Box, other: Box) -> Box | None:
    """The box that two boxes share, None where they share nothing."""
    met = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return met if all(a < b for a, b in met) else None
