"""One role's update: mini-batches, each split into micro-batches over the replicas, one optimizer step each.

The weight of every token in the loss is known before the first backward (`compute_token_weights` over the whole
mini-batch), and gradients are added up, never averaged. So the step is the same for every way to split the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import device
from megarl.algo.reduce import AggregationMode, compute_token_weights
from megarl.models.forward import hidden_shape, run_stage
from megarl.models.micro_batch import MicroBatch, build_micro_batch, plan_replicas
from megarl.parallel.pipeline import run_pipeline
from megarl.parallel.schedule import plan_1f1b
from megarl.records import PackedBatch
from megarl.trainer.optim import apply_step, reduce_gradients
from megarl.trainer.roles import Role

Objective = Callable[[Tensor, MicroBatch, "TokenWeights"], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class TokenWeights:
    """Weights over the whole `PackedBatch` for one mini-batch, 0 outside it.

    `loss` [T] fp32: sum(loss * per-token loss) is the mini-batch's loss. `mean` [T] fp32: token-mean weights, for
    statistics. `mask` [T] bool: the tokens that count.
    """

    loss: Tensor
    mean: Tensor
    mask: Tensor


@dataclass(frozen=True)
class UpdateResult:
    """What an update did: statistics averaged over its mini-batches, and how many steps were left out as not finite."""

    stats: dict[str, float]
    num_steps: int
    num_skipped: int


def weigh_tokens(batch: PackedBatch, mask: Tensor, rows: Sequence[int], mode: AggregationMode) -> TokenWeights:
    """Token weights of the mini-batch made of the sequences `rows`.

    Args:
        mask: [T] bool, the policy tokens that count (rows without a reward taken out).
    """
    in_batch = torch.zeros_like(mask)
    in_batch[batch.token_rows(rows)] = True
    counted = mask & in_batch
    mean = compute_token_weights(counted, batch.cu_seqlens, "token-mean")
    loss = mean if mode == "token-mean" else compute_token_weights(counted, batch.cu_seqlens, mode)
    return TokenWeights(loss=loss, mean=mean, mask=counted)


def update_role(
    role: Role,
    batch: PackedBatch,
    mask: Tensor,
    mini_batches: Sequence[Sequence[int]],
    objective: Objective,
    mode: AggregationMode,
    first_step: int,
) -> UpdateResult:
    """Runs the mini-batches one after the other; all ranks of the role call it with the same arguments.

    Args:
        mask: [T] bool, tokens that count.
        mini_batches: rows of each optimizer step.
        objective: last stage only: (hidden states, micro-batch, weights) -> loss (a share of the mini-batch's), stats.
        mode: how token losses become one number.
        first_step: optimizer steps taken before, for the learning rate.

    Returns:
        Statistics that are the same on every rank of the role.
    """
    assert role.training is not None, f"role {role.name} does not learn"
    sums: dict[str, float] = {}
    skipped = 0
    for number, rows in enumerate(mini_batches):
        weights = weigh_tokens(batch, mask, rows, mode)
        stats = compute_gradients(role, batch, rows, objective, weights)
        lr = role.training.schedule.at(first_step + number)
        result = apply_step(role.training.optimizer, lr, role.training.adam)
        skipped += not result.was_applied
        for name, value in {**stats, f"{role.name}/grad_norm": result.grad_norm, f"{role.name}/lr": lr}.items():
            sums[name] = sums.get(name, 0.0) + value
    count = max(1, len(mini_batches))
    return UpdateResult({name: value / count for name, value in sums.items()}, len(mini_batches), skipped)


def compute_gradients(
    role: Role, batch: PackedBatch, rows: Sequence[int], objective: Objective, weights: TokenWeights
) -> dict[str, float]:
    """Forward and backward of one mini-batch; afterwards the reduced gradients lie in the role's buffers.

    Returns:
        The statistics of the objective, summed over the mini-batch.
    """
    assert role.training is not None
    model = role.training.model
    topology, at = role.groups.topology, role.groups.at
    plans = plan_replicas(batch, rows, topology.dp_size, role.max_tokens, role.max_sequences)
    micros = [build_micro_batch(batch, part, topology.tp_size) for part in plans[at.dp]]
    totals: dict[str, float] = {}

    def forward(m: int, received: Tensor | None) -> Tensor:
        hidden = run_stage(model, micros[m], received)
        if not role.groups.is_last_stage:
            return hidden
        if micros[m].targets.numel() == 0:
            return hidden.float().sum() * 0.0  # nothing to learn here, yet the pipeline needs a gradient to send back
        loss, stats = objective(hidden, micros[m], weights)
        for name, value in stats.items():
            totals[name] = totals.get(name, 0.0) + float(value)
        return loss

    model.train()
    model.zero_grad_buffer()
    with device.megatron_scope():
        run_pipeline(
            plan_1f1b(topology.pp_size, at.pp, len(micros)),
            forward,
            [hidden_shape(micro, role.groups, role.spec.hidden_size) for micro in micros],
            role.dtype,
            role.groups,
        )
    reduce_gradients(model, role.groups)
    return _join_stats(role, totals)


def _join_stats(role: Role, totals: dict[str, float]) -> dict[str, float]:
    """Sums over the replicas, known on every rank of the role. Names come from the last stage of replica 0."""
    last = role.groups.topology.rank_at(tp=0, dp=0, pp=role.groups.topology.pp_size - 1)
    names: list[list[str]] = [sorted(totals)]
    dist.broadcast_object_list(names, src=last, group=role.groups.everyone)
    counts = role.groups.is_last_stage and role.groups.at.tp == 0
    own = [totals.get(name, 0.0) if counts else 0.0 for name in names[0]]
    vector = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(vector, group=role.groups.everyone)
    return dict(zip(names[0], vector.tolist(), strict=True))
