"""Where every row of a Hugging Face checkpoint lives in Megatron's shards. Pure: names, shapes and slices, no tensors.

A family file (`llama.py`, `qwen2.py`, ...) states for each Megatron parameter which Hugging Face tensors it is made
of and how it is cut over tensor-parallel ranks. From that statement `plan_stage` gives, for one rank, the list of
parameters with their slices. Import, export, the transfer to the rollout engine and the memory estimate all read it,
and nothing else looks at parameter names. Example, fused gate and up of width I=4 at TP 2, rank 1:

    linear_fc1.weight [4, H]:  rows 0..1 <- gate_proj.weight rows 2..3,  rows 2..3 <- up_proj.weight rows 2..3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.parallel.partition import layer_range
from megarl.parallel.topology import Topology

VOCAB_DIVISOR = 128  # Megatron pads the vocabulary to a multiple of this times TP
VALUE_HEAD = "score.weight"  # the value head's name in a saved critic, as transformers names a scalar head

Kind = Literal["replicated", "rows", "columns", "qkv", "vocab", "value"]


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
    num_experts: int = 0  # of each layer; 0 = a dense model
    expert_ffn_size: int = 0

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        step = VOCAB_DIVISOR * tp_size
        return -(-self.vocab_size // step) * step


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is made of Hugging Face tensors.

    kind: `replicated`: the whole tensor on every rank; `rows`: each tensor cut by rows, the pieces one after the
    other; `columns`: cut by columns; `qkv`: rows of q, k, v interleaved per key-value group; `vocab`: rows of the
    padded vocabulary; `value`: the one row of a value head, on every rank.
    """

    kind: Kind
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One model family: the names it goes by and the rules of its parameters.

    `layer` maps the Megatron name inside a layer to a rule whose sources are names inside a Hugging Face layer;
    `expert` does the same for the parameters of one expert, whose number stands for `{expert}` in the sources.
    """

    name: str
    layer: Mapping[str, Rule]
    expert: Mapping[str, Rule] = field(default_factory=dict)
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
    embedding. `is_replicated`: the same on every tensor-parallel rank. `stem` is the name without the numbers of layer
    and expert, which are `layer` and `expert`, counted over the whole model.
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    is_replicated: bool
    stem: str
    layer: int | None = None
    expert: int | None = None
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
    ep_size: int = 1,
    ep_rank: int = 0,
) -> list[ParamLayout]:
    """The parameters of one chunk of a model (a pipeline stage has one or several, see `plan_rank`).

    Args:
        pp_size, stage: number of chunks, and which of them.
        head: "policy" puts the output layer on the last stage, "value" a [1, H] value head.
        ep_size, ep_rank: ranks over which the experts of each layer are dealt out, neighbours to one rank; everything
            else is the same on these ranks. An expert is cut over `tp_size` ranks as a dense MLP is.

    Returns:
        Layouts by Megatron name with layers counted over the whole model, embedding first, head last.

    Raises:
        ValueError: heads, widths or experts that `tp_size` or `ep_size` does not divide.
    """
    check_tp(spec, tp_size)
    check_ep(spec, ep_size)
    num_local = spec.num_experts // ep_size
    experts = range(num_local * ep_rank, num_local * (ep_rank + 1))
    params: list[_Param] = []
    if stage == 0:
        params.append(_Param("embedding.word_embeddings.weight", Rule("vocab", (family.embedding,))))
    for layer in layer_range(spec.num_layers, pp_size, stage):
        params += _list_layer(family, f"decoder.layers.{layer}.", layer, experts)
    if stage == pp_size - 1:
        params.append(_Param("decoder.final_layernorm.weight", Rule("replicated", (family.final_norm,))))
        if head == "value":
            params.append(_Param("output_layer.weight", Rule("value", (VALUE_HEAD,))))
        elif not spec.is_tied:
            params.append(_Param("output_layer.weight", Rule("vocab", (family.head,))))
        elif stage > 0:
            params.append(_Param("output_layer.weight", Rule("vocab", (family.embedding,)), is_tied_copy=True))
    return [_layout(param, spec, tp_size, tp_rank) for param in params]


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
    width = spec.expert_ffn_size if spec.num_experts else spec.ffn_size
    for what, count in (
        ("key-value heads", spec.num_kv_heads),
        ("attention heads", spec.num_heads),
        ("MLP width", width),
    ):
        if count % tp_size:
            fitting = ", ".join(
                str(n) for n in range(1, spec.num_kv_heads + 1) if not (spec.num_kv_heads % n or width % n)
            )
            raise ValueError(f"tp={tp_size} does not divide the model's {what} ({count}); use {fitting}")


def check_ep(spec: ModelSpec, ep_size: int) -> None:
    """Raises ValueError when the experts of this model cannot be dealt out over `ep_size` ranks."""
    if ep_size > 1 and not spec.num_experts:
        raise ValueError(f"ep={ep_size}, but the model has no experts; use ep=1")
    if spec.num_experts % ep_size:
        fitting = ", ".join(str(n) for n in range(1, spec.num_experts + 1) if not spec.num_experts % n)
        raise ValueError(f"ep={ep_size} does not divide the model's {spec.num_experts} experts; use {fitting}")


@dataclass(frozen=True)
class _Param:
    """A parameter before it is cut; the rule's sources are full names. `stem` empty = `name`."""

    name: str
    rule: Rule
    stem: str = ""
    layer: int | None = None
    expert: int | None = None
    is_tied_copy: bool = False


def _list_layer(family: Family, prefix: str, layer: int, experts: range) -> Iterator[_Param]:
    """The parameters of one layer: its own, then those of each of `experts` (numbers over the whole layer)."""
    hf_prefix = family.layer_prefix.format(layer=layer)
    for name, rule in family.layer.items():
        sources = tuple(hf_prefix + source for source in rule.sources)
        yield _Param(prefix + name, Rule(rule.kind, sources), f"decoder.layers.{name}", layer)
    for local, expert in enumerate(experts):
        for name, rule in family.expert.items():
            sources = tuple(hf_prefix + source.format(expert=expert) for source in rule.sources)
            full = f"{prefix}mlp.experts.local_experts.{local}.{name}"
            yield _Param(full, Rule(rule.kind, sources), f"decoder.layers.mlp.experts.experts.{name}", layer, expert)


def _layout(param: _Param, spec: ModelSpec, tp_size: int, tp_rank: int) -> ParamLayout:
    """Cuts one parameter."""
    kind, sources = param.rule.kind, param.rule.sources
    is_vector = param.name.endswith(("bias", "layernorm.weight"))
    hidden = () if is_vector else (spec.hidden_size,)
    ffn_size = spec.ffn_size if param.expert is None else spec.expert_ffn_size
    slices: list[Slice]
    if kind in ("replicated", "value"):
        rows = _replicated_rows(param, spec)
        shape, slices = (rows, *hidden), [Slice(sources[0], 0, 0, rows, 0)]
    elif kind == "vocab":
        rows = spec.padded_vocab(tp_size) // tp_size
        first = rows * tp_rank
        real = max(0, min(rows, spec.vocab_size - first))
        shape, slices = (rows, *hidden), [Slice(sources[0], 0, first, real, 0)] if real else []
    elif kind == "rows":
        rows = ffn_size // tp_size
        slices = [Slice(source, 0, rows * tp_rank, rows, rows * i) for i, source in enumerate(sources)]
        shape = (rows * len(sources), *hidden)
    elif kind == "columns":
        columns = (ffn_size if "fc2" in param.name else spec.num_heads * spec.head_dim) // tp_size
        shape, slices = (spec.hidden_size, columns), [Slice(sources[0], 1, columns * tp_rank, columns, 0)]
    else:
        assert kind == "qkv", f"unknown rule {param.rule}"
        slices = list(_slice_qkv(sources, spec, tp_size, tp_rank))
        shape = (sum(piece.length for piece in slices), *hidden)
    return ParamLayout(
        param.name,
        shape,
        tuple(slices),
        is_replicated=kind in ("replicated", "value"),
        stem=param.stem or param.name,
        layer=param.layer,
        expert=param.expert,
        is_tied_copy=param.is_tied_copy,
    )


def _replicated_rows(param: _Param, spec: ModelSpec) -> int:
    """Rows of a parameter that is the same on every rank."""
    if param.rule.kind == "value":
        return 1
    if param.name.endswith("router.weight"):
        return spec.num_experts
    return spec.head_dim if param.name.endswith(("q_layernorm.weight", "k_layernorm.weight")) else spec.hidden_size


def _slice_qkv(sources: tuple[str, ...], spec: ModelSpec, tp_size: int, tp_rank: int) -> Iterator[Slice]:
    q_rows = spec.num_heads // spec.num_kv_heads * spec.head_dim
    kv_groups = spec.num_kv_heads // tp_size
    start = 0
    for group in range(kv_groups * tp_rank, kv_groups * (tp_rank + 1)):
        for source, rows in zip(sources, (q_rows, spec.head_dim, spec.head_dim), strict=True):
            yield Slice(source, 0, rows * group, rows, start)
            start += rows
