"""The standing connection between an actor and its engines: planned once, run after every update, proved on demand.

    sync = open_weight_sync(family, spec, actor_topology, engine_topology, rank, group, ...)   # once
    metrics = sync.run(actor_weights, engine_parameters, publish)      # after every update; a collective of the group

`verify` says when the transfer is proved: each rank adds up checksums of what it trains, the sums are joined by
tensor, and every engine must hold tensors with the same sums before it may answer. The engine's side of the proof asks
vLLM's own modules which rows they hold; the plan is not asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import device
from megarl.models.layout import Family, ModelSpec
from megarl.parallel.topology import Topology
from megarl.weights.blocks import Block, Holdings, Shard, list_engine_shards, list_engines, list_trainer_shards
from megarl.weights.checksum import add_checksums, compute_checksum
from megarl.weights.plan import plan_reshard, summarize
from megarl.weights.reshard import BUCKET_BYTES, Resharder, ReshardStats, build_resharder

Verify = Literal["first", "always", "never"]


@dataclass(frozen=True)
class OwnedBlock:
    """A block of this rank's parameter `parameter` that no rank before it holds."""

    parameter: str
    block: Block


class WeightSync:
    """Holds one rank's compiled transfer and its staging buffers. Built by `open_weight_sync`."""

    def __init__(
        self,
        resharder: Resharder,
        owned: Sequence[OwnedBlock],
        names: Sequence[str],
        shards: Sequence[Shard],
        dtypes: tuple[torch.dtype, torch.dtype],
        verify: Verify,
        total_received_bytes: int,
    ) -> None:
        self.resharder = resharder
        self._owned = tuple(owned)
        self._names = tuple(names)
        self._shards = tuple(shards)
        self._wire_dtype, self._engine_dtype = dtypes
        self._verify: Verify = verify
        self._num_runs = 0
        self._total_received_bytes = total_received_bytes

    def run(
        self,
        trained: Mapping[str, Tensor],
        live: Mapping[str, Tensor],
        checksums: Callable[[], Mapping[str, int]],
    ) -> dict[str, float]:
        """Writes the actor's weights into the engine's parameters. A collective of the group.

        Args:
            trained: this rank's part of the actor by layout name; empty outside it.
            live: this rank's part of an engine by vLLM's name, written in place; empty where no engine lives.
            checksums: what the engine holds, by Hugging Face name; a collective of the engine's ranks.

        Returns:
            `sync/*`: seconds and rounds of this rank, bytes that all ranks received together.

        Raises:
            RuntimeError: an engine holds other values than the actor; it must not answer.
        """
        check_live(self._shards, live)
        shared = self.resharder.shared
        for name, source in shared.items():
            assert live[name].data_ptr() == trained[source].data_ptr(), f"{name} is not the trainer's {source}"
        zero_padding_([shard for shard in self._shards if shard.name not in shared], live)
        stats = self.resharder.run(trained, live)
        metrics = self._describe(stats)
        self._num_runs += 1
        if self._verify == "always" or (self._verify == "first" and self._num_runs == 1):
            begin = time.perf_counter()
            self._prove(trained, live, checksums)
            metrics["sync/verify_s"] = time.perf_counter() - begin
        return metrics

    def _describe(self, stats: ReshardStats) -> dict[str, float]:
        return {
            "sync/transfer_s": stats.seconds,
            "sync/received_bytes": float(self._total_received_bytes),
            "sync/kept_bytes": float(stats.kept_bytes),
            "sync/shared_parameters": float(len(self.resharder.shared)),
            "sync/rounds": float(stats.num_rounds),
            "sync/gb_per_s": stats.received_bytes / 1e9 / max(stats.seconds, 1e-9),
            "sync/staging_bytes": float(self.resharder.staging_bytes),
        }

    def _prove(
        self, trained: Mapping[str, Tensor], live: Mapping[str, Tensor], checksums: Callable[[], Mapping[str, int]]
    ) -> None:
        sent = self.compute_sent_checksums(trained)
        held = checksums() if live else sent
        wrong = sorted(name for name in {*held, *sent} if held.get(name) != sent.get(name))
        everywhere = torch.tensor([len(wrong)], dtype=torch.int64, device=device.device())
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=self.resharder.group)
        if int(everywhere):  # every rank of the group raises
            where = f"first on this rank: {wrong[0]}" if wrong else "none of them on this rank"
            raise RuntimeError(
                f"after the weight transfer {int(everywhere)} of {len(sent)} tensors differ between actor and engine, "
                f"{where}; nothing was generated with them"
            )

    def compute_sent_checksums(self, trained: Mapping[str, Tensor]) -> dict[str, int]:
        """The checksum of every tensor of the actor in the engine's dtype. A collective of the group."""
        index = {name: i for i, name in enumerate(self._names)}
        sums = [0] * len(index)
        for owned in self._owned:
            values = view_block(trained[owned.parameter], owned.block).to(self._wire_dtype).to(self._engine_dtype)
            part = compute_checksum(values, owned.block.row_start, owned.block.column_start)
            place = index[owned.block.hf_name]
            sums[place] = add_checksums((sums[place], part))
        joined = torch.tensor(sums, dtype=torch.int64, device=device.device())
        dist.all_reduce(joined, group=self.resharder.group)
        return dict(zip(self._names, joined.tolist(), strict=True))


def open_weight_sync(
    family: Family,
    spec: ModelSpec,
    actor: Topology,
    engines: Topology,
    rank: int,
    group: dist.ProcessGroup,
    *,
    trainer_dtype: torch.dtype,
    engine_dtype: torch.dtype,
    ranks_per_node: int,
    verify: Verify = "first",
    bucket_bytes: int = BUCKET_BYTES,
    shares: bool = False,
) -> WeightSync:
    """Plans the transfer from the actor's grid to the engines' and compiles this rank's part; no communication.

    Args:
        actor, engines: the two grids; an engine is a tensor-parallel group of the second.
        group: all ranks of both.
        trainer_dtype, engine_dtype: of the parameters on both sides.
        ranks_per_node: for the ways that copies take.
        verify: which transfers are proved by checksum.
        bucket_bytes: of all staging buffers of a rank together.
        shares: engine parameters that a rank trains in the same layout are to be the trainer's own storage; the
            caller hands `resharder.shared` to `RolloutEngine.share_weights` before the first run.

    Raises:
        ValueError: an engine's TP that does not fit the model, or dtypes that cannot be cast.
    """
    sources = list_trainer_shards(family, spec, actor)
    targets = list_engine_shards(family, spec, list_engines(engines.ranks, engines.tp_size))
    plan = plan_reshard(sources, targets, ranks_per_node)
    resharder = build_resharder(plan, rank, group, trainer_dtype, engine_dtype, bucket_bytes, shares)
    itemsize = min(trainer_dtype.itemsize, engine_dtype.itemsize)
    received = sum(traffic.received for traffic in summarize(plan, itemsize))
    names = sorted({block.hf_name for shards in targets.values() for shard in shards for block in shard.blocks})
    wire = min(trainer_dtype, engine_dtype, key=lambda dtype: dtype.itemsize)
    return WeightSync(
        resharder,
        list_owned_blocks(sources, rank),
        names,
        targets.get(rank, []),
        (wire, engine_dtype),
        verify,
        received,
    )


def list_owned_blocks(holdings: Holdings, rank: int) -> list[OwnedBlock]:
    """The blocks of `rank` that no lower rank holds too: over all ranks every element occurs once. Pure."""
    taken: set[tuple[str, int, int, int, int]] = set()
    owned: list[OwnedBlock] = []
    for each in sorted(holdings):
        for shard in holdings[each]:
            for block in shard.blocks:
                area = (block.hf_name, block.row_start, block.num_rows, block.column_start, block.num_columns)
                if area not in taken and each == rank:
                    owned.append(OwnedBlock(shard.name, block))
                taken.add(area)
        if each == rank:
            break
    return owned


def view_block(parameter: Tensor, block: Block) -> Tensor:
    """[rows, columns] view of a block of a contiguous parameter; [rows] for a vector."""
    if block.num_columns == 1 and block.stride == 1:
        return parameter.reshape(-1)[block.offset : block.offset + block.num_rows]
    return parameter.as_strided(
        (block.num_rows, block.num_columns), (block.stride, 1), int(parameter.storage_offset()) + block.offset
    )


def check_live(shards: Sequence[Shard], live: Mapping[str, Tensor]) -> None:
    """Raises ValueError when the engine's parameters are not those that were planned for."""
    planned = {shard.name: shard.numel for shard in shards}
    found = {name: tensor.numel() for name, tensor in live.items()}
    if planned != found:
        wrong = sorted(name for name in {*planned, *found} if planned.get(name) != found.get(name))
        shown = ", ".join(f"{name}: planned {planned.get(name)}, found {found.get(name)}" for name in wrong[:4])
        raise ValueError(
            f"rollout.name=vllm: {len(wrong)} parameters of this model lie in vLLM otherwise than planned "
            f"(elements: {shown}); use rollout.name=naive for it"
        )


def zero_padding_(shards: Sequence[Shard], live: Mapping[str, Tensor]) -> None:
    """Zeroes what no block fills: rows that the engine added to the vocabulary."""
    for shard in shards:
        if shard.num_padding:
            live[shard.name].reshape(-1)[shard.numel - shard.num_padding :].zero_()
