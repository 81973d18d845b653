"""Where a rank's parameters, and the part of them that its optimizer holds, lie in the tensors of a checkpoint. Pure.

A checkpoint knows no TP, PP, EP or DP. It holds one tensor for all layers, their number first (and all experts, their
number second), under Megatron's names; rows that only pad the vocabulary are not in it. A rank's share is a list of
rectangles ("patches") of these tensors, and a distributed optimizer's share, a stretch of the flattened parameter, is a
list of smaller ones. Example: linear_fc1 of layer 5 of 32, I=4 and H=3 at TP 2, rank 1; then the elements 4..9 of its
flattened [4, 3], which one of two replicas holds: the rest of row 1, all of row 2, the first of row 3

    rows 0..1 -> decoder.layers.mlp.linear_fc1.weight [32, 8, 3] from (5, 2, 0), [1, 2, 3]     (gate)
    rows 2..3 ->                                                 from (5, 6, 0), [1, 2, 3]     (up)

    elements 4..9 -> from (5, 3, 1) [1, 1, 2];   from (5, 6, 0) [1, 1, 3];   from (5, 7, 0) [1, 1, 1]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megarl.models.layout import Family, HeadKind, ModelSpec, ParamLayout, Slice, plan_stage

# Checkpoints call the norm in front of a linear layer after that layer, whatever computed it.
FUSED_NORMS = {
    "decoder.layers.input_layernorm.weight": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.pre_mlp_layernorm.weight": "decoder.layers.mlp.linear_fc1.layer_norm_weight",
}


@dataclass(frozen=True)
class Patch:
    """A rectangle of one parameter and its place in a tensor of the checkpoint.

    `offset` and `shape` are the rectangle's in the rank's parameter; `whole_offset` its place in the tensor `key` of
    `whole_shape`, whose axes before the parameter's own (the layer) have extent 1 here.
    """

    key: str
    whole_shape: tuple[int, ...]
    whole_offset: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def whole_extent(self) -> tuple[int, ...]:
        """The rectangle's shape in the tensor of the checkpoint."""
        return (1,) * (len(self.whole_shape) - len(self.shape)) + self.shape

    @property
    def numel(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class _Home:
    """The part of a checkpoint's tensor that one Hugging Face tensor fills.

    `leading`: (index, extent) of layer and expert; `shape`: the tensor's, without these axes.
    """

    key: str
    leading: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    piece: Slice


WholeModel = Mapping[str, list[_Home]]


def plan_whole_model(family: Family, spec: ModelSpec, head: HeadKind) -> WholeModel:
    """The tensors of a checkpoint of this model, by the Hugging Face tensors that they are made of."""
    whole: dict[str, list[_Home]] = {}
    for layout in plan_stage(family, spec, tp_size=1, tp_rank=0, pp_size=1, stage=0, head=head):
        rows = max((piece.start + piece.length for piece in layout.slices if piece.axis == 0), default=layout.shape[0])
        home = (checkpoint_key(layout, spec), leading_axes(layout, spec), (rows, *layout.shape[1:]))
        for piece in layout.slices:
            whole.setdefault(piece.hf_name, []).append(_Home(*home, piece))
    return whole


def checkpoint_key(layout: ParamLayout, spec: ModelSpec) -> str:
    """The name of the checkpoint's tensor that holds a parameter."""
    is_fused = not (spec.num_experts and "pre_mlp" in layout.stem)  # a router comes behind that norm, and fuses nothing
    return FUSED_NORMS.get(layout.stem, layout.stem) if is_fused else layout.stem


def leading_axes(layout: ParamLayout, spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(index, extent) of the axes that stand before the parameter's own: layer and expert, where it has them."""
    layer = () if layout.layer is None else ((layout.layer, spec.num_layers),)
    return layer if layout.expert is None else (*layer, (layout.expert, spec.num_experts))


def plan_patches(layout: ParamLayout, whole: WholeModel) -> list[Patch]:
    """The rectangles that together are one rank's parameter, without rows that are padding."""
    patches: list[Patch] = []
    for piece in layout.slices:
        for home in whole[piece.hf_name]:
            start = max(piece.hf_start, home.piece.hf_start)
            length = min(piece.hf_start + piece.length, home.piece.hf_start + home.piece.length) - start
            if length <= 0:
                continue
            shape, offset, inner = list(layout.shape), [0] * len(layout.shape), [0] * len(layout.shape)
            shape[piece.axis] = length
            offset[piece.axis] = piece.start + start - piece.hf_start
            inner[piece.axis] = home.piece.start + start - home.piece.hf_start
            extents, indices = tuple(e for _, e in home.leading), tuple(i for i, _ in home.leading)
            patches.append(Patch(home.key, (*extents, *home.shape), (*indices, *inner), tuple(offset), tuple(shape)))
    return list(_merge(sorted(patches, key=lambda patch: (patch.key, patch.offset))))


def _merge(patches: Iterable[Patch]) -> Iterator[Patch]:
    """Joins neighbours that are neighbours in both places: the q, k and v rows of a rank are one rectangle."""
    last: Patch | None = None
    for patch in patches:
        axis = None if last is None else _meeting_axis(last, patch)
        if last is None or axis is None:
            if last is not None:
                yield last
            last = patch
        else:
            shape = tuple(
                a + (b if i == axis else 0) for i, (a, b) in enumerate(zip(last.shape, patch.shape, strict=True))
            )
            last = replace(last, shape=shape)
    if last is not None:
        yield last


def _meeting_axis(one: Patch, other: Patch) -> int | None:
    """The axis along which `other` goes on where `one` ends, in the parameter and in the whole tensor alike."""
    if one.key != other.key:
        return None
    lead = len(one.whole_offset) - len(one.offset)
    for axis, extent in enumerate(one.shape):
        step = tuple(extent if i == axis else 0 for i in range(len(one.shape)))
        moved = tuple(a + b for a, b in zip(one.offset, step, strict=True))
        moved_whole = tuple(a + b for a, b in zip(one.whole_offset, (0,) * lead + step, strict=True))
        same = all(a == b for i, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if i != axis)
        if same and moved == other.offset and moved_whole == other.whole_offset:
            return axis
    return None


def cut_patches(patches: Iterable[Patch], shape: tuple[int, ...], start: int, stop: int) -> list[Patch]:
    """The parts of a parameter's patches that lie in elements `start` up to `stop` of the flattened parameter.

    Args:
        patches: rectangles of whole rows, or columns of the whole height: what `plan_patches` gives.
        shape: the parameter's, one or two axes.

    Returns:
        Rectangles whose elements are neighbours in the flattened parameter.
    """
    cut: list[Patch] = []
    for patch, (offset, extent) in itertools.product(patches, list(_rectangles(shape, start, stop))):
        low = tuple(max(a, b) for a, b in zip(patch.offset, offset, strict=True))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(patch.offset, patch.shape, offset, extent, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        lead = len(patch.whole_offset) - len(low)
        moved = tuple(a - b for a, b in zip(low, patch.offset, strict=True))
        whole_offset = tuple(a + b for a, b in zip(patch.whole_offset, (0,) * lead + moved, strict=True))
        extent_ = tuple(b - a for a, b in zip(low, high, strict=True))
        cut.append(Patch(patch.key, patch.whole_shape, whole_offset, low, extent_))
    return cut


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, extent) of at most three rectangles that together are elements `start` up to `stop`."""
    assert len(shape) in (1, 2), f"parameters have one or two axes, not {shape}"
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    width = shape[1]
    (first, skip), (last, rest) = divmod(start, width), divmod(stop, width)
    if first == last:
        yield (first, skip), (1, rest - skip)
        return
    if skip:
        yield (first, skip), (1, width - skip)
        first += 1
    if last > first:
        yield (first, 0), (last - first, width)
    if rest:
        yield (last, 0), (1, rest)
