"""One micro-batch through one stage: packed tokens in, hidden states or scores out."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megarl.models.micro_batch import MicroBatch
from megarl.models.packed_gpt import PackedGPT
from megarl.ops.logprob import linear_logprob_entropy, logprob_entropy
from megarl.ops.policy_head import TokenLoss, policy_head
from megarl.parallel.groups import RoleGroups


def run_stage(model: torch.nn.Module, micro: MicroBatch, received: Tensor | None) -> Tensor:
    """Hidden states [T' / tp, 1, H] of this stage.

    Args:
        model: a `PackedGPT`, or Megatron's DDP around one.
        received: the previous stage's hidden states; None on the first stage.
    """
    bare = unwrap(model)
    bare.decoder.input_tensor = received
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


def compute_logprobs_of_logits(
    model: torch.nn.Module, hidden: Tensor, micro: MicroBatch, groups: RoleGroups, temperature: float, num_ids: int
) -> tuple[Tensor, Tensor]:
    """`compute_logprobs` with all logits held at once: needs memory for them, computes none of them twice."""
    weight = unwrap(model).head_weight()
    hidden = copy_to_tensor_model_parallel_region(read_hidden(hidden, micro, groups), group=groups.collection.tp)
    return logprob_entropy(
        torch.mm(hidden, weight.t()),
        micro.targets,
        temperature=temperature,
        vocab_start=weight.shape[0] * groups.at.tp,
        vocab_size=num_ids,
        tp_group=groups.collection.tp,
        overwrite_logits=True,
    )


def run_policy_head(
    model: torch.nn.Module,
    hidden: Tensor,
    micro: MicroBatch,
    groups: RoleGroups,
    temperature: float,
    num_ids: int,
    token_loss: TokenLoss,
    whole: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Last stage: the loss of the policy tokens and its statistics, with no logit computed twice or kept; `whole` gives
    the loss all tokens at once, and computes the logits twice for it.

    Where Megatron's DDP gives the head's weight an fp32 `main_grad`, the gradient is added to it right here.
    """
    weight = unwrap(model).head_weight()
    return policy_head(
        hidden.squeeze(1),
        weight,
        micro.targets,
        token_loss,
        temperature=temperature,
        vocab_start=weight.shape[0] * groups.at.tp,
        vocab_size=num_ids,
        tp_group=groups.collection.tp,
        rows=micro.head_index,
        sequence_parallel=groups.topology.tp_size > 1,
        main_grad=getattr(weight, "main_grad", None),
        whole=whole,
    )


def compute_values(model: torch.nn.Module, hidden: Tensor, micro: MicroBatch, groups: RoleGroups) -> Tensor:
    """Last stage of a critic: values [K] fp32 of the states before the policy tokens."""
    head = unwrap(model).output_layer
    assert head is not None, "this stage has no value head"
    return head(read_hidden(hidden, micro, groups))


def hidden_shape(micro: MicroBatch, groups: RoleGroups, hidden_size: int) -> tuple[int, int, int]:
    """Shape of what one stage sends to the next for this micro-batch; known to all stages beforehand."""
    return micro.num_tokens // groups.topology.tp_size, 1, hidden_size
