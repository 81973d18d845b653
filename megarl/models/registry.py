"""Which families megarl knows, and how a model folder's `config.json` becomes a `ModelSpec`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.models import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from megarl.models.layout import Family, ModelSpec

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY, mixtral.FAMILY, qwen3_moe.FAMILY)
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_model_spec(folder: str | Path, is_computed: bool = True) -> tuple[Family, ModelSpec]:
    """Reads a Hugging Face folder's configuration.

    Args:
        is_computed: the model is to run here; False: its weights are only moved (see `spec_from_config`).

    Raises:
        ValueError: a folder without a readable `config.json`, or a model that megarl would not compute as transformers
            does.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no config.json; give the folder of a Hugging Face model")
    try:
        model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not readable as JSON: {error}") from error
    _find_family(model_type, str(folder))
    from transformers import AutoConfig  # seconds to import: only when a model is really read

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return spec_from_config(config, str(folder), is_computed)


def _find_family(model_type: Any, where: str) -> Family:
    if model_type not in FAMILIES:
        raise ValueError(f"{where}: model_type={model_type!r} is not supported; megarl knows {sorted(FAMILIES)}")
    return FAMILIES[model_type]


def spec_from_config(config: Any, where: str, is_computed: bool = True) -> tuple[Family, ModelSpec]:
    """The family and shape that a transformers configuration describes; `where` names it in messages.

    Models of experts, and sliding windows shorter than the model's longest sequence, have a layout but no forward pass
    here: they are refused only where `is_computed`.
    """
    family = _find_family(config.model_type, where)
    rope = dict(config.rope_parameters)
    rope_type = rope.get("rope_type", "default")
    refused = {
        "hidden_act": (config.hidden_act, "silu"),
        "mlp_bias": (getattr(config, "mlp_bias", False), False),
        "attention_bias": (getattr(config, "attention_bias", False), False),
        "use_sliding_window": (getattr(config, "use_sliding_window", False), False),
        "pretraining_tp": (getattr(config, "pretraining_tp", None) or 1, 1),
        "mlp_only_layers": (getattr(config, "mlp_only_layers", None) or [], []),
        "decoder_sparse_step": (getattr(config, "decoder_sparse_step", 1), 1),
    }
    for key, (value, needed) in refused.items():
        if value != needed:
            raise ValueError(f"{where}: {key}={value!r} is not supported for {family.name}; only {needed!r} is")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{where}: rope_type={rope_type!r} is not supported; megarl knows {list(ROPE_TYPES)}")
    if is_computed:
        _refuse_uncomputed(config, family, where)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return family, ModelSpec(
        family=family.name,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        is_tied=bool(config.tie_word_embeddings),
        has_qkv_bias=any(name.endswith("qkv.bias") for name in family.layer),
        has_qk_norm=any("q_layernorm" in name for name in family.layer),
        rope=rope,
        num_experts=config.num_local_experts if family.expert else 0,
        expert_ffn_size=getattr(config, "moe_intermediate_size", config.intermediate_size) if family.expert else 0,
    )


def _refuse_uncomputed(config: Any, family: Family, where: str) -> None:
    """Raises ValueError for a model whose weights can be moved but which does not run here as in transformers."""
    if family.expert:
        raise ValueError(f"{where}: {family.name} can be converted, but a model of experts does not run in megarl yet")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"{where}: sliding_window={window} is shorter than max_position_embeddings="
            f"{config.max_position_embeddings}, and megarl attends to all positions; where no sequence is longer than "
            f"the window both are the same: write max_position_embeddings={window} into config.json"
        )
