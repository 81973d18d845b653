"""Rotary position embedding with exactly the frequencies of transformers (default, linear, llama3, yarn).

Megatron computes cos and sin from the angles that it is handed. Packed sequences get the angles of their own
positions, [T, 1, 1, D]; Transformer Engine's kernels want a table by position instead, [L, 1, 1, D].
Yarn's factor on queries and keys cannot travel with the angles: `attention_scaling` is folded into the scale of the
attention scores by `build.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.layout import ModelSpec


def compute_frequencies(spec: ModelSpec) -> tuple[Tensor, float]:
    """inverse frequencies [D/2] fp32 and the factor that this rope type puts on cos and sin.

    Su et al. 2021 (RoPE); Peng et al. 2023 (yarn). The formulas are those of transformers.
    """
    rope = dict(spec.rope)
    rope_type = rope.get("rope_type", "default")
    if rope_type == "default":
        exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
        return 1.0 / (rope["rope_theta"] ** exponent), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        rope_parameters=rope,
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return inv_freq.float(), float(scaling)


class Rope(torch.nn.Module):
    """Angles of packed positions."""

    def __init__(self, inv_freq: Tensor, device: torch.device) -> None:
        super().__init__()
        self.inv_freq = inv_freq.to(device)  # not a buffer: a cast of the model to bf16 must not reach it

    def forward(self, positions: Tensor) -> Tensor:
        """positions [T] int64 -> angles [T, 1, 1, D] fp32."""
        angles = positions.float()[:, None] * self.inv_freq
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
