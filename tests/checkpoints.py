"""Reads checkpoints back, for tests: whole tensors in one process, without ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of one role's folder."""
    reader = FileSystemReader(folder)
    tensors: dict[str, Any] = {
        key: torch.zeros(each.size, dtype=each.properties.dtype)
        for key, each in reader.read_metadata().state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    return tensors


def list_differences(one: Path, other: Path) -> list[str]:
    """Roles and tensors in which two checkpoints are not the same, bit for bit, and small state that differs."""
    states = [json.loads((path / "state.json").read_text()) for path in (one, other)]
    wrong = [f"state.json: {key}" for key in ("run", "stream", "data", "step") if states[0][key] != states[1][key]]
    for role in sorted(set(states[0]["roles"]) | set(states[1]["roles"])):
        first, second = read_tensors(one / role), read_tensors(other / role)
        wrong += [f"{role}: only one has {key}" for key in first.keys() ^ second.keys()]
        wrong += [f"{role}: {key}" for key in first.keys() & second.keys() if not torch.equal(first[key], second[key])]
    return wrong
