"""The Qwen2 and Qwen2.5 families: Llama with biases on the query, key and value projections."""

from __future__ import annotations

import dataclasses

from megarl.models import llama
from megarl.models.layout import Rule

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="qwen2",
    layer={
        **llama.FAMILY.layer,
        "self_attention.linear_qkv.bias": Rule(
            "qkv", ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
        ),
    },
)
