"""The Mixtral family: Llama's attention, and a layer of experts with a router instead of the MLP."""

from __future__ import annotations

import dataclasses

from megarl.models import llama
from megarl.models.layout import Rule

EXPERT = "block_sparse_moe.experts.{expert}."

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="mixtral",
    layer={
        **{name: rule for name, rule in llama.FAMILY.layer.items() if not name.startswith("mlp.")},
        "mlp.router.weight": Rule("replicated", ("block_sparse_moe.gate.weight",)),
    },
    expert={
        "linear_fc1.weight": Rule("rows", (f"{EXPERT}w1.weight", f"{EXPERT}w3.weight")),
        "linear_fc2.weight": Rule("columns", (f"{EXPERT}w2.weight",)),
    },
)
