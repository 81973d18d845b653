"""From Megatron models on any grid into live vLLM engines: what the engines answer is what transformers computes.

One job of four ranks. For each model and engine TP one engine is built; then actors on five grids, each with weights of
its own, hand theirs over one after the other. After each transfer the engine's greedy tokens and log-probs are compared
with transformers on the same weights, and its checksums with those of the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.parallel.topology import Topology
from megarl.records import Rollout
from megarl.weights.checksum import compute_checksum
from tests.dist.test_vllm_engine import GREEDY, PROMPTS, compute_logits, largest_gap
from tests.ranks import run_ranks
from tests.tiny import build_hf_model

pytestmark = pytest.mark.timeout(900)

WORLD = 4
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tie_word_embeddings": False},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": False},
    "qwen2-tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "tie_word_embeddings": False},
}
LAYERS = 5  # over four stages: 2 1 1 1
GRIDS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2pp2": (2, 2), "uneven": (1, 4)}  # tp, pp; dp = the rest
ENGINES = [
    ("llama", 1), ("llama-tied", 1), ("qwen2", 1), ("qwen3", 1),
    ("llama-tied", 2), ("qwen2", 2), ("qwen3", 2),
    ("llama", 4), ("qwen2-tied", 4), ("qwen3", 4),  # two key-value heads: replicated
]  # fmt: skip
SHARED = [("llama-tied", 1), ("qwen3", 2)]


def build_version(name: str, grid: str) -> Any:
    """The transformers model that an actor on `grid` starts from: every grid has weights of its own."""
    changes = dict(MODELS[name])
    model = build_hf_model(changes.pop("family"), num_hidden_layers=LAYERS, **changes)
    generator = torch.Generator().manual_seed(list(GRIDS).index(grid))
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + 0.2 * noise if "norm" in key else 0.15 * noise)
    return model


def share(engine: Any, engines: Topology, rank: int, cache: Any, folder: str) -> dict[str, Any]:
    """The engine's parameters are the actor's storage where both have one layout; then the actor's values change."""
    import torch.distributed as dist

    from megarl.models.build import BuildOptions
    from megarl.models.registry import read_model_spec
    from megarl.parallel.groups import build_groups
    from megarl.trainer.roles import build_role
    from megarl.weights.hf import HFFolder, load_shard
    from megarl.weights.sync import open_weight_sync

    tp_size = engines.tp_size
    actor = Topology(engines.ranks, tp_size=tp_size, dp_size=engines.dp_size)
    options = BuildOptions(dtype=torch.float32, head="policy")
    role = build_role("actor", build_groups(actor, cache), f"{folder}/tp1", options, max_tokens=512)
    assert role is not None
    assert dist.group.WORLD is not None
    sync = open_weight_sync(
        role.family, role.spec, actor, engines, rank, dist.group.WORLD,
        trainer_dtype=torch.float32, engine_dtype=torch.float32, ranks_per_node=2, verify="always", shares=True,
    )  # fmt: skip
    weights = role.weights()
    freed = engine.share_weights({name: weights[source] for name, source in sync.resharder.shared.items()})
    family, _ = read_model_spec(folder + "/pp2")
    load_shard(HFFolder(folder + "/pp2", family), role.layouts, weights)  # as an update would, in place
    sync.run(weights, engine.open_weights(), engine.checksums)
    engine.publish_weights(9)
    return {"freed": freed, "shared": sorted(sync.resharder.shared), "answers": engine.generate(PROMPTS, GREEDY)}


def transfer_job(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    """What each engine answers after each transfer, and its checksums."""
    import torch.distributed as dist

    from megarl.models.build import BuildOptions
    from megarl.parallel.groups import GroupCache, build_groups
    from megarl.rollout.vllm_engine import build_vllm_engine
    from megarl.trainer.roles import build_role
    from megarl.weights.sync import open_weight_sync

    cache = GroupCache(120)
    found: dict[str, dict[str, Any]] = {}
    ranks = tuple(range(world_size))
    for name, engine_tp in ENGINES:
        engines = Topology(ranks, tp_size=engine_tp, dp_size=world_size // engine_tp)
        engine = build_vllm_engine(
            f"{folder}/{name}/tp1", engines, rank,
            dtype=torch.float32, max_model_len=64, max_num_seqs=16, kv_cache_gib=0.02,
        )  # fmt: skip
        for version, (grid, (tp, pp)) in enumerate(GRIDS.items()):
            actor = Topology(ranks, tp_size=tp, pp_size=pp, dp_size=world_size // (tp * pp))
            options = BuildOptions(dtype=torch.float32, head="policy")
            role = build_role("actor", build_groups(actor, cache), f"{folder}/{name}/{grid}", options, max_tokens=512)
            assert role is not None
            assert dist.group.WORLD is not None
            sync = open_weight_sync(
                role.family, role.spec, actor, engines, rank, dist.group.WORLD,
                trainer_dtype=torch.float32, engine_dtype=torch.float32, ranks_per_node=2,
            )  # fmt: skip
            sync.run(role.weights(), engine.open_weights(), engine.checksums)
            engine.publish_weights(version)
            key = f"{name} {grid} engine tp{engine_tp}"
            found[key] = {"answers": engine.generate(PROMPTS, GREEDY), "checksums": engine.checksums()}
        if (name, engine_tp) in SHARED:
            found[f"{name} shared"] = share(engine, engines, rank, cache, f"{folder}/{name}")
        engine.close()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder: Path = tmp_path_factory.mktemp("transfers")
    for name in MODELS:
        for grid in GRIDS:
            build_version(name, grid).save_pretrained(folder / name / grid)
    return run_ranks(transfer_job, WORLD, str(folder), timeout_s=600)


@pytest.mark.parametrize(("name", "engine_tp"), ENGINES)
@pytest.mark.parametrize("grid", GRIDS)
def test_engine_answers_as_transformers_does_with_the_actors_weights(
    results: list[dict[str, dict[str, Any]]], name: str, engine_tp: int, grid: str
) -> None:
    model = build_version(name, grid)
    for rank in (0, WORLD - 1):
        found = results[rank][f"{name} {grid} engine tp{engine_tp}"]
        answers: list[Rollout] = found["answers"]
        for rollout in answers:
            best = compute_logits(model, PROMPTS[rollout.prompt_index], rollout).argmax(-1)
            assert rollout.token_ids == tuple(best.tolist())
            assert rollout.weights_version == list(GRIDS).index(grid)
        assert largest_gap(model, answers, 1.0) < 1e-3
        expected = {key: compute_checksum(tensor) for key, tensor in model.named_parameters()}
        assert found["checksums"] == expected


@pytest.mark.parametrize("name", [name for name, _ in SHARED])
def test_shared_parameters_exist_once_and_follow_the_actor(
    results: list[dict[str, dict[str, Any]]], name: str
) -> None:
    model = build_version(name, "pp2")
    for rank in (0, WORLD - 1):
        found = results[rank][f"{name} shared"]
        assert largest_gap(model, found["answers"], 1.0) < 1e-3
        shared = [each.split(".", 3)[-1] for each in found["shared"]]
        assert {"self_attn.o_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight"} <= set(shared)
        width = 256 // (2 if name == "qwen3" else 1)
        assert found["freed"] >= LAYERS * 3 * 128 * width * 4, "at least every MLP"


def test_the_weights_of_the_grids_differ() -> None:
    """Otherwise a transfer that moves nothing would pass."""
    first, second = (build_version("llama", grid).lm_head.weight for grid in ("tp1", "tp2"))
    assert not torch.equal(first, second)
