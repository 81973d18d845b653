"""Builds one rank's stage of a model: Megatron's configuration, the layer spec, the module, without weights.

The only place that knows Megatron's `TransformerConfig`. With Transformer Engine on a GPU its layers are used, else
the torch layers of `layers.py`; which one is chosen once and said in the log.
"""

# We fill specs as Megatron does; the annotations of its spec classes do not allow what they document.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megarl import device
from megarl.models.deferred import (
    DeferredColumnParallelLinear,
    DeferredRowParallelLinear,
    put_gradients_aside,
)
from megarl.models.layers import RMSNorm, SegmentAttention, SwiGLU
from megarl.models.layout import HeadKind, ModelSpec
from megarl.models.packed_gpt import PackedGPT, ValueHead
from megarl.models.rope import Rope, compute_frequencies
from megarl.parallel.groups import RoleGroups
from megarl.parallel.partition import layer_range

# Transformer Engine fuses a norm into the linear layer behind it: the same weight under another name.
TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@functools.cache
def uses_transformer_engine() -> bool:
    """True on a GPU with Transformer Engine installed."""
    return device.has_gpu() and importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True)
class BuildOptions:
    """What of a model is a choice of the run and not of the checkpoint.

    `recompute`: none, selective or full. `splits_gradients`: schedules may put weight gradients aside; layers of
    Transformer Engine must know it when they are built.
    """

    dtype: torch.dtype
    head: HeadKind = "policy"
    recompute: str = "none"
    seed: int = 1
    splits_gradients: bool = False


def build_config(spec: ModelSpec, groups: RoleGroups, options: BuildOptions, rope_scaling: float) -> TransformerConfig:
    """Megatron's configuration of this model on this grid."""
    topology = groups.topology
    recompute: dict[str, object] = {}
    if options.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif options.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.has_qkv_bias,
        qk_layernorm=spec.has_qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_scale=rope_scaling**2 / math.sqrt(spec.head_dim),
        tensor_model_parallel_size=topology.tp_size,
        pipeline_model_parallel_size=topology.pp_size,
        sequence_parallel=topology.tp_size > 1,
        params_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        pipeline_dtype=options.dtype,
        use_cpu_initialization=not device.has_gpu(),
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        use_te_activation_func=not uses_transformer_engine(),  # "the spec names the activation": ours is SwiGLU
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=uses_transformer_engine(),
        calculate_per_token_loss=True,  # DDP adds gradients up; the losses know their own weight
        **recompute,  # type: ignore[arg-type]
    )
    # Its constructor allows this only with the overlap of expert parallelism, which is another use of the same option.
    config.delay_wgrad_compute = options.splits_gradients and uses_transformer_engine()
    return config


def build_block_spec(spec: ModelSpec, num_layers: int) -> TransformerBlockSubmodules:
    """The decoder layers of one stage."""
    if uses_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.has_qk_norm)
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    head_norm = RMSNorm if spec.has_qk_norm else None
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=DeferredColumnParallelLinear,
            core_attention=SegmentAttention,
            linear_proj=DeferredRowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(
            linear_fc1=DeferredColumnParallelLinear,
            linear_fc2=DeferredRowParallelLinear,
            activation_func=SwiGLU,
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_cross_attn_layernorm=IdentityOp,
            cross_attention=IdentityOp,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def build_chunks(spec: ModelSpec, groups: RoleGroups, options: BuildOptions) -> tuple[PackedGPT, ...]:
    """Builds this rank's chunks, first to last; parameters hold no meaningful values until weights are loaded.

    A collective of the role where a tied model spans several stages (Megatron joins the two embeddings).
    """
    chunks = tuple(_build_chunk(spec, groups, options, chunk) for chunk in groups.chunks)
    if spec.is_tied and options.head == "policy" and groups.topology.ends_meet and groups.is_last_stage:
        chunks[-1].tie_head(chunks[0])
    return chunks


def _build_chunk(spec: ModelSpec, groups: RoleGroups, options: BuildOptions, chunk: int) -> PackedGPT:
    topology, at = groups.topology, groups.at
    inv_freq, rope_scaling = compute_frequencies(spec)
    layers = layer_range(spec.num_layers, topology.num_chunks, chunk)
    is_first, is_last = chunk == 0, chunk == topology.num_chunks - 1
    is_tied = spec.is_tied and options.head == "policy" and (is_first or is_last)
    with device.megatron_build_scope():
        if topology.tp_size > 1 and parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()  # scratch memory of sequence parallelism, shared by all roles
        model_parallel_cuda_manual_seed(options.seed, tp_rank=at.tp, ep_rank=0, etp_rank=at.tp, force_reset_rng=True)
        config = build_config(spec, groups, options, rope_scaling)
        model = PackedGPT(
            config=config,
            transformer_layer_spec=build_block_spec(spec, len(layers)),
            vocab_size=spec.padded_vocab(topology.tp_size),
            max_sequence_length=spec.max_positions,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=is_tied and not topology.ends_meet,
            position_embedding_type="none",
            pg_collection=groups.collection,
        )
        model.rope = Rope(inv_freq, device.device())
        for layer, number in zip(model.decoder.layers, layers, strict=True):
            layer.layer_number = number + 1  # Megatron assumes even stages; 1-based
        _mark_sharded_parameters(model)
        model.put_aside = put_gradients_aside(model)
        if options.head == "value" and is_last:
            model.output_layer = ValueHead(spec.hidden_size, options.dtype, device.device())
        model.to(device.device())
    return model


def _mark_sharded_parameters(model: PackedGPT) -> None:
    """Says which parameters are cut over tensor-parallel ranks; the gradient norm counts the others once.

    Megatron does this while it initialises weights, which we leave out.
    """
    cut = ((ColumnParallelLinear, 0), (VocabParallelEmbedding, 0), (RowParallelLinear, 1))
    for module in model.modules():
        for kind, dim in cut:
            if isinstance(module, kind):
                for parameter in module.parameters(recurse=False):
                    vars(parameter).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)


def named_weights(chunks: Sequence[PackedGPT]) -> dict[str, torch.Tensor]:
    """The parameters of a rank's chunks by the names that `layout.py` uses, whatever layers they live in."""
    return {name: parameter.data for name, parameter in named_parameters(chunks).items()}


def named_parameters(chunks: Sequence[PackedGPT]) -> dict[str, torch.nn.Parameter]:
    """As `named_weights`, the parameters themselves."""
    named: dict[str, torch.nn.Parameter] = {}
    for chunk in chunks:
        named |= _named_in_chunk(chunk)
    return named


def _named_in_chunk(model: PackedGPT) -> dict[str, torch.nn.Parameter]:
    canonical = {te: ours for ours, te in TE_NAMES.items()} if uses_transformer_engine() else {}
    named: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        head, _, tail = name.partition("decoder.layers.")
        if tail:
            number, _, inner = tail.partition(".")
            layer = int(vars(model.decoder.layers[int(number)])["layer_number"]) - 1
            name = f"decoder.layers.{layer}.{canonical.get(inner, inner)}"
        else:
            name = head
        named[name] = parameter
    return named
