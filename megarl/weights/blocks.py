"""Where the parts of a model lie on each rank, on the trainer's side and on the engine's. Pure: numbers, no tensors.

A `Block` is a rectangle of one Hugging Face tensor and its place in one flat parameter; a `Shard` is one parameter
with the blocks that fill it. Both sides are described by the same words, so that a plan is an intersection of
rectangles. Example, `q_proj.weight` [8, 4] at TP 2, rank 1, inside an engine's fused `qkv_proj.weight`:

    Block("model...q_proj.weight", row_start=4, num_rows=4, column_start=0, num_columns=4, offset=0, stride=4)

A vector of n elements is n rows of one column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.models.layout import Family, ModelSpec, ParamLayout, Rule, hf_shapes, plan_rank
from megarl.parallel.topology import Topology

ENGINE_VOCAB_DIVISOR = 64  # vLLM pads the vocabulary to a multiple of this, whatever the engine's TP
FUSED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}

RankOrder = Literal["contiguous", "strided"]


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a Hugging Face tensor, held by one rank.

    Its element (row, column), counted from the rectangle's corner, is element `offset + row * stride + column` of the
    flat parameter.
    """

    hf_name: str
    row_start: int
    num_rows: int
    column_start: int
    num_columns: int
    offset: int
    stride: int

    @property
    def numel(self) -> int:
        return self.num_rows * self.num_columns


@dataclass(frozen=True, slots=True)
class Shard:
    """One parameter of one rank: `numel` elements, filled by `blocks`; what no block fills is padding at its end."""

    name: str
    numel: int
    blocks: tuple[Block, ...]

    @property
    def num_padding(self) -> int:
        return self.numel - sum(block.numel for block in self.blocks)


Holdings = Mapping[int, Sequence[Shard]]  # what each global rank holds


def list_trainer_shards(family: Family, spec: ModelSpec, topology: Topology) -> dict[int, list[Shard]]:
    """What every rank of the actor holds, by layout name."""
    by_place: dict[tuple[int, int], list[Shard]] = {}
    held: dict[int, list[Shard]] = {}
    for rank in topology.ranks:
        at = topology.coordinates(rank)
        if (at.tp, at.pp) not in by_place:
            layouts = plan_rank(family, spec, topology, at.tp, at.pp)
            by_place[at.tp, at.pp] = [_shard_of_layout(layout) for layout in layouts]
        held[rank] = by_place[at.tp, at.pp]
    return held


def _shard_of_layout(layout: ParamLayout) -> Shard:
    height, width = layout.shape[0], layout.shape[1] if len(layout.shape) > 1 else 1
    blocks = []
    for piece in layout.slices:
        if piece.axis == 0:
            place = (piece.hf_start, piece.length, 0, width, piece.start * width)
        else:
            place = (0, height, piece.hf_start, piece.length, piece.start)
        blocks.append(Block(piece.hf_name, *place, stride=width))
    return Shard(layout.name, layout.numel, tuple(blocks))


def list_hf_shards(family: Family, spec: ModelSpec) -> list[Shard]:
    """A Hugging Face folder in the same words: every tensor whole, under its own name."""
    shards: list[Shard] = []
    for name, shape in hf_shapes(family, spec).items():
        rows, width = shape[0], shape[1] if len(shape) > 1 else 1
        shards.append(Shard(name, rows * width, (Block(name, 0, rows, 0, width, 0, width),)))
    return shards


def list_engines(ranks: Sequence[int], tp_size: int, order: RankOrder = "contiguous", span: int = 0) -> list[list[int]]:
    """The ranks of each engine, by the engine's TP rank.

    Args:
        ranks: of the rollout role.
        tp_size: of each engine.
        order: "contiguous": neighbours form an engine. "strided": inside each run of `span` ranks (the trainer's TP),
            neighbours hold the same part of different engines, so that an engine's part overlaps what the rank
            trains. With 4 ranks, tp_size 2, span 4: (0 2) (1 3).

    Raises:
        ValueError: the sizes do not divide each other.
    """
    if len(ranks) % tp_size:
        raise ValueError(f"engine tp={tp_size} does not divide its {len(ranks)} ranks")
    if order == "contiguous" or span <= tp_size:
        return [list(ranks[first : first + tp_size]) for first in range(0, len(ranks), tp_size)]
    if span % tp_size or len(ranks) % span:
        raise ValueError(f"strided engines of tp={tp_size} do not fit runs of {span} ranks out of {len(ranks)}")
    step = span // tp_size
    return [
        [ranks[run + engine + step * tp_rank] for tp_rank in range(tp_size)]
        for run in range(0, len(ranks), span)
        for engine in range(step)
    ]


def list_engine_shards(family: Family, spec: ModelSpec, engines: Sequence[Sequence[int]]) -> dict[int, list[Shard]]:
    """What every rank of vLLM's engines holds, by vLLM's parameter name.

    Args:
        engines: ranks of each engine by TP rank, all of one size (see `list_engines`).

    Raises:
        ValueError: heads, widths or vocabulary that the engine's TP does not divide.
    """
    tp_size = len(engines[0])
    check_engine_tp(spec, tp_size)
    if family.expert:
        raise ValueError(f"{family.name}: the transfer of a model of experts into an engine is not planned yet")
    by_place = [_engine_rank(family, spec, tp_size, tp_rank) for tp_rank in range(tp_size)]
    return {rank: by_place[tp_rank] for engine in engines for tp_rank, rank in enumerate(engine)}


def check_engine_tp(spec: ModelSpec, tp_size: int) -> None:
    """Raises ValueError when vLLM cannot cut this model over `tp_size` ranks."""
    padded = _pad_vocab(spec)
    for what, count in (
        ("attention heads", spec.num_heads),
        ("MLP width", spec.ffn_size),
        ("padded vocabulary", padded),
    ):
        if count % tp_size:
            raise ValueError(f"engine tp={tp_size} does not divide the model's {what} ({count}); use another tp")
    if max(spec.num_kv_heads, tp_size) % min(spec.num_kv_heads, tp_size):
        raise ValueError(
            f"engine tp={tp_size} neither divides the model's {spec.num_kv_heads} key-value heads nor is a multiple "
            "of them; use another tp"
        )


def _pad_vocab(spec: ModelSpec) -> int:
    return -(-spec.vocab_size // ENGINE_VOCAB_DIVISOR) * ENGINE_VOCAB_DIVISOR


def _engine_rank(family: Family, spec: ModelSpec, tp_size: int, tp_rank: int) -> list[Shard]:
    """The parameters of one rank of an engine."""
    shapes = hf_shapes(family, spec)

    def vocab(name: str) -> Shard:
        rows = _pad_vocab(spec) // tp_size
        first = rows * tp_rank
        real = max(0, min(rows, spec.vocab_size - first))
        blocks = (Block(name, first, real, 0, spec.hidden_size, 0, spec.hidden_size),) if real else ()
        return Shard(name, rows * spec.hidden_size, blocks)

    shards = [vocab(family.embedding)]
    for layer in range(spec.num_layers):
        prefix = family.layer_prefix.format(layer=layer)
        for rule in family.layer.values():
            shards.append(_engine_parameter(rule, prefix, spec, shapes, tp_size, tp_rank))
    shards.append(_engine_parameter(Rule("replicated", (family.final_norm,)), "", spec, shapes, tp_size, tp_rank))
    if not spec.is_tied:
        shards.append(vocab(family.head))
    return shards


def _engine_parameter(
    rule: Rule, prefix: str, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], tp_size: int, tp_rank: int
) -> Shard:
    name = prefix + _fused_name(rule.sources)
    rows_of: list[tuple[int, int]] = []  # first row and number of rows of each source; all columns
    if rule.kind == "columns":
        height, width = shapes[name]
        columns = width // tp_size
        block = Block(name, 0, height, columns * tp_rank, columns, 0, columns)
        return Shard(name, block.numel, (block,))
    if rule.kind == "qkv":
        query = spec.num_heads // tp_size * spec.head_dim
        replicas = max(1, tp_size // spec.num_kv_heads)
        key = max(1, spec.num_kv_heads // tp_size) * spec.head_dim
        rows_of = [(query * tp_rank, query), *[(key * (tp_rank // replicas), key)] * 2]
    elif rule.kind == "rows":
        rows_of = [
            (shapes[prefix + each][0] // tp_size * tp_rank, shapes[prefix + each][0] // tp_size)
            for each in rule.sources
        ]
    else:
        assert rule.kind == "replicated", f"{name}: rule {rule.kind} is unknown to the engine"
        rows_of = [(0, shapes[name][0])]
    blocks: list[Block] = []
    offset = 0
    for source, (first, rows) in zip(rule.sources, rows_of, strict=True):
        shape = shapes[prefix + source]
        width = shape[1] if len(shape) > 1 else 1
        blocks.append(Block(prefix + source, first, rows, 0, width, offset, width))
        offset += rows * width
    return Shard(name, offset, tuple(blocks))


def _fused_name(sources: Sequence[str]) -> str:
    """`self_attn.qkv_proj.weight` for q, k and v; a single source keeps its name."""
    if len(sources) == 1:
        return sources[0]
    parts = [source.split(".") for source in sources]
    fused = FUSED[tuple(part[-2] for part in parts)]
    return ".".join([*parts[0][:-2], fused, parts[0][-1]])
