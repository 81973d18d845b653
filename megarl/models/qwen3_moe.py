"""The Qwen3-MoE family: Qwen3's attention, and a layer of experts with a router instead of the MLP."""

from __future__ import annotations

import dataclasses

from megarl.models import qwen3
from megarl.models.layout import Rule

EXPERT = "mlp.experts.{expert}."

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    name="qwen3_moe",
    layer={
        **{name: rule for name, rule in qwen3.FAMILY.layer.items() if not name.startswith("mlp.")},
        "mlp.router.weight": Rule("replicated", ("mlp.gate.weight",)),
    },
    expert={
        "linear_fc1.weight": Rule("rows", (f"{EXPERT}gate_proj.weight", f"{EXPERT}up_proj.weight")),
        "linear_fc2.weight": Rule("columns", (f"{EXPERT}down_proj.weight",)),
    },
)
