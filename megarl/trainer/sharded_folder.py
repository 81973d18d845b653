"""A folder of sharded tensors, in the format of `megatron.core.dist_checkpointing`; collectives of the whole world.

    plan_folder (all ranks)  ->  PendingFolder.write (each rank, on any thread)  ->  finish_folder (all ranks)
    load_folder (all ranks)

Megatron's own `save` forks writers out of the trainer and keeps a server process on every rank; here threads write, so
that nothing outlives a rank that is killed. An error of one rank while it writes is an error of all ranks at the end,
and the folder can be read only when the last file of all, `metadata.json`, is there. Ranks that have nothing to save or
to load take part with an empty list.

`.metadata` in such a folder is a pickle, as torch writes it: `read_metadata` refuses one that names anything but the
classes that belong there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from megarl import device
from megarl.weights.patches import Patch
from megarl.weights.torch_dist import read_metadata, read_tensors

FORMAT = CheckpointingConfig(sharded_backend="torch_dist", sharded_backend_version=1)


class CheckpointFailed(RuntimeError):
    """A save that did not come to its end; raised on every rank, and what was current before still is."""


class _Writer(FileSystemWriter):
    """torch's writer of one file a rank, with planning taken apart from writing as Megatron's planner wants it."""

    can_run_decentralized_global_plan = True

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.parts: tuple[SavePlan, SavePlanner] | None = None

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return replace(local_plan, storage_data=_StoragePrefix(f"__{dist.get_rank()}_"))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.parts = (plan, planner)


@dataclass
class PendingFolder:
    """A folder that is planned and not finished; `results` is what this rank wrote, or how it failed."""

    path: Path
    writer: _Writer
    metadata: Metadata | None
    results: list[Any] | str = field(default="nothing was written")

    def write(self) -> None:
        """Writes this rank's files; keeps an error for `finish_folder`."""
        assert self.writer.parts is not None, f"{self.path} was not planned, or is written twice"
        plan, planner = self.writer.parts
        try:
            self.results = list(self.writer.write_data(plan, planner).wait())
            if dist.get_rank() == 0:
                TorchCommonSaveStrategy("torch", 1).save_common({"content_metadata": {}}, str(self.path))
        except Exception as error:  # noqa: BLE001 (told to all ranks by finish_folder, which raises)
            self.results = f"{type(error).__name__}: {error}"
        self.writer.parts = None  # lets go of the tensors


def shard(patch: Patch, data: torch.Tensor, prefix: str = "", is_main: bool = True) -> ShardedTensor:
    """A rectangle of a checkpoint's tensor.

    Args:
        data: [*patch.shape] or flattened, contiguous: what is saved, or the memory that loading fills.
        prefix: goes before the tensor's name.
        is_main: whether this rank is the one that writes it.
    """
    whole = data.detach().view(patch.whole_extent)
    return ShardedTensor(
        key=prefix + patch.key,
        data=whole,
        dtype=data.dtype,
        local_shape=patch.whole_extent,
        global_shape=patch.whole_shape,
        global_offset=patch.whole_offset,
        axis_fragmentations=None,  # no regular grid: stages and shares may be of different sizes
        replica_id=0 if is_main else 1,
    )


def plan_folder(shards: Sequence[ShardedTensor], path: Path) -> PendingFolder:
    """Agrees on who writes what; a collective of the world. The folder exists; tensors must stay as they are until
    `write` has returned.

    Raises:
        ValueError: on rank 0, when the shards do not cover each tensor exactly once.
    """
    by_key: dict[str, list[ShardedTensor]] = {}
    for each in shards:
        if is_main_replica(each.replica_id):
            by_key.setdefault(each.key, []).append(each)
    writer = _Writer(path)
    with device.megatron_scope():
        planned = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(dict(by_key), is_loading=False),  # type: ignore[arg-type]
            writer,  # type: ignore[arg-type]
            None,
            0,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
    metadata = planned[0][1]
    if metadata is not None:
        vars(metadata).pop("all_local_plans", None)  # Megatron's note for a cache that is not used here
    return PendingFolder(path, writer, metadata)


def finish_folder(pending: PendingFolder) -> None:
    """Writes what makes the folder readable, when every rank has written its part; a collective of the world.

    Raises:
        CheckpointFailed: on every rank, with the first error of each rank that had one.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(pending.results, gathered, dst=0)
    problem: list[str] = [""]
    if gathered is not None:
        failed = [f"rank {other}: {result}" for other, result in enumerate(gathered) if isinstance(result, str)]
        problem[0] = "; ".join(failed)
        if not failed:
            assert pending.metadata is not None
            try:
                pending.writer.finish(pending.metadata, gathered)
                save_config(FORMAT, str(pending.path))
            except OSError as error:
                problem[0] = f"rank 0: {type(error).__name__}: {error}"
    dist.broadcast_object_list(problem, src=0, device=torch.device("cpu"))
    if problem[0]:
        raise CheckpointFailed(f"{pending.path.name}: {problem[0]}")


def load_folder(shards: Sequence[ShardedTensor], path: Path) -> None:
    """Fills the memory of the shards; a collective of the world.

    Raises:
        CheckpointingException: a tensor that the folder lacks, or of another shape.
        ValueError: see `read_metadata`.
    """
    read_metadata(path / ".metadata")
    with device.megatron_scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Megatron calls torch's loader by its old name
        dist_checkpointing.load(
            {str(number): each for number, each in enumerate(shards)}, str(path), validate_access_integrity=False
        )


def list_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor in a folder, by key; reads only its index, see `weights/torch_dist.py`."""
    return {key: (tensor.shape, tensor.dtype) for key, tensor in read_tensors(path).items()}
