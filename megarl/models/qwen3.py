"""The Qwen3 family: Llama with a norm over each query and key head."""

from __future__ import annotations

import dataclasses

from megarl.models import llama
from megarl.models.layout import Rule

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="qwen3",
    layer={
        **llama.FAMILY.layer,
        "self_attention.q_layernorm.weight": Rule("replicated", ("self_attn.q_norm.weight",)),
        "self_attention.k_layernorm.weight": Rule("replicated", ("self_attn.k_norm.weight",)),
    },
)
