"""Where every row of a Hugging Face checkpoint lives in Megatron's shards. Pure: names, shapes and slices, no tensors.

A family file (`llama.py`, `qwen2.py`, ...) states for each Megatron parameter which Hugging Face tensors it is made
of and how it is cut over tensor-parallel ranks. From that statement `plan_stage` gives, for one rank, the list of
parameters with their slices. Import, export, the transfer to the rollout engine and the memory estimate all read it,
and nothing else looks at parameter names. Example, fused gate and up of width I=4 at TP 2, rank 1:

    linear_fc1.weight [4, H]:  rows 0..1 <- gate_proj.weight rows 2..3,  rows 2..3 <- up_proj.weight rows 2..3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.parallel.partition import layer_range
from megarl.parallel.topology import Topology

VOCAB_DIVISOR = 128  # Megatron pads the vocabulary to a multiple of this times TP
VALUE_HEAD = "score.weight"  # the value head's name in a saved critic, as transformers names a scalar head

Kind = Literal["replicated", "rows", "columns", "qkv", "vocab"]


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only model, read from a Hugging Face `config.json` by its family."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    is_tied: bool
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)  # `rope_type`, `rope_theta` and what the type needs

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        step = VOCAB_DIVISOR * tp_size
        return -(-self.vocab_size // step) * step


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is made of Hugging Face tensors.

    kind: `replicated`: the whole tensor on every rank; `rows`: each tensor cut by rows, the pieces one after the
    other; `columns`: cut by columns; `qkv`: rows of q, k, v interleaved per key-value group; `vocab`: rows of the
    padded vocabulary.
    """

    kind: Kind
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One model family: the names it goes by and the rules of its parameters.

    `layer` maps the Megatron name inside a layer to a rule whose sources are names inside a Hugging Face layer.
    """

    name: str
    layer: Mapping[str, Rule]
    layer_prefix: str = "model.layers.{layer}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"


@dataclass(frozen=True)
class Slice:
    """`local[start : start + length]` along `axis` is `hf[hf_start : hf_start + length]` along the same axis."""

    hf_name: str
    axis: int
    hf_start: int
    length: int
    start: int


@dataclass(frozen=True)
class ParamLayout:
    """One parameter of one rank: its local shape and the slices that fill it. Rows no slice covers are padding: zero.

    `is_tied_copy` marks the output layer of a tied model on a last stage that is not the first: a second copy of the
    embedding. `is_replicated`: the same on every tensor-parallel rank.
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    is_replicated: bool
    is_tied_copy: bool = False

    @property
    def numel(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size


HeadKind = Literal["policy", "value"]


def plan_stage(
    family: Family,
    spec: ModelSpec,
    tp_size: int,
    tp_rank: int,
    pp_size: int,
    stage: int,
    head: HeadKind = "policy",
) -> list[ParamLayout]:
    """The parameters of one chunk of a model (a pipeline stage has one or several, see `plan_rank`).

    Args:
        pp_size, stage: number of chunks, and which of them.
        head: "policy" puts the output layer on the last stage, "value" a [1, H] value head.

    Returns:
        Layouts by Megatron name with layers counted over the whole model, embedding first, head last.

    Raises:
        ValueError: heads or widths that `tp_size` does not divide.
    """
    check_tp(spec, tp_size)
    layouts: list[ParamLayout] = []
    is_last = stage == pp_size - 1
    vocab = Rule("vocab", (family.embedding,))
    if stage == 0:
        layouts.append(_layout("embedding.word_embeddings.weight", vocab, "", spec, tp_size, tp_rank))
    for layer in layer_range(spec.num_layers, pp_size, stage):
        for name, rule in family.layer.items():
            prefix = family.layer_prefix.format(layer=layer)
            layouts.append(_layout(f"decoder.layers.{layer}.{name}", rule, prefix, spec, tp_size, tp_rank))
    if is_last:
        norm = Rule("replicated", (family.final_norm,))
        layouts.append(_layout("decoder.final_layernorm.weight", norm, "", spec, tp_size, tp_rank))
        if head == "value":
            slices = (Slice(VALUE_HEAD, 0, 0, 1, 0),)
            layouts.append(ParamLayout("output_layer.weight", (1, spec.hidden_size), slices, is_replicated=True))
        elif not spec.is_tied:
            rule = Rule("vocab", (family.head,))
            layouts.append(_layout("output_layer.weight", rule, "", spec, tp_size, tp_rank))
        elif stage > 0:
            copy = _layout("output_layer.weight", vocab, "", spec, tp_size, tp_rank)
            layouts.append(ParamLayout(copy.name, copy.shape, copy.slices, copy.is_replicated, is_tied_copy=True))
    return layouts


def plan_rank(
    family: Family, spec: ModelSpec, topology: Topology, tp_rank: int, stage: int, head: HeadKind = "policy"
) -> list[ParamLayout]:
    """The parameters that a rank of this grid holds: those of all its chunks, first to last.

    Where embedding and head of a tied model meet on one rank they are one parameter.
    """
    return [
        layout
        for chunk in topology.chunks_of(stage)
        for layout in plan_stage(family, spec, topology.tp_size, tp_rank, topology.num_chunks, chunk, head)
        if not (layout.is_tied_copy and topology.ends_meet)
    ]


def hf_shapes(family: Family, spec: ModelSpec, head: HeadKind = "policy") -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face checkpoint, in layer order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layout in plan_stage(family, spec, tp_size=1, tp_rank=0, pp_size=1, stage=0, head=head):
        for piece in layout.slices:
            shape = list(layout.shape)
            shape[piece.axis] = max(piece.hf_start + piece.length, shapes.get(piece.hf_name, (0, 0))[piece.axis])
            shapes[piece.hf_name] = tuple(shape)
    return shapes


def check_tp(spec: ModelSpec, tp_size: int) -> None:
    """Raises ValueError when this model cannot be cut over `tp_size` ranks."""
    if tp_size > spec.num_kv_heads:
        raise ValueError(
            f"tp={tp_size} is more than the model's {spec.num_kv_heads} key-value heads; use at most that many"
        )
    for what, count in (
        ("key-value heads", spec.num_kv_heads),
        ("attention heads", spec.num_heads),
        ("MLP width", spec.ffn_size),
    ):
        if count % tp_size:
            fitting = ", ".join(
                str(n) for n in range(1, spec.num_kv_heads + 1) if not (spec.num_kv_heads % n or spec.ffn_size % n)
            )
            raise ValueError(f"tp={tp_size} does not divide the model's {what} ({count}); use {fitting}")


def _layout(name: str, rule: Rule, prefix: str, spec: ModelSpec, tp_size: int, tp_rank: int) -> ParamLayout:
    sources = tuple(prefix + source for source in rule.sources)
    is_vector = name.endswith(("bias", "layernorm.weight"))
    hidden = () if is_vector else (spec.hidden_size,)
    if rule.kind == "replicated":
        width = spec.head_dim if "q_layernorm" in name or "k_layernorm" in name else spec.hidden_size
        return ParamLayout(name, (width,), (Slice(sources[0], 0, 0, width, 0),), is_replicated=True)
    if rule.kind == "vocab":
        rows = spec.padded_vocab(tp_size) // tp_size
        first = rows * tp_rank
        real = max(0, min(rows, spec.vocab_size - first))
        slices = (Slice(sources[0], 0, first, real, 0),) if real else ()
        return ParamLayout(name, (rows, *hidden), slices, is_replicated=False)
    if rule.kind == "rows":
        rows = spec.ffn_size // tp_size
        slices = tuple(Slice(source, 0, rows * tp_rank, rows, rows * i) for i, source in enumerate(sources))
        return ParamLayout(name, (rows * len(sources), *hidden), slices, is_replicated=False)
    if rule.kind == "columns":
        total = spec.ffn_size if "fc2" in name else spec.num_heads * spec.head_dim
        columns = total // tp_size
        slices = (Slice(sources[0], 1, columns * tp_rank, columns, 0),)
        return ParamLayout(name, (spec.hidden_size, columns), slices, is_replicated=False)
    assert rule.kind == "qkv", f"unknown rule {rule}"
    q_rows = spec.num_heads // spec.num_kv_heads * spec.head_dim
    kv_groups = spec.num_kv_heads // tp_size
    pieces: list[Slice] = []
    start = 0
    for group in range(kv_groups * tp_rank, kv_groups * (tp_rank + 1)):
        for source, rows in zip(sources, (q_rows, spec.head_dim, spec.head_dim), strict=True):
            pieces.append(Slice(source, 0, rows * group, rows, start))
            start += rows
    return ParamLayout(name, (start, *hidden), tuple(pieces), is_replicated=False)
