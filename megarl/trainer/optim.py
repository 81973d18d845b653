"""The optimizer of one role: Megatron's DDP and distributed Adam around a model, and the learning rate over time.

Weights may be bf16; gradients, masters and moments are fp32. A step whose gradient norm is not finite changes
nothing, on all ranks of the role alike, because all see the same norm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megarl import device
from megarl.models.packed_gpt import PackedGPT
from megarl.parallel.groups import RoleGroups
from megarl.parallel.topology import Topology


@dataclass(frozen=True)
class LRSchedule:
    """Linear warm-up to `peak`, then constant, linear or cosine decay to `floor` at step `decay_steps`."""

    peak: float
    floor: float
    warmup_steps: int
    decay: str
    decay_steps: int

    def at(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0; the first warm-up step is not zero."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        share = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (self.peak - self.floor) * share


@dataclass(frozen=True)
class AdamOptions:
    """What Adam needs beside the learning rate; `clip_grad=0` does not clip."""

    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float


@dataclass(frozen=True)
class StepResult:
    """`grad_norm` before clipping, over the whole model; `was_applied` is False when it was not finite."""

    grad_norm: float
    was_applied: bool


def shards_optimizer(topology: Topology) -> bool:
    """Whether masters and moments are shared out over data-parallel ranks. With one rank there is nothing to share, and
    the reduce-scatter of one would copy every gradient onto itself."""
    return topology.dp_size > 1


def wrap_for_training(model: PackedGPT, groups: RoleGroups) -> DistributedDataParallel:
    """Megatron's DDP around a chunk: fp32 gradients in contiguous buffers, added up (not averaged) over data-parallel
    ranks; `start_grad_sync` begins that without waiting.

    Its own overlap counts the gradients of each backward, which it does not see when weight gradients come later. So
    its hooks are told of no overlap, and only the buckets know that they are started early.
    """
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=shards_optimizer(groups.topology),
        delay_wgrad_compute=model.config.delay_wgrad_compute,
    )
    with device.megatron_build_scope():
        wrapped = DistributedDataParallel(model.config, options, model, pg_collection=groups.collection)
    for bucket_group in wrapped.bucket_groups:
        bucket_group.ddp_config = dataclasses.replace(options, overlap_grad_reduce=True)
    return wrapped


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], groups: RoleGroups, options: AdamOptions, dtype: torch.dtype
) -> ChainedOptimizer:
    """Distributed Adam (AdamW), its fp32 masters taken from the weights as they are now: load weights first.

    A collective of the world: ranks outside the role call `attend_optimizer_build`.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=options.weight_decay,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        clip_grad=options.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=shards_optimizer(groups.topology),
    )
    with device.megatron_build_scope():
        optimizer = get_megatron_optimizer(
            config, list(chunks), use_gloo_process_groups=False, pg_collection=groups.collection
        )
    assert isinstance(optimizer, ChainedOptimizer), f"Megatron built a {type(optimizer).__name__}"
    return optimizer


def attend_optimizer_build() -> None:
    """What a rank outside the role does while `build_optimizer` runs inside it.

    Megatron 0.16 compares its parameter groups over the whole world, not over the role: once for dense and once for
    expert parameters. A rank without the role joins with none.
    """
    for _ in range(2):
        dist.all_gather_object([None] * dist.get_world_size(), [])


def reduce_gradients(chunks: Sequence[DistributedDataParallel], groups: RoleGroups) -> None:
    """Adds gradients up over data-parallel ranks (or waits where that has begun), norms' over tensor-parallel ranks,
    tied embeddings' over stages."""
    with device.megatron_scope():
        for chunk in chunks:
            for bucket_group in chunk.bucket_groups:
                if bucket_group.grad_reduce_handle is None:
                    bucket_group.start_grad_sync()
        finalize_model_grads(list(chunks), None, pg_collection=groups.collection)


def gather_gradients(chunks: Sequence[DistributedDataParallel], groups: RoleGroups) -> None:
    """Whole gradients on every replica, where `reduce_gradients` left each replica its share."""
    if not shards_optimizer(groups.topology):
        return
    for bucket in (bucket for chunk in chunks for group in chunk.bucket_groups for bucket in group.buckets):
        shard = bucket.grad_data.view(groups.topology.dp_size, -1)[groups.at.dp].clone()
        dist.all_gather_into_tensor(bucket.grad_data, shard, group=groups.collection.dp)


def find_non_finite(chunks: Sequence[DistributedDataParallel]) -> list[str]:
    """The first parameter whose gradient on this rank alone is not finite, and how many there are; mostly nothing.

    One sum over the gradients, before they are added up over ranks: afterwards every rank has what one brought in.
    """
    if all(math.isfinite(float(buffer.grad_data.sum())) for chunk in chunks for buffer in vars(chunk)["buffers"]):
        return []
    named = [pair for chunk in chunks for pair in chunk.module.named_parameters()]
    wrong = [name for name, each in named if not bool(vars(each)["main_grad"].isfinite().all())]
    return [f"the gradients of {wrong[0]} and {len(wrong) - 1} more parameters are not finite"] if wrong else []


def apply_step(optimizer: ChainedOptimizer, lr: float, options: AdamOptions) -> StepResult:
    """One optimizer step with the gradients that lie in the model's buffers; all ranks of the role call it.

    Afterwards no parameter has a `grad`: where weights are their own masters, one that is left is an alias of the
    buffer, and the next backward would add the buffer to itself.
    """
    with device.megatron_build_scope():
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            optimizer.zero_grad()
            return StepResult(grad_norm, was_applied=False)
        for part in optimizer.chained_optimizers:
            parameters: list[torch.Tensor] = list(part.get_parameters())
            if parameters and options.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, max_norm=options.clip_grad, total_norm=grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = options.weight_decay * group.get("wd_mult", 1.0)
        optimizer.step_with_ready_grads()
        optimizer.zero_grad()
    return StepResult(grad_norm, was_applied=True)
