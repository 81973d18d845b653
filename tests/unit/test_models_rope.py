"""Rotary angles equal transformers' for every supported type, near and far."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.models.registry import spec_from_config
from megarl.models.rope import Rope, compute_frequencies

TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 10000.0, "original_max_position_embeddings": 1024},
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_cos_and_sin_at_positions_5_and_6000(name: str) -> None:  # case A10
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=8192, rope_parameters=TYPES[name]
    )
    positions = torch.tensor([0, 5, 6000])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 3, 64), positions[None])
    _, spec = spec_from_config(config, "here")
    inv_freq, scaling = compute_frequencies(spec)
    angles = Rope(inv_freq, torch.device("cpu"))(positions)[:, 0, 0]
    torch.testing.assert_close(angles.cos() * scaling, cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(angles.sin() * scaling, sin[0], rtol=0, atol=1e-6)
