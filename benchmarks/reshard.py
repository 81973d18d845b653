"""The weight transfer between gloo ranks into live vLLM engines, against gathering everything and against a raw copy.

    python -m benchmarks.reshard [--rounds 5]

Every case starts ranks, fills the trainer's shards of a model with random numbers, builds real vLLM engines, and times
in turns, each between two barriers:

    ours        the planned transfer into the engines' live parameters
    gather      every tensor made whole on every rank under its Hugging Face name, handed to vLLM's `load_weights`
    raw         the same bytes out of and into flat buffers: what ranks send each other as one message a pair, all in
                one batch, and what a rank keeps as one memcpy meanwhile
    wire        only the first half of raw: what is kept left out

What makes new weights take effect on a CPU (packing them for its matrix kernels) is the same for both and left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import MIB, measure_peak_bytes, report
from megarl.models.layout import plan_stage
from megarl.models.registry import read_model_spec
from megarl.parallel.topology import Topology
from megarl.weights.gather import gather_hf_tensors
from megarl.weights.reshard import Resharder
from megarl.weights.sync import open_weight_sync
from tests.ranks import run_ranks

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
TINY = LLAMA | {
    "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SMOLLM2 = TINY | {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
WIDE = TINY | {
    "num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One transfer: a model and both grids over `world` ranks."""

    name: str
    config: dict[str, Any]
    world: int
    tp: int
    pp: int
    engine_tp: int


CASES = (
    Case("tiny_1", TINY, 1, 1, 1, 1),
    Case("tiny_2", TINY, 2, 2, 1, 1),
    Case("tiny_4", TINY, 4, 2, 2, 1),
    Case("smollm2_pp2_to_2_engines", SMOLLM2, 2, 1, 2, 1),
    Case("wide_tp2_to_tp2", WIDE, 2, 2, 1, 2),
    Case("wide_tp2pp2_to_tp4", WIDE, 4, 2, 2, 4),
    Case("wide_tp2pp2_to_tp2", WIDE, 4, 2, 2, 2),
    Case("wide_tp2pp2_to_tp1", WIDE, 4, 2, 2, 1),
)
HEADLINE = "smollm2_pp2_to_2_engines"


def run_case(rank: int, world_size: int, folder: str, case: Case, rounds: int) -> dict[str, float]:
    """Figures of one rank."""
    from megarl.rollout.vllm_engine import build_vllm_engine

    ranks = tuple(range(world_size))
    dtype = torch.bfloat16
    actor = Topology(ranks, tp_size=case.tp, pp_size=case.pp, dp_size=world_size // (case.tp * case.pp))
    engines = Topology(ranks, tp_size=case.engine_tp, dp_size=world_size // case.engine_tp)
    engine: Any = build_vllm_engine(
        folder, engines, rank, dtype=dtype, max_model_len=64, max_num_seqs=4, kv_cache_gib=0.02
    )
    family, spec = read_model_spec(folder)
    at = actor.coordinates(rank)
    layouts = plan_stage(family, spec, actor.tp_size, at.tp, actor.pp_size, at.pp)
    trained = {layout.name: torch.randn(layout.shape).to(dtype) for layout in layouts}
    assert dist.group.WORLD is not None
    begin = time.perf_counter()
    sync = open_weight_sync(
        family, spec, actor, engines, rank, dist.group.WORLD,
        trainer_dtype=dtype, engine_dtype=dtype, ranks_per_node=world_size, verify="never",
    )  # fmt: skip
    plan_s = time.perf_counter() - begin
    resharder = sync.resharder
    live = engine.open_weights()

    def gather() -> None:
        engine._model.load_weights(gather_hf_tensors(family, spec, actor, trained, dtype, torch.device("cpu")))

    with torch.no_grad():
        times = time_between_barriers(
            {
                "ours": lambda: resharder.run(trained, live),
                "raw": build_raw_copy(resharder, resharder.stats.kept_bytes),
                "wire": build_raw_copy(resharder, 0),
                "gather": gather,
            },
            rounds,
        )
        peaks = {}
        for name, call in (("ours", lambda: resharder.run(trained, live)), ("gather", gather)):
            dist.barrier()
            peaks[f"{name}_extra_peak_mib"] = measure_peak_bytes(call) / MIB
            dist.barrier()
    stats = resharder.stats
    written = count_written(resharder)
    needed = sum(tensor.numel() for tensor in live.values()) - sum(shard.num_padding for shard in sync._shards)
    return {
        **{f"{name}_ms": value * 1e3 for name, value in times.items()},
        **peaks,
        "received_mib": stats.received_bytes / MIB,
        "minimum_mib": stats.minimum_bytes / MIB,
        "kept_mib": stats.kept_bytes / MIB,
        "direct_share": written / needed,
        "staging_mib": resharder.staging_bytes / MIB,
        "rounds": float(stats.num_rounds),
        "plan_s": plan_s,
    }


def count_written(resharder: Resharder) -> int:
    """Elements of live parameters that one run writes."""
    steps = [resharder.local, *(part.unpack for part in resharder.rounds)]
    copied = sum(int((step.segments[:, 6] * step.segments[:, 7]).sum()) for step in steps)
    received = (message for part in resharder.rounds for message in part.receives)
    return copied + sum(message.count for message in received if message.parameter is not None)


def build_raw_copy(resharder: Resharder, kept_bytes: int) -> Callable[[], None]:
    """The same bytes between the same ranks, from and into buffers of its own."""
    kept, copied = torch.zeros(kept_bytes, dtype=torch.uint8), torch.zeros(kept_bytes, dtype=torch.uint8)
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for part in resharder.rounds:
        for message in part.sends:
            sent[message.peer] += message.count
        for message in part.receives:
            received[message.peer] += message.count
    outgoing = {peer: torch.zeros(count, dtype=torch.bfloat16) for peer, count in sent.items()}
    incoming = {peer: torch.zeros(count, dtype=torch.bfloat16) for peer, count in received.items()}

    def run() -> None:
        batch = [dist.P2POp(dist.irecv, buffer, peer, resharder.group) for peer, buffer in incoming.items()]
        batch += [dist.P2POp(dist.isend, buffer, peer, resharder.group) for peer, buffer in outgoing.items()]
        works = dist.batch_isend_irecv(batch) if batch else []
        copied.copy_(kept)
        for work in works:
            work.wait()

    return run


def time_between_barriers(rivals: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of the fastest round of each: until the last rank is through."""
    best = dict.fromkeys(rivals, float("inf"))
    for number in range(rounds + 1):
        for name, call in rivals.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            dist.barrier()
            if number:
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the weight transfer between gloo ranks.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        if options.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(case.config))
            results = run_ranks(run_case, case.world, folder, case, options.rounds, timeout_s=400)
        worst = {key: max(each[key] for each in results) for key in results[0]}
        worst["direct_share"] = min(each["direct_share"] for each in results)
        worst["bytes_over_minimum"] = max(
            (each["received_mib"] / each["minimum_mib"] for each in results if each["minimum_mib"]), default=1.0
        )
        worst["speedup_over_gather"] = worst["gather_ms"] / worst["ours_ms"]
        worst["share_of_raw_copy"] = worst["raw_ms"] / worst["ours_ms"]
        worst["share_of_wire"] = worst["wire_ms"] / worst["ours_ms"]
        found[case.name] = worst
        figures |= {f"{case.name}_{key}": value for key, value in worst.items()}
    headline = found.get(HEADLINE) or next(iter(found.values()))
    summary = {
        "bytes_over_minimum": max(each["bytes_over_minimum"] for each in found.values()),
        "direct_share": min(each["direct_share"] for each in found.values()),
        "staging_mib": max(each["staging_mib"] for each in found.values()),
        "speedup_over_gather": headline["speedup_over_gather"],
        "share_of_raw_copy": headline["share_of_raw_copy"],
    }
    report("reshard", summary | figures)


if __name__ == "__main__":
    main()
