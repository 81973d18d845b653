"""The Llama family (Llama 2 and 3, SmolLM2, and models of the same architecture)."""

from __future__ import annotations

from megarl.models.layout import Family, Rule

FAMILY = Family(
    name="llama",
    layer={
        "input_layernorm.weight": Rule("replicated", ("input_layernorm.weight",)),
        "self_attention.linear_qkv.weight": Rule(
            "qkv", ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
        ),
        "self_attention.linear_proj.weight": Rule("columns", ("self_attn.o_proj.weight",)),
        "pre_mlp_layernorm.weight": Rule("replicated", ("post_attention_layernorm.weight",)),
        "mlp.linear_fc1.weight": Rule("rows", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        "mlp.linear_fc2.weight": Rule("columns", ("mlp.down_proj.weight",)),
    },
)
