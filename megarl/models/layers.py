"""Layers of ours that go into Megatron's decoder through its layer spec, where Transformer Engine is not installed.

Megatron's own torch norm refuses sequence parallelism, and its own attention knows no packed sequences without
Transformer Engine; these two fill the gap, on CPU and GPU alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megarl.models.segments import PackedSegments, attend
from megarl.ops.norm import rms_norm


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019), computed in fp32 as transformers does.

    Under sequence parallelism each rank sees its part of the tokens; the weight is marked so that Megatron sums its
    gradient over tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (read by Megatron)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(torch.nn.Module):
    """silu(gate) * up (Shazeer 2020), without the extra passes of Megatron's unfused form."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 * I], gate then up -> [..., I]."""
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class SegmentAttention(torch.nn.Module):
    """Core attention over packed segments; what Megatron calls with queries, keys and values of the local heads."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSegments,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
    ) -> Tensor:
        """query [T, 1, N, D], key and value [T, 1, G, D] -> [T, 1, N * D]."""
        mixed = attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params.blocks, self.scale)
        return mixed.reshape(query.shape[0], 1, -1)
