"""The answers of a step, kept as `rollouts/step_000003.jsonl`: one answer a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_rollouts(run_dir: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes the answers of one step; written beside and renamed, so a file that is there is whole.

    Args:
        run_dir: the file goes to its folder `rollouts`.
        step: names the file.
        rows: prompt, response, reward, advantages and what else is known; tensors are written as lists.

    Returns:
        The file.
    """
    path = run_dir / "rollouts" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        with beside.open("w") as file:
            for row in rows:
                file.write(json.dumps(dict(row), ensure_ascii=False, default=_as_plain) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _as_plain(value: Any) -> Any:
    """Tensors and arrays as lists or numbers; everything else that JSON does not know as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
