"""Whole Hugging Face tensors from the shards of a role, one after the other, on every rank of the job.

Each shard is broadcast by the rank of the first replica that holds it, and every rank puts the slices in place. At any
time a rank holds the tensors of one Megatron parameter only. Simple and right; every rank receives every byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.layout import Family, HeadKind, ModelSpec, hf_shapes, plan_stage
from megarl.parallel.topology import Topology


def gather_hf_tensors(
    family: Family,
    spec: ModelSpec,
    topology: Topology,
    weights: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    where: torch.device,
    head: HeadKind = "policy",
) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, whole tensor) for every tensor of the model, in the model's order.

    A collective of the world: every rank must run the iterator to its end.

    Args:
        topology: the role's grid.
        weights: this rank's parameters by layout name; None on a rank outside the role.
        dtype: dtype of the parameters, the same on all ranks of the role.
        where: the device they live on.
    """
    shapes = hf_shapes(family, spec, head)
    rank = dist.get_rank()
    for chunk, stage in enumerate(topology.chunk_stages):
        shards = [
            plan_stage(family, spec, topology.tp_size, tp_rank, topology.num_chunks, chunk, head)
            for tp_rank in range(topology.tp_size)
        ]
        for layouts in zip(*shards, strict=True):
            if layouts[0].is_tied_copy:
                continue
            whole: dict[str, Tensor] = {}
            for tp_rank, layout in enumerate(layouts[:1] if layouts[0].is_replicated else layouts):
                source = topology.rank_at(tp=tp_rank, dp=0, pp=stage)
                if rank == source:
                    assert weights is not None
                    shard = weights[layout.name].detach().contiguous()
                else:
                    shard = torch.empty(layout.shape, dtype=dtype, device=where)
                dist.broadcast(shard, src=source)
                for piece in layout.slices:
                    if piece.hf_name not in whole:
                        whole[piece.hf_name] = torch.empty(shapes[piece.hf_name], dtype=dtype, device=where)
                    target = whole[piece.hf_name].narrow(piece.axis, piece.hf_start, piece.length)
                    target.copy_(shard.narrow(piece.axis, piece.start, piece.length))
            yield from whole.items()
