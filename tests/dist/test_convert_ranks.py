"""Converted checkpoints are Megatron's own format: Megatron's loader fills shards from them, and we read what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from safetensors.torch import load_file
from torch import Tensor

from megarl import device
from megarl.cli import main
from megarl.models.build import BuildOptions, build_chunks, named_weights
from megarl.models.layers import SwiGLU
from megarl.models.layout import Family, ModelSpec, plan_stage
from megarl.models.registry import read_model_spec
from megarl.parallel.groups import GroupCache, RoleGroups, build_groups
from megarl.parallel.topology import plan_topology
from megarl.trainer.roles import build_role
from megarl.trainer.sharded_folder import finish_folder, plan_folder
from megarl.weights.hf import HFFolder, load_shard
from megarl.weights.patches import plan_patches, plan_whole_model
from tests.ranks import run_ranks
from tests.tiny import save_hf_model
from tests.tiny_task import WORDS, write_job

pytestmark = pytest.mark.timeout(600)


def there(folder: str, out: Path, *words: str) -> None:
    assert main(["convert", "hf-to-megatron", "--hf", folder, "--out", str(out), *words]) == 0


def load_everywhere(
    rank: int, world_size: int, hf: str, ckpt: str, out: str, tp: int = 2, pp: int = 2
) -> tuple[list[str], list[str]]:
    """Fills this rank's shard of TP2 × PP2 with Megatron's loader, and by a role; names that differ from Hugging Face's."""
    cache = GroupCache(timeout_s=100)
    groups = build_groups(plan_topology("actor", world_size, tp, pp), cache)
    assert groups is not None
    family, spec = read_model_spec(hf)
    layouts = plan_stage(family, spec, tp, groups.at.tp, pp, groups.at.pp)
    expected = {layout.name: torch.zeros(layout.shape) for layout in layouts}
    load_shard(HFFolder(hf, family), layouts, expected)
    loaded = {layout.name: torch.zeros(layout.shape) for layout in layouts}
    whole = plan_whole_model(family, spec, "policy")
    shards: dict[str, Any] = {}
    targets: list[tuple[Tensor, Tensor]] = []
    for layout in layouts:
        for number, patch in enumerate(plan_patches(layout, whole)):
            part = loaded[layout.name][tuple(slice(a, a + n) for a, n in zip(patch.offset, patch.shape, strict=True))]
            shards[f"{layout.name}.{number}"] = ShardedTensor(
                key=patch.key, data=torch.empty(patch.whole_extent), dtype=torch.float32, local_shape=patch.whole_extent,
                global_shape=patch.whole_shape, global_offset=patch.whole_offset, axis_fragmentations=None,
            )  # fmt: skip
            targets.append((part, shards[f"{layout.name}.{number}"].data))
    with device.megatron_scope():
        dist_checkpointing.load(shards, ckpt, validate_access_integrity=False)
    for part, values in targets:
        part.copy_(values.reshape(part.shape))
    wrong = [name for name, tensor in expected.items() if not torch.equal(tensor, loaded[name])]

    role = build_role("actor", groups, ckpt, BuildOptions(dtype=torch.float32), max_tokens=64)
    assert role is not None
    by_role = [name for name, tensor in role.weights().items() if not torch.equal(tensor, expected[name])]
    save_as_megatron_does(role.weights(), groups, Path(out), family, spec)
    return wrong, by_role


def save_as_megatron_does(
    weights: dict[str, Tensor], groups: RoleGroups, out: Path, family: Family, spec: ModelSpec
) -> None:
    """A folder under the names and in the shapes of Megatron's own sharded_state_dict, padding included; a collective."""
    chunks = build_chunks(spec, groups, BuildOptions(dtype=torch.float32))
    for name, tensor in named_weights(chunks).items():
        tensor.copy_(weights[name])
    SwiGLU.sharded_state_dict = lambda *args, **kwargs: {}  # pyright: ignore[reportAttributeAccessIssue]
    with device.megatron_scope():
        metadata = {"dp_cp_group": groups.collection.dp_cp, "non_homogeneous_layers": True}
        parallel_state._DATA_PARALLEL_GROUP_WITH_CP = groups.collection.dp_cp  # a tied head's state asks it, not metadata
        state = chunks[0].sharded_state_dict(metadata=metadata)
        parallel_state._DATA_PARALLEL_GROUP_WITH_CP = None
    apply_factories(state)
    shards = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
    if torch.distributed.get_rank() == 0:
        out.mkdir()
    torch.distributed.barrier()
    pending = plan_folder(shards, out)
    pending.write()
    finish_folder(pending)


@pytest.mark.parametrize(("family", "is_tied"), [("qwen2", True), ("qwen3", False)])
def test_megatron_reads_ours_and_we_read_megatrons(tmp_path, family: str, is_tied: bool) -> None:
    path = save_hf_model(tmp_path / "model", family, tie_word_embeddings=is_tied)
    there(path, tmp_path / "ckpt", "--pp", "3")
    results = run_ranks(
        load_everywhere, 4, path, str(tmp_path / "ckpt"), str(tmp_path / "saved"), timeout_s=300
    )  # fmt: skip
    assert results == [([], [])] * 4
    words = ["--ckpt", str(tmp_path / "saved"), "--out", str(tmp_path / "back"), "--hf", path]
    assert main(["convert", "megatron-to-hf", *words]) == 0
    stored, back = load_file(Path(path) / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert stored.keys() == back.keys()
    assert all(torch.equal(tensor, back[name]) for name, tensor in stored.items())


ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "length"),
    [
        ("mistral", {}, 60),
        ("qwen2", {"tie_word_embeddings": True}, 60),
        ("qwen3", {}, 60),
        ("llama", {"rope_parameters": ROPES["llama3"]}, 6001),
        ("llama", {"rope_parameters": ROPES["linear"]}, 6001),
    ],
    ids=["mistral", "qwen2", "qwen3", "llama3-rope", "linear-rope"],
)
def test_the_logits_of_both_forms_agree(
    tmp_path, capsys, family: str, changes: dict[str, Any], length: int
) -> None:  # case A10
    write_job(tmp_path, family, vocab_size=len(WORDS) + 8, max_position_embeddings=8192, **changes)
    there(str(tmp_path / "model"), tmp_path / "ckpt", "--tp", "2", "--pp", "2")
    text = " ".join("abcdefghijklmnopqrs"[i * i % 19] for i in range(length))
    words = ["convert", "check", str(tmp_path / "model"), str(tmp_path / "ckpt"), "--text", text]
    assert main(words) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert f"logits of {length} tokens" in told
    assert float(told.split("largest difference ")[1].split(",")[0]) < 1e-4
