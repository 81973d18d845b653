"""Which families megarl knows, and how a model folder's `config.json` becomes a `ModelSpec`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.models import llama, qwen2, qwen3
from megarl.models.layout import Family, ModelSpec

FAMILIES: dict[str, Family] = {family.name: family for family in (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY)}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_model_spec(folder: str | Path) -> tuple[Family, ModelSpec]:
    """Reads a Hugging Face folder's configuration.

    Raises:
        ValueError: a folder without `config.json`, or a model that megarl would not compute as transformers does.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json; give the folder of a Hugging Face model")
    from transformers import AutoConfig  # seconds to import: only when a model is really read

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return spec_from_config(config, str(folder))


def spec_from_config(config: Any, where: str) -> tuple[Family, ModelSpec]:
    """The family and shape that a transformers configuration describes; `where` names it in messages."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"{where}: model_type={config.model_type!r} is not supported; megarl knows {sorted(FAMILIES)}")
    family = FAMILIES[config.model_type]
    rope = dict(config.rope_parameters)
    rope_type = rope.get("rope_type", "default")
    refused = {
        "hidden_act": (config.hidden_act, "silu"),
        "mlp_bias": (getattr(config, "mlp_bias", False), False),
        "attention_bias": (getattr(config, "attention_bias", False), False),
        "use_sliding_window": (getattr(config, "use_sliding_window", False), False),
        "pretraining_tp": (getattr(config, "pretraining_tp", None) or 1, 1),
    }
    for key, (value, needed) in refused.items():
        if value != needed:
            raise ValueError(f"{where}: {key}={value!r} is not supported for {family.name}; only {needed!r} is")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{where}: rope_type={rope_type!r} is not supported; megarl knows {list(ROPE_TYPES)}")
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
    )
