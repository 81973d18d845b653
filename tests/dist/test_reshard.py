"""The transfer between gloo ranks: every element where whole tensors say it belongs, in one bucket, every byte once.

Each case fills the trainer's shards from whole random tensors, runs the compiled transfer into engine parameters that
hold NaN, and compares with plain slicing of the same tensors. One job of four ranks runs all cases.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.layout import ModelSpec, hf_shapes, plan_stage
from megarl.models.registry import FAMILIES
from megarl.parallel.topology import Order, Topology
from megarl.weights.blocks import list_engine_shards, list_engines, list_trainer_shards
from megarl.weights.checksum import compute_checksum
from megarl.weights import reshard
from megarl.weights.plan import plan_reshard
from megarl.weights.reshard import Resharder, build_resharder
from megarl.weights.sync import Verify, WeightSync, open_weight_sync
from tests.ranks import RankFailed, run_ranks

LLAMA = ModelSpec(
    family="llama", num_layers=5, hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, ffn_size=96,
    vocab_size=330, norm_eps=1e-5, max_positions=64, is_tied=False,
)  # fmt: skip
SPECS = {
    "llama": LLAMA,
    "llama-tied": dataclasses.replace(LLAMA, is_tied=True),
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", has_qkv_bias=True, is_tied=True),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", has_qk_norm=True),
}
GRIDS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2pp2": (2, 2), "uneven": (1, 4)}  # tp, pp; dp = the rest
FP32, BF16 = torch.float32, torch.bfloat16
SMALL_BUCKET = 8 << 10

Result = dict[str, Any]


def make_whole(spec: ModelSpec, version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    shapes = hf_shapes(FAMILIES[spec.family], spec)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shard(spec: ModelSpec, topology: Topology, rank: int, whole: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """The actor's parameters of one rank; padding is NaN, which must reach nobody."""
    at = topology.coordinates(rank)
    held: dict[str, Tensor] = {}
    for layout in plan_stage(FAMILIES[spec.family], spec, topology.tp_size, at.tp, topology.pp_size, at.pp):
        local = torch.full(layout.shape, torch.nan, dtype=dtype)
        for piece in layout.slices:
            part = whole[piece.hf_name].narrow(piece.axis, piece.hf_start, piece.length)
            local.narrow(piece.axis, piece.start, piece.length).copy_(part)
        held[layout.name] = local
    return held


def expect(spec: ModelSpec, tp_size: int, tp_rank: int, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """What vLLM's loader makes of whole tensors, restated: rows of q, k, v, halves of gate and up, columns."""

    def cut(name: str, axis: int) -> Tensor:
        return whole[name].chunk(tp_size, axis)[tp_rank]

    def cut_heads(name: str) -> Tensor:
        replicas = max(1, tp_size // spec.num_kv_heads)
        return whole[name].chunk(min(tp_size, spec.num_kv_heads), 0)[tp_rank // replicas]

    def cut_vocab(name: str) -> Tensor:
        padded = torch.zeros(-(-spec.vocab_size // 64) * 64, spec.hidden_size)
        padded[: spec.vocab_size] = whole[name]
        return padded.chunk(tp_size, 0)[tp_rank]

    found = {"model.embed_tokens.weight": cut_vocab("model.embed_tokens.weight")}
    if not spec.is_tied:
        found["lm_head.weight"] = cut_vocab("lm_head.weight")
    found["model.norm.weight"] = whole["model.norm.weight"]
    for layer in range(spec.num_layers):
        base = f"model.layers.{layer}."
        attention, mlp = base + "self_attn.", base + "mlp."
        for kind in ("weight", "bias") if spec.has_qkv_bias else ("weight",):
            q, k, v = (f"{attention}{each}_proj.{kind}" for each in "qkv")
            found[f"{attention}qkv_proj.{kind}"] = torch.cat([cut(q, 0), cut_heads(k), cut_heads(v)])
        if spec.has_qk_norm:
            found |= {f"{attention}{x}_norm.weight": whole[f"{attention}{x}_norm.weight"] for x in "qk"}
        found[attention + "o_proj.weight"] = cut(attention + "o_proj.weight", 1)
        gate, up = cut(mlp + "gate_proj.weight", 0), cut(mlp + "up_proj.weight", 0)
        found[mlp + "gate_up_proj.weight"] = torch.cat([gate, up])
        found[mlp + "down_proj.weight"] = cut(mlp + "down_proj.weight", 1)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            found[base + norm] = whole[base + norm]
    return found


def run_case(
    rank: int,
    world_size: int,
    name: str,
    grid: tuple[int, int],
    engine_tp: int,
    dtypes: Any,
    per_node: int,
    direct_bytes: int = 256 << 10,
    order: Order = "tp-dp-pp",
) -> Result:
    """Three transfers of different weights, one after the other, into the same live parameters."""
    spec, (tp, pp) = SPECS[name], grid
    actor = Topology(
        tuple(range(world_size)), tp_size=tp, pp_size=pp, dp_size=world_size // (tp * pp), order=order
    )
    engines = Topology(tuple(range(world_size)), tp_size=engine_tp, dp_size=world_size // engine_tp)
    reshard.DIRECT_BYTES = direct_bytes
    assert dist.group.WORLD is not None
    sync = open_weight_sync(
        FAMILIES[spec.family], spec, actor, engines, rank, dist.group.WORLD,
        trainer_dtype=dtypes[0], engine_dtype=dtypes[1], ranks_per_node=per_node, bucket_bytes=SMALL_BUCKET,
        verify="never",
    )  # fmt: skip
    tp_rank = rank % engine_tp
    live = {
        key: torch.full(tensor.shape, torch.nan, dtype=dtypes[1])
        for key, tensor in expect(spec, engine_tp, tp_rank, make_whole(spec, 0)).items()
    }
    places = {key: tensor.data_ptr() for key, tensor in live.items()}
    wrong: list[str] = []
    for version in (1, 2, 3):
        whole = make_whole(spec, version)
        trained = shard(spec, actor, rank, whole, dtypes[0])
        sync.run(trained, live, dict)
        for key, tensor in expect(spec, engine_tp, tp_rank, whole).items():
            if not torch.equal(live[key], tensor.to(dtypes[0]).to(dtypes[1])):
                wrong.append(f"{key} in version {version}")
        sent = sync.compute_sent_checksums(trained)
        for key, tensor in whole.items():
            if sent[key] != compute_checksum(tensor.to(dtypes[0]).to(dtypes[1])):
                wrong.append(f"checksum of {key}")
    assert places == {key: tensor.data_ptr() for key, tensor in live.items()}
    stats = sync.resharder.stats
    return {
        "wrong": wrong,
        "received": stats.received_bytes,
        "minimum": stats.minimum_bytes,
        "staging": sync.resharder.staging_bytes,
        "rounds": stats.num_rounds,
        "messages": sum(len(part.receives) for part in sync.resharder.rounds),
        "direct": sum(message.parameter is not None for part in sync.resharder.rounds for message in part.receives),
    }


def list_cases() -> dict[str, tuple[Any, ...]]:
    cases: dict[str, tuple[Any, ...]] = {}
    for grid_name, grid in GRIDS.items():
        for engine_tp in (1, 2, 4):
            name = list(SPECS)[len(cases) % len(SPECS)]
            cases[f"{name} {grid_name} engine tp{engine_tp}"] = (name, grid, engine_tp, (FP32, FP32), 4)
    for name in SPECS:
        cases[f"{name} tp2pp2 engine tp1, two nodes"] = (name, (2, 2), 1, (FP32, FP32), 2)
    cases["fp32 to bf16"] = ("qwen2", (2, 2), 2, (FP32, BF16), 2)
    cases["bf16 to fp32"] = ("qwen2", (1, 2), 2, (BF16, FP32), 2)
    cases["bf16 to bf16"] = ("qwen3", (2, 1), 1, (BF16, BF16), 1)
    cases["replicas side by side"] = ("llama-tied", (2, 1), 4, (FP32, FP32), 4, 256 << 10, "dp-tp-pp")
    for grid_name in ("pp2", "tp2pp2"):
        for per_node in (2, 4):
            direct = ("qwen2", GRIDS[grid_name], 1, (FP32, FP32), per_node, 64)
            cases[f"runs of 64 bytes and more without staging, {grid_name}, {per_node} ranks a node"] = direct
    return cases


CASES = list_cases()


def all_cases(rank: int, world_size: int) -> dict[str, Result]:
    return {key: run_case(rank, world_size, *case) for key, case in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Result]]:
    return run_ranks(all_cases, 4, timeout_s=200)


@pytest.mark.parametrize("case", CASES)
def test_live_parameters_hold_what_slicing_gives_after_each_of_three_transfers(
    results: list[dict[str, Result]], case: str
) -> None:
    assert [found[case]["wrong"] for found in results] == [[], [], [], []]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_receives_what_it_lacks_and_no_byte_more(results: list[dict[str, Result]], case: str) -> None:
    for found in results:
        assert found[case]["received"] == found[case]["minimum"]


@pytest.mark.parametrize("case", CASES)
def test_staging_fits_one_bucket_and_messages_grow_with_its_contents(
    results: list[dict[str, Result]], case: str
) -> None:
    for found in results:
        assert found[case]["staging"] <= SMALL_BUCKET
        full = found[case]["received"] / (SMALL_BUCKET / 4)
        assert found[case]["messages"] - found[case]["direct"] <= 4 * full + 12


def test_replicas_side_by_side_keep_what_megatrons_order_must_receive(results: list[dict[str, Result]]) -> None:
    usual, chosen = (
        sum(found[case]["received"] for found in results) for case in ("llama-tied tp2 engine tp4", "replicas side by side")
    )
    assert chosen < 0.5 * usual


def test_long_runs_travel_without_staging(results: list[dict[str, Result]]) -> None:
    for case in CASES:
        assert any(found[case]["direct"] for found in results) == ("without staging" in case)


def drop_a_message(resharder: Resharder) -> None:
    """The last round comes, but is not written."""
    last = resharder.rounds[-1]
    empty = dataclasses.replace(last.unpack, segments=last.unpack.segments[:0])
    broken = dataclasses.replace(last, unpack=empty)
    object.__setattr__(resharder, "rounds", (*resharder.rounds[:-1], broken))


def proof_job(rank: int, world_size: int) -> list[str]:
    """What a proof says: of a sound transfer, of one with a lost message on rank 1, and of the later ones."""
    spec = SPECS["qwen2"]
    actor = Topology((0, 1), pp_size=2)
    engines = Topology((0, 1), dp_size=2)
    said: list[str] = []
    cases: list[tuple[Verify, bool]] = [("first", False), ("first", True), ("always", True), ("never", True)]
    for verify, is_broken in cases:
        assert dist.group.WORLD is not None
        sync: WeightSync = open_weight_sync(
            FAMILIES[spec.family], spec, actor, engines, rank, dist.group.WORLD,
            trainer_dtype=FP32, engine_dtype=FP32, ranks_per_node=2, bucket_bytes=SMALL_BUCKET, verify=verify,
        )  # fmt: skip
        live = {key: torch.zeros_like(value) for key, value in expect(spec, 1, 0, make_whole(spec, 0)).items()}

        def checksums(live: dict[str, Tensor] = live) -> dict[str, int]:
            found = {key: compute_checksum(value) for key, value in split_fused(spec, live).items()}
            return found

        for version in (1, 2):
            if version == 2 or verify == "first":
                if is_broken and rank == 1 and sync.resharder.rounds[-1].unpack.segments.numel():
                    drop_a_message(sync.resharder)
            try:
                sync.run(shard(spec, actor, rank, make_whole(spec, version), FP32), live, checksums)
                said.append(f"{verify} {is_broken} {version}: fine")
            except RuntimeError as error:
                said.append(f"{verify} {is_broken} {version}: {error}")
    return said


def split_fused(spec: ModelSpec, live: dict[str, Tensor]) -> dict[str, Tensor]:
    """Engine parameters at TP 1 as Hugging Face tensors."""
    found: dict[str, Tensor] = {}
    sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
    for name, tensor in live.items():
        if "qkv_proj" in name:
            parts = zip("qkv", tensor.split(sizes), strict=True)
            found |= {name.replace("qkv_proj", f"{x}_proj"): part for x, part in parts}
        elif "gate_up" in name:
            gate, up = tensor.chunk(2)
            found |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            found[name] = tensor[: spec.vocab_size] if "embed" in name else tensor
    return found


def test_a_lost_message_is_found_when_the_transfer_is_proved() -> None:
    whole, broken = run_ranks(proof_job, 2, timeout_s=100)
    failing = [2, 5]  # the first transfer under "first", the second under "always"
    for number, line in enumerate(broken):
        if number in failing:
            assert "tensors differ between actor and engine, first on this rank: model." in line
            assert "none of them on this rank" in whole[number]
        else:
            assert line.endswith("fine")
            assert whole[number].endswith("fine")


def dying_job(rank: int, world_size: int) -> None:
    """Rank 1 is gone after its first round; the other must not wait for ever."""
    spec = SPECS["llama"]
    actor, engines = Topology((0, 1), pp_size=2), Topology((0, 1), dp_size=2)
    family = FAMILIES[spec.family]
    plan = plan_reshard(
        list_trainer_shards(family, spec, actor), list_engine_shards(family, spec, list_engines((0, 1), 1)), 2
    )
    assert dist.group.WORLD is not None
    resharder = build_resharder(plan, rank, dist.group.WORLD, FP32, FP32, SMALL_BUCKET)
    assert len(resharder.rounds) > 4
    live = {key: torch.zeros_like(value) for key, value in expect(spec, 1, 0, make_whole(spec, 0)).items()}
    if rank == 1:
        object.__setattr__(resharder, "rounds", resharder.rounds[:2])
    resharder.run(shard(spec, actor, rank, make_whole(spec, 1), FP32), live)
    if rank == 1:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_in_the_middle_ends_the_transfer_of_the_others() -> None:
    with pytest.raises(RankFailed, match="closed by peer|reset by peer|SIGKILL"):
        run_ranks(dying_job, 2, timeout_s=60)
