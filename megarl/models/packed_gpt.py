"""Megatron's GPTModel as a trainer of packed sequences needs it.

Two steps differ from the parent, and only these: the angles of the rotary embedding follow each segment's own
positions, and the model ends at the hidden states. Log-probs and values are computed from those by `forward.py`,
only where a loss needs them, so that no [T, V] tensor of logits ever exists.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.models.deferred import PutAside
from megarl.models.rope import Rope
from megarl.models.segments import PackedSegments


class PackedGPT(GPTModel):
    """One pipeline stage of a decoder-only model over packed segments.

    `forward(input_ids [1, T], position_ids [1, T], None, packed_seq_params=...)` returns hidden states
    [T / tp under sequence parallelism, 1, H], on the last stage after the final norm. Stages after the first read
    their input from `set_input_tensor`.
    """

    rope: Rope
    put_aside: PutAside  # weight gradients that a schedule computes later than the input's

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSegments | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Any, ...]:
        assert packed_seq_params is not None, "PackedGPT reads packed sequences only"
        embedded = self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None
        if packed_seq_params.qkv_format == "thd":
            assert packed_seq_params.max_seqlen_q is not None
            angles = self.rope(torch.arange(packed_seq_params.max_seqlen_q, device=position_ids.device))
        else:
            angles = self.rope(position_ids.flatten())
        return embedded, angles, None, None, None, None

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return hidden_states

    def tie_head(self, first: PackedGPT) -> None:
        """Makes the embedding of `first`, the model's first chunk on the same rank, this last chunk's head as well.

        One parameter, which belongs to `first`: one gradient, one master, nothing to keep equal.
        """
        self._modules["output_layer"] = None
        vars(self)["tied_head"] = (first.embedding.word_embeddings.weight,)  # in a tuple: not a parameter of this chunk

    def head_weight(self) -> Tensor:
        """[Vp, H]: this rank's rows of the output projection, the embedding's where the two are tied."""
        if "tied_head" in vars(self):
            return vars(self)["tied_head"][0]
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = None if self.output_layer is None else self.output_layer.weight
        assert weight is not None, "this stage has no head"
        return weight


class ValueHead(torch.nn.Module):
    """The critic's last layer, [1, H], the same on every tensor-parallel rank. Starts at zero: V = 0 everywhere."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [K, H] -> values [K] fp32."""
        return torch.nn.functional.linear(hidden, self.weight).float().squeeze(-1)
