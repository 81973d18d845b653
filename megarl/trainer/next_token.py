"""Logits of the token that follows each sequence, from a role's own model on any grid; for the naive engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megarl import device
from megarl.models.forward import hidden_shape, run_stage, unwrap
from megarl.models.micro_batch import build_micro_batch
from megarl.parallel.costs import ratio_costs_of
from megarl.parallel.partition import plan_micro_batches
from megarl.parallel.picker import pick_stream
from megarl.parallel.pipeline import StageModel, run_instructions
from megarl.parallel.schedule import ModelPlan, Schedule
from megarl.records import PackedBatch
from megarl.trainer.roles import Role


def build_next_logits(role: Role) -> Callable[[Sequence[Sequence[int]]], Tensor]:
    """A function from sequences to next-token logits, to be called by all ranks of one replica of `role` together.

    Returns:
        sequences -> [B, V] fp32 on the host, the same on every rank of the replica; -inf from `role.num_ids` on.
    """

    @torch.no_grad()
    def next_logits(sequences: Sequence[Sequence[int]]) -> Tensor:
        return _run(role, sequences)

    return next_logits


def _run(role: Role, sequences: Sequence[Sequence[int]]) -> Tensor:
    batch = _pack(sequences)
    topology, groups = role.groups.topology, role.groups
    plans = plan_micro_batches(batch.lengths.tolist(), role.max_tokens)
    micros = [build_micro_batch(batch, rows, topology.tp_size) for rows in plans]
    logits = torch.zeros(len(sequences), role.spec.vocab_size)

    chunks = dict(zip(groups.chunks, role.chunks, strict=True))

    def forward(chunk: int, m: int, received: Tensor | None) -> Tensor:
        hidden = run_stage(chunks[chunk], micros[m], received)
        if chunk == topology.num_chunks - 1:
            logits[plans[m]] = last_logits(hidden, [len(sequences[row]) for row in plans[m]])
        return hidden

    def last_logits(hidden: Tensor, lengths: list[int]) -> Tensor:
        if topology.tp_size > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=groups.collection.tp)
        last = torch.tensor(lengths).cumsum(0) - 1
        local = (hidden.squeeze(1)[last.to(hidden.device)] @ unwrap(role.model).head_weight().t()).float().cpu()
        parts = [torch.empty_like(local) for _ in range(topology.tp_size)]
        dist.all_gather(parts, local, group=groups.collection.tp)
        return torch.cat(parts, dim=-1)[:, : role.spec.vocab_size]

    was_training = role.model.training
    for chunk in role.chunks:
        chunk.eval()
    schedule = _plan_passes(role.name, topology.chunk_stages, len(micros))
    shapes = [hidden_shape(micro, groups, role.spec.hidden_size) for micro in micros]
    with device.megatron_scope():
        run_instructions(schedule, groups.at.pp, {role.name: StageModel(forward, shapes, role.dtype, groups)})
    for chunk in role.chunks:
        chunk.train(was_training)
    dist.broadcast(logits, src=groups.peer(topology.last_stage), group=groups.collection.pp)
    logits[:, role.num_ids :] = -torch.inf
    return logits


@functools.lru_cache(maxsize=64)
def _plan_passes(name: str, chunk_stages: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """The same few schedules come up for every token."""
    plan = ModelPlan(name, chunk_stages, (num_micro_batches,), trains=False)
    return pick_stream([plan], ratio_costs_of([plan])).schedule


def _pack(sequences: Sequence[Sequence[int]]) -> PackedBatch:
    lengths = torch.tensor([0, *(len(sequence) for sequence in sequences)])
    tokens = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
    return PackedBatch(
        tokens=tokens,
        cu_seqlens=lengths.cumsum(0),
        response_mask=torch.zeros(tokens.numel(), dtype=torch.bool),
        rollout_logprobs=torch.zeros(tokens.numel()),
        group=torch.arange(len(sequences)),
        is_finished=torch.zeros(len(sequences), dtype=torch.bool),
    )
