"""Hugging Face folders in and out, without ranks: every shard of every grid is filled by slices and put together."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.models.layout import VALUE_HEAD, HeadKind, hf_shapes, plan_stage
from megarl.models.registry import read_model_spec, spec_from_config
from megarl.weights.hf import HFFolder, check_folder, load_shard, save_hf_folder
from tests.tiny import build_hf_model, save_hf_model


def round_trip(path: str, tp: int, pp: int, head: HeadKind = "policy") -> dict[str, Tensor]:
    """Loads all shards of a grid and writes their slices into whole tensors again; NaN where nothing was written."""
    family, spec = read_model_spec(path)
    source = HFFolder(path, family)
    check_folder(source, family, spec, head)
    whole = {name: torch.full(shape, torch.nan) for name, shape in hf_shapes(family, spec, head).items()}
    for tp_rank, stage in itertools.product(range(tp), range(pp)):
        layouts = plan_stage(family, spec, tp, tp_rank, pp, stage, head)
        shard = {layout.name: torch.full(layout.shape, torch.nan) for layout in layouts}
        fresh = load_shard(source, layouts, shard)
        for layout in layouts:
            if layout.name not in fresh:
                assert not shard[layout.name].isnan().any(), f"{layout.name} has rows that nobody filled"
            for piece in layout.slices:
                target = whole[piece.hf_name].narrow(piece.axis, piece.hf_start, piece.length)
                target.copy_(shard[layout.name].narrow(piece.axis, piece.start, piece.length))
    return whole


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize(("family", "is_tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_round_trip_is_exact(tmp_path, family: str, is_tied: bool, tp: int, pp: int) -> None:  # cases A1, A6, A7
    path = save_hf_model(tmp_path / "model", family, tie_word_embeddings=is_tied)
    stored = load_file(Path(path) / "model.safetensors")
    back = round_trip(path, tp, pp)
    assert back.keys() == stored.keys()
    assert ("lm_head.weight" in back) != is_tied
    for name, tensor in stored.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "transformer."])
def test_an_unusual_prefix_makes_no_difference(tmp_path, prefix: str) -> None:  # case A1
    path = Path(save_hf_model(tmp_path / "model", "llama", tie_word_embeddings=False))
    stored = load_file(path / "model.safetensors")
    renamed = {
        prefix + name.removeprefix("model.") if name != "lm_head.weight" else "language_model.lm_head.weight": tensor
        for name, tensor in stored.items()
    }
    save_file(renamed, path / "model.safetensors")
    back = round_trip(str(path), 2, 2)
    assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("pp", [1, 2])
def test_a_critic_from_a_tied_policy_without_a_head(tmp_path, pp: int) -> None:  # case A2
    path = Path(save_hf_model(tmp_path / "model", "llama", tie_word_embeddings=True))
    family, spec = read_model_spec(path)
    source = HFFolder(path, family)
    check_folder(source, family, spec, "value")
    layouts = plan_stage(family, spec, 1, 0, pp, pp - 1, "value")
    shard = {layout.name: torch.zeros(layout.shape) for layout in layouts}
    assert load_shard(source, layouts, shard) == ["output_layer.weight"]
    stored = load_file(path / "model.safetensors")
    assert torch.equal(round_trip(str(path), 1, pp, "value")["model.norm.weight"], stored["model.norm.weight"])

    saved = tmp_path / "critic"
    tensors = {**round_trip(str(path), 1, pp, "value"), VALUE_HEAD: torch.full((1, 128), 0.5)}
    save_hf_folder(tensors.items(), saved, path, torch.float32)
    assert torch.equal(round_trip(str(saved), 1, pp, "value")[VALUE_HEAD], torch.full((1, 128), 0.5))


def test_missing_unknown_and_misshapen_tensors_are_listed_at_once(tmp_path) -> None:  # case A2
    path = Path(save_hf_model(tmp_path / "model", "llama", tie_word_embeddings=True))
    stored = load_file(path / "model.safetensors")
    stored["model.extra.weight"] = torch.zeros(2)
    stored["model.norm.weight"] = torch.zeros(3)
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ValueError, match="does not hold this model") as error:
        round_trip(str(path), 1, 1, "value")
    for words in (
        "missing tensor model.layers.1.mlp.up_proj.weight [256, 128]",
        "model.norm.weight has shape [3]",
        "unknown tensor model.extra.weight",
    ):
        assert words in str(error.value)


def test_a_folder_in_several_shards_and_a_truncated_file(tmp_path) -> None:  # case A9
    model = build_hf_model("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    back = round_trip(str(tmp_path / "shards"), 2, 2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(back[name], tensor), name
    file = sorted((tmp_path / "shards").glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=file.name):
        round_trip(str(tmp_path / "shards"), 1, 1)


def test_no_safetensors_is_explained(tmp_path) -> None:
    path = Path(save_hf_model(tmp_path / "model", "llama"))
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors only"):
        round_trip(str(path), 1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_header_and_config_name_the_dtype_asked_for(tmp_path, dtype: torch.dtype) -> None:  # case A13
    path = save_hf_model(tmp_path / "model", "qwen2")
    out = tmp_path / "out"
    save_hf_folder(((name, t.bfloat16()) for name, t in round_trip(path, 1, 1).items()), out, path, dtype)
    tensors = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_save_that_breaks_off_leaves_the_old_folder(tmp_path) -> None:
    path = save_hf_model(tmp_path / "model", "qwen2")
    out = tmp_path / "out"
    tensors = round_trip(path, 1, 1)
    save_hf_folder(tensors.items(), out, path, torch.float32)

    def breaking():
        yield next(iter(tensors.items()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_hf_folder(breaking(), out, path, torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='dynamic'"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, words: str) -> None:  # case A10
    from transformers import LlamaConfig

    with pytest.raises(ValueError, match="is not supported") as error:
        spec_from_config(LlamaConfig(**changes), "here")
    assert words in str(error.value)
