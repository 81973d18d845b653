"""A checkpoint's patches: on every grid they are the same whole model, every element of it once."""

from __future__ import annotations

import itertools

import pytest
import torch

from megarl.models.layout import HeadKind, ModelSpec, plan_stage
from megarl.models.registry import FAMILIES
from megarl.weights.patches import Patch, cut_patches, plan_patches, plan_whole_model

SPEC = ModelSpec(
    family="qwen3",
    num_layers=3,
    hidden_size=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=2,
    ffn_size=8,
    vocab_size=301,
    norm_eps=1e-6,
    max_positions=64,
    is_tied=True,
    has_qkv_bias=False,
    has_qk_norm=True,
)
"""Padding rows at any TP, kv groups that interleave, three layers over two stages."""


def fill(tensors: dict[str, torch.Tensor], patch: Patch, values: torch.Tensor) -> None:
    """Writes a rectangle of a parameter into the checkpoint's tensor; every element may be written once."""
    whole = tensors.setdefault(patch.key, torch.full(patch.whole_shape, -1, dtype=torch.int64))
    assert tuple(whole.shape) == patch.whole_shape
    place = tuple(slice(a, a + n) for a, n in zip(patch.whole_offset, patch.whole_extent, strict=True))
    assert bool((whole[place] == -1).all()), f"written twice: {patch}"
    whole[place] = values.view(patch.whole_extent)


def save(tp_size: int, pp_size: int, dp_size: int, head: HeadKind) -> dict[str, torch.Tensor]:
    """A checkpoint of parameters that hold, element by element, a number of their Hugging Face tensor's element."""
    family = FAMILIES["qwen3"]
    whole = plan_whole_model(family, SPEC, head)
    tensors: dict[str, torch.Tensor] = {}
    for stage, tp_rank in itertools.product(range(pp_size), range(tp_size)):
        for layout in plan_stage(family, SPEC, tp_size, tp_rank, pp_size, stage, head):
            if layout.is_tied_copy or (layout.is_replicated and tp_rank):
                continue
            local = torch.full(layout.shape, -2, dtype=torch.int64)
            for piece in layout.slices:
                along = torch.arange(piece.hf_start, piece.hf_start + piece.length)
                across = torch.arange(layout.shape[1 - piece.axis] if len(layout.shape) == 2 else 1)
                grid = along[:, None] * 1000 + across if piece.axis == 0 else across[:, None] * 1000 + along
                values = grid + sum(map(ord, piece.hf_name)) * 10**6
                target = local.narrow(piece.axis, piece.start, piece.length)
                target.copy_(values.view(target.shape))
            patches = plan_patches(layout, whole)
            share = -(-local.numel() // dp_size)
            for replica in range(dp_size):
                start, stop = share * replica, min(share * (replica + 1), local.numel())
                for patch in cut_patches(patches, layout.shape, start, stop) if stop > start else []:
                    fill(
                        tensors,
                        patch,
                        local[tuple(slice(a, a + n) for a, n in zip(patch.offset, patch.shape, strict=True))],
                    )
    return tensors


@pytest.mark.parametrize("head", ["policy", "value"])
def test_every_grid_writes_the_same_checkpoint_and_every_element_once(head: HeadKind) -> None:
    reference = save(1, 1, 1, head)
    assert all(bool((tensor >= 0).all()) for tensor in reference.values()), "an element that nobody wrote, or padding"
    for grid in ((2, 1, 1), (1, 2, 1), (4, 3, 1), (2, 2, 3), (1, 1, 7)):
        saved = save(*grid, head)
        assert saved.keys() == reference.keys()
        for key, tensor in reference.items():
            assert torch.equal(saved[key], tensor), (grid, key)


def test_the_tensors_go_by_megatrons_names_and_hold_no_padding() -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in save(2, 1, 1, "policy").items()}
    assert shapes["embedding.word_embeddings.weight"] == (301, 6)
    assert shapes["decoder.layers.self_attention.linear_qkv.weight"] == (3, 32, 6)
    assert shapes["decoder.layers.mlp.linear_fc1.weight"] == (3, 16, 6)
    assert shapes["decoder.layers.self_attention.linear_qkv.layer_norm_weight"] == (3, 6)
    assert "output_layer.weight" not in shapes


def test_gate_lies_before_up_over_all_ranks() -> None:
    """Gate rows 0..7 then up rows 0..7 at TP 2, although each rank holds a part of both."""
    rows = save(2, 1, 1, "policy")["decoder.layers.mlp.linear_fc1.weight"][1, :, 0]
    names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    assert rows.tolist() == [sum(map(ord, name)) * 10**6 + 1000 * row for name in names for row in range(8)]


def test_the_copy_of_a_tied_embedding_is_read_from_the_embedding() -> None:
    family = FAMILIES["qwen3"]
    last = plan_stage(family, SPEC, 2, 1, 2, 1, "policy")[-1]
    assert last.is_tied_copy
    (patch,) = plan_patches(last, plan_whole_model(family, SPEC, "policy"))
    assert patch.key == "embedding.word_embeddings.weight"
    assert patch.whole_offset == (256, 0) and patch.shape == (45, 6)


def test_a_stretch_of_the_flattened_parameter_is_the_head_of_a_row_rows_and_a_tail() -> None:
    patch = Patch("w", (8, 3), (2, 0), (0, 0), (4, 3))
    cut = cut_patches([patch], (4, 3), 1, 10)
    assert [(part.offset, part.shape) for part in cut] == [((0, 1), (1, 2)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    assert [part.whole_offset for part in cut] == [(2, 1), (3, 0), (5, 0)]
    assert cut_patches([patch], (4, 3), 4, 5)[0].shape == (1, 1)
