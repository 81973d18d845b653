"""One micro-batch through one stage: packed tokens in, hidden states or scores out.

`build_micro_batch` turns sequences of a `PackedBatch` into what the model reads. The score of token t comes from the
hidden state at t - 1 of the same sequence, so it also notes, for every policy token, which hidden state to read
(`head_index`), the token itself (`targets`) and where its score belongs in the whole batch (`token_index`).

Under sequence parallelism the number of tokens must be a multiple of tp: the missing ones are a segment of their own
at the end that no score ever reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megarl import device
from megarl.models.build import uses_transformer_engine
from megarl.models.packed_gpt import PackedGPT
from megarl.models.segments import PackedSegments, plan_segments
from megarl.ops.logprob import linear_logprob_entropy
from megarl.parallel.groups import RoleGroups
from megarl.records import PackedBatch


@dataclass(frozen=True)
class MicroBatch:
    """What the stages of one replica read in one pass; on the device.

    Attributes:
        input_ids, position_ids: [1, T'] int64, T' a multiple of tp.
        segments: the attention plan.
        head_index: [K] int64, the hidden states that scores are read from.
        targets: [K] int64, the policy tokens.
        token_index: [K] int64, on the host: positions of these tokens in the whole `PackedBatch`.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: PackedSegments
    head_index: Tensor
    targets: Tensor
    token_index: Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]


def build_micro_batch(batch: PackedBatch, rows: Sequence[int], tp_size: int) -> MicroBatch:
    """Packs the sequences `rows`; no rows give a dummy of one filler segment, with nothing to score."""
    token_index = batch.token_rows(rows)
    lengths = batch.lengths[torch.as_tensor(list(rows), dtype=torch.int64)].tolist()
    tokens = batch.tokens[token_index]
    filler = -len(tokens) % tp_size if len(tokens) else tp_size
    segment_lengths = [*lengths, filler] if filler else lengths
    positions = torch.cat([torch.arange(length) for length in segment_lengths])
    policy = batch.response_mask[token_index].nonzero().flatten()
    assert bool((positions[policy] > 0).all()), "a sequence begins with a policy token: prompts must not be empty"
    where = device.device()
    return MicroBatch(
        input_ids=torch.cat((tokens, tokens.new_zeros(filler)))[None].to(where),
        position_ids=positions[None].to(where),
        segments=build_segments(segment_lengths),
        head_index=(policy - 1).to(where),
        targets=tokens[policy].to(where),
        token_index=token_index[policy],
    )


def build_segments(lengths: Sequence[int]) -> PackedSegments:
    """The attention plan for packed segments of these lengths."""
    where = device.device()
    if not uses_transformer_engine():
        return PackedSegments(qkv_format="segments", blocks=plan_segments(lengths, where))
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths).cumsum(0)
    bounds = bounds.to(where)
    longest = max(lengths)
    return PackedSegments(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def run_stage(model: torch.nn.Module, micro: MicroBatch, received: Tensor | None) -> Tensor:
    """Hidden states [T' / tp, 1, H] of this stage.

    Args:
        model: a `PackedGPT`, or Megatron's DDP around one.
        received: the previous stage's hidden states; None on the first stage.
    """
    bare = unwrap(model)
    bare.set_input_tensor(received)
    return model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.segments)


def unwrap(model: torch.nn.Module) -> PackedGPT:
    """The `PackedGPT` inside whatever Megatron wrapped around it."""
    while not isinstance(model, PackedGPT):
        model = model.module  # type: ignore[assignment]
    return model


def read_hidden(hidden: Tensor, micro: MicroBatch, groups: RoleGroups) -> Tensor:
    """[K, H]: the hidden states that the scores of this micro-batch are read from, on every tensor-parallel rank."""
    if groups.topology.tp_size > 1:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=groups.collection.tp
        )
    return hidden.squeeze(1)[micro.head_index]


def compute_logprobs(
    model: torch.nn.Module, hidden: Tensor, micro: MicroBatch, groups: RoleGroups, temperature: float, num_ids: int
) -> tuple[Tensor, Tensor]:
    """Last stage: log-probs [K] and entropies [K] fp32 of the policy tokens at the sampling temperature.

    Ids from `num_ids` on take no mass.
    """
    weight = unwrap(model).head_weight()
    return linear_logprob_entropy(
        read_hidden(hidden, micro, groups),
        weight,
        micro.targets,
        temperature=temperature,
        vocab_start=weight.shape[0] * groups.at.tp,
        vocab_size=num_ids,
        tp_group=groups.collection.tp,
    )


def compute_values(model: torch.nn.Module, hidden: Tensor, micro: MicroBatch, groups: RoleGroups) -> Tensor:
    """Last stage of a critic: values [K] fp32 of the states before the policy tokens."""
    return unwrap(model).output_layer(read_hidden(hidden, micro, groups))


def hidden_shape(micro: MicroBatch, groups: RoleGroups, hidden_size: int) -> tuple[int, int, int]:
    """Shape of what one stage sends to the next for this micro-batch; known to all stages beforehand."""
    return micro.num_tokens // groups.topology.tp_size, 1, hidden_size
