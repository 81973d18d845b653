"""Shapes of well-known models for plans on paper: no weights, no files. Pure.

Dense shapes are `ModelSpec`s of a family that megarl trains. The mixture-of-experts shape (671B, DeepSeek-V3's sizes)
is a plain list of tensors: megarl does not train it, but the planner only sees rectangles and plans it all the same.
Experts of a layer are one tensor each for gate, up and down here, stacked by rows and cut between experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megarl.models.layout import ModelSpec
from megarl.parallel.topology import Topology
from megarl.weights.blocks import Block, Shard


def _dense(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, is_tied: bool = False
) -> ModelSpec:
    return ModelSpec(family, layers, hidden, heads, kv_heads, 128, ffn, vocab, 1e-6, 32768, is_tied)


DENSE: dict[str, ModelSpec] = {
    "qwen2.5-7b": _dense("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-32b": _dense("qwen2", 64, 5120, 40, 8, 27648, 152064),
    "llama3-70b": _dense("llama", 80, 8192, 64, 8, 28672, 128256),
}

Cut = Literal["replicated", "rows", "columns", "experts"]
MOE_LAYERS, MOE_DENSE_LAYERS, MOE_HIDDEN, MOE_VOCAB, NUM_EXPERTS, EXPERT_FFN = 61, 3, 7168, 129280, 256, 2048


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the model and how both sides cut it; `layer` -1 is the embedding, `MOE_LAYERS` norm and head."""

    name: str
    layer: int
    rows: int
    columns: int
    cut: Cut


def list_moe_tensors() -> Iterator[WholeTensor]:
    """Every tensor of the 671B shape, with multi-head latent attention as DeepSeek-V3 has it."""
    hidden, heads, latent_q, latent_kv, rope = MOE_HIDDEN, 128, 1536, 512, 64
    yield WholeTensor("embed", -1, MOE_VOCAB, hidden, "rows")
    for layer in range(MOE_LAYERS):
        parts: list[tuple[str, int, int, Cut]] = [
            ("norms", 2 * hidden + latent_q + latent_kv, 1, "replicated"),
            ("q_a", latent_q, hidden, "replicated"),
            ("q_b", heads * 192, latent_q, "rows"),
            ("kv_a", latent_kv + rope, hidden, "replicated"),
            ("kv_b", heads * 256, latent_kv, "rows"),
            ("o", hidden, heads * 128, "columns"),
        ]
        width = 18432 if layer < MOE_DENSE_LAYERS else EXPERT_FFN  # the dense MLP, or the shared expert
        parts.append(("gate", width, hidden, "rows"))
        parts.append(("up", width, hidden, "rows"))
        parts.append(("down", hidden, width, "columns"))
        if layer >= MOE_DENSE_LAYERS:
            stacked = NUM_EXPERTS * EXPERT_FFN
            parts.append(("router", NUM_EXPERTS, hidden, "replicated"))
            parts.append(("experts.gate", stacked, hidden, "experts"))
            parts.append(("experts.up", stacked, hidden, "experts"))
            parts.append(("experts.down", NUM_EXPERTS * hidden, EXPERT_FFN, "experts"))
        yield from (WholeTensor(f"{layer}.{name}", layer, rows, columns, cut) for name, rows, columns, cut in parts)
    yield WholeTensor("norm", MOE_LAYERS, hidden, 1, "replicated")
    yield WholeTensor("head", MOE_LAYERS, MOE_VOCAB, hidden, "rows")


def _cut(tensor: WholeTensor, tp_size: int, tp_rank: int, ep_size: int, ep_rank: int) -> Shard:
    rows, columns = tensor.rows, tensor.columns
    if tensor.cut == "columns":
        width = columns // tp_size
        block = Block(tensor.name, 0, rows, width * tp_rank, width, 0, width)
    else:
        size, rank = {"rows": (tp_size, tp_rank), "experts": (ep_size, ep_rank)}.get(tensor.cut, (1, 0))
        block = Block(tensor.name, rows // size * rank, rows // size, 0, columns, 0, columns)
    return Shard(tensor.name, block.numel, (block,))


def list_moe_trainer_shards(topology: Topology, ep_size: int) -> dict[int, list[Shard]]:
    """What each trainer rank holds; the experts of a stage are dealt out over `ep_size` of its ranks, repeatedly."""
    per_stage = topology.tp_size * topology.dp_size
    bounds = [MOE_LAYERS * stage // topology.pp_size for stage in range(topology.pp_size + 1)]
    held: dict[int, list[Shard]] = {rank: [] for rank in topology.ranks}
    for tensor in list_moe_tensors():
        layer = min(max(tensor.layer, 0), MOE_LAYERS - 1)
        stage = next(stage for stage in range(topology.pp_size) if layer < bounds[stage + 1])
        for place in range(per_stage):
            rank = topology.ranks[stage * per_stage + place]
            held[rank].append(_cut(tensor, topology.tp_size, place % topology.tp_size, ep_size, place % ep_size))
    return held


def list_moe_engine_shards(num_ranks: int, tp_size: int, ep_size: int) -> dict[int, list[Shard]]:
    """What each engine rank needs: attention over `tp_size` neighbours, experts over `ep_size` of them."""
    tensors = list(list_moe_tensors())
    return {
        rank: [_cut(tensor, tp_size, rank % tp_size, ep_size, rank % ep_size) for tensor in tensors]
        for rank in range(num_ranks)
    }
