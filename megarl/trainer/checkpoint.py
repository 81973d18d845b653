"""Checkpoints of a run: every role that learns, the small state, and the random numbers of every rank.

    step_000010/  actor/ critic/         sharded tensors: weights, masters, moments (`role_state.py`)
                  ranks/rank_00000.pt    random states of each rank
                  state.json             step, data position, counters, controllers, roles, versions
                  config.yaml metrics.jsonl   what the caller adds

Saving, on every rank of the world:

    begin     tensors are listed and planned; asynchronously: copied to the host first
    write     each rank writes its files: here, or on a thread while training goes on
    finish    all ranks learn whether all have written; rank 0 completes the folder, makes it current, clears old ones

An error of any rank in any of these is `CheckpointFailed` on all of them; the checkpoint before stays the current one.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from megarl.trainer import checkpoint_files as files
from megarl.trainer.offload import Offload
from megarl.trainer.rng import RngState, capture_rng
from megarl.trainer.role_state import count_adam_steps, list_role_shards, load_role
from megarl.trainer.roles import Role
from megarl.trainer.sharded_folder import CheckpointFailed, PendingFolder, finish_folder, plan_folder

STATE = "state.json"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class CheckpointWriter:
    """Saves checkpoints below `root`; holds the one that is being written. All methods are collectives of the world.

    Args:
        root: the folder of checkpoints, the same on all ranks.
        roles: the roles that learn, by name, in the same order on all ranks; None where this rank is outside.
        keep: complete checkpoints to keep; None = all.
        is_async: write on a thread.
        offloads: by role, what may be parked; such a role is brought back, copied to the host, and parked again.
    """

    def __init__(
        self,
        root: Path,
        roles: Mapping[str, Role | None],
        keep: int | None,
        is_async: bool,
        offloads: Mapping[str, Offload] | None = None,
    ) -> None:
        self._root, self._roles, self._keep, self._is_async = root, dict(roles), keep, is_async
        self._offloads = dict(offloads or {})
        self._pending: _Pending | None = None

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part of a checkpoint is still being written; not a collective."""
        return self._pending is not None and self._pending.is_writing

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint was begun and not finished; the same on every rank."""
        return self._pending is not None

    def begin(self, step: int, state: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """Begins a checkpoint, and writes it too unless saving is asynchronous.

        Args:
            step: finished steps.
            state: small state for `state.json`; what rank 0 gives counts.
            texts: further small files by name, likewise.

        Raises:
            CheckpointFailed: the folder cannot be made, or the disk has not enough room.
        """
        assert self._pending is None, "a checkpoint is still being written"
        shards = {name: self._list_shards(name, role) for name, role in self._roles.items()}
        num_bytes = sum(each.data.nbytes for own in shards.values() for each in own if each.data is not None)
        folder = Path(_on_rank_0(lambda: str(_make_folder(self._root, step, list(shards))), _sum(num_bytes)))
        facts = describe_roles(self._roles)
        folders = [plan_folder(own, folder / name) for name, own in shards.items()]
        small = dict(texts) | {STATE: json.dumps({**state, "step": step, "roles": facts}, indent=1)}
        self._pending = _Pending(folder, folders, capture_rng(), small)
        if self._is_async:
            self._pending.start()
        else:
            self._pending.write()

    def _list_shards(self, name: str, role: Role | None) -> list[ShardedTensor]:
        if role is None:
            return []
        offload = self._offloads.get(name)
        if offload is None:
            return list_role_shards(role, is_snapshot=self._is_async)
        offload.return_all()
        shards = list_role_shards(role, is_snapshot=True)
        offload.leave()
        return shards

    def finish(self) -> Path:
        """Waits for the checkpoint that was begun, completes it and makes it current.

        Returns:
            Its folder.

        Raises:
            CheckpointFailed: on every rank; what was current still is.
        """
        pending, self._pending = self._pending, None
        assert pending is not None, "no checkpoint was begun"
        pending.wait()
        try:
            for folder in pending.folders:
                finish_folder(folder)
            _raise_everywhere(pending.error)
            return Path(_on_rank_0(lambda: str(self._complete(pending.path))))
        except CheckpointFailed:
            if dist.get_rank() == 0:
                files.abandon(pending.path)
            raise

    def _complete(self, writing: Path) -> Path:
        final = files.complete(writing)
        if self._keep is not None:
            files.prune(self._root, self._keep)
        return final


class _Pending:
    """One rank's part of a checkpoint between `begin` and `finish`."""

    def __init__(self, path: Path, folders: list[PendingFolder], rng: RngState, texts: Mapping[str, str]) -> None:
        self.path, self.folders = path, folders
        self.error = ""
        self._rng, self._texts = rng, texts
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.write, name="megarl-checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def write(self) -> None:
        """Writes this rank's files; an error is kept for `finish`."""
        for folder in self.folders:
            folder.write()
        try:
            rank = dist.get_rank()
            torch.save(self._rng, rank_file(self.path, rank))
            for name, text in self._texts.items() if rank == 0 else ():
                (self.path / name).write_text(text)
        except Exception as error:  # noqa: BLE001 (told to all ranks by `finish`, which raises)
            self.error = f"{type(error).__name__}: {error}"


def rank_file(path: Path, rank: int) -> Path:
    return path / "ranks" / f"rank_{rank:05d}.pt"


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a complete checkpoint."""
    return json.loads((path / STATE).read_text())


def read_rng(path: Path, rank: int) -> RngState | None:
    """The random states of a rank; None when the checkpoint is of fewer ranks."""
    file = rank_file(path, rank)
    return torch.load(file, weights_only=True) if file.is_file() else None


def load_roles(path: Path, roles: Mapping[str, Role | None]) -> None:
    """Fills every role that learns from a complete checkpoint, whatever grid wrote it; a collective of the world."""
    facts = read_state(path)["roles"]
    for name, role in roles.items():
        load_role(role, path / name, facts[name]["adam_step"])


def describe_roles(roles: Mapping[str, Role | None]) -> dict[str, dict[str, Any]]:
    """For each role the steps of its Adam, its grid, dtype and learning rate, known on every rank."""
    facts: dict[str, dict[str, Any]] = {}
    for name, role in roles.items():
        own: list[dict[str, Any] | None] = [None]
        if role is not None:
            assert role.training is not None
            grid, schedule = role.groups.topology, role.training.schedule
            own[0] = {
                "adam_step": count_adam_steps(role),
                "dtype": DTYPES[role.dtype],
                "grid": {"tp": grid.tp_size, "pp": grid.pp_size, "dp": grid.dp_size, "ranks": list(grid.ranks)},
                "schedule": vars(schedule),
            }
        everywhere: list[dict[str, Any] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, own[0])
        facts[name] = next(each for each in everywhere if each is not None)
    return facts


def _make_folder(root: Path, step: int, roles: list[str]) -> Path:
    folder = files.begin(root, step)
    for name in (*roles, "ranks"):
        (folder / name).mkdir()
    return folder


def _sum(num_bytes: int) -> int:
    total = torch.tensor(num_bytes)
    dist.all_reduce(total)
    return int(total)


def _on_rank_0(act: Callable[[], str], num_bytes: int = 0) -> str:
    """Runs `act` on rank 0 and tells its result to all; its error is `CheckpointFailed` on all.

    Args:
        num_bytes: refused before `act` when the disk has less room than this.
    """
    box: list[str] = ["", ""]
    if dist.get_rank() == 0:
        try:
            box[0] = act()
            free = shutil.disk_usage(box[0]).free
            if num_bytes > free:
                files.abandon(Path(box[0]))
                box[1] = f"{num_bytes / 2**30:.2f} GiB are to be written to {box[0]}, which has {free / 2**30:.2f} free"
        except (OSError, ValueError) as error:
            box[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if box[1]:
        raise CheckpointFailed(box[1])
    return box[0]


def _raise_everywhere(error: str) -> None:
    """Raises `CheckpointFailed` on every rank when any rank has an error."""
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(errors) if each]
    if failed:
        raise CheckpointFailed("; ".join(failed))
