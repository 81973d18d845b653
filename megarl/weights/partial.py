"""A folder that is written beside its place and moved there when it is complete; broken off, it can be gone on with.

    with build_folder(out, {"tp": 2, ...}) as partial:     # .<out>.partial, from a former try where that fits
        for each file not in list_done(partial): write it, note_done(partial, file, facts)
    # here: renamed to out

A user's mistake (ValueError) leaves nothing behind. Anything else (a signal, a full disk) leaves the partial folder,
and the same command takes up the files that are done. A folder that is not ours is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

JOURNAL = ".journal"  # facts of finished files, and what is being made of what


@contextlib.contextmanager
def build_folder(out: Path, fingerprint: Mapping[str, Any]) -> Iterator[Path]:
    """Yields the partial folder; on a normal end it becomes `out`.

    Args:
        fingerprint: everything that the result depends on, as JSON can say it. A former try with another one is begun
            anew.

    Raises:
        ValueError: `out` exists, or another process is writing it.
    """
    if out.exists():
        raise ValueError(f"{out} exists; remove it, or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    wanted = json.dumps(fingerprint, sort_keys=True)
    _take_up(partial, wanted)
    with (partial / JOURNAL / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process is writing {out} at this moment") from error
        try:
            yield partial
        except ValueError:
            shutil.rmtree(partial)
            raise
        shutil.rmtree(partial / JOURNAL)
        partial.rename(out)


def _take_up(partial: Path, wanted: str) -> None:
    """Makes the partial folder, or keeps one that was begun for the same result."""
    begun = partial / JOURNAL / "fingerprint"
    if partial.exists() and not begun.is_file():
        if any(path.name != JOURNAL for path in partial.iterdir()):
            raise ValueError(f"{partial} exists and is none of ours; move it away")
        shutil.rmtree(partial)
    if begun.is_file() and begun.read_text() != wanted:
        shutil.rmtree(partial)
    (partial / JOURNAL).mkdir(parents=True, exist_ok=True)
    if not begun.is_file():
        write_atomically(begun, wanted)


def list_done(partial: Path) -> dict[str, Any]:
    """Finished files by name, with the facts that were noted of each."""
    return {path.stem: json.loads(path.read_text()) for path in (partial / JOURNAL).glob("*.json")}


def note_done(partial: Path, name: str, facts: Any) -> None:
    """Notes that the file `name` is complete."""
    write_atomically(partial / JOURNAL / f"{name}.json", json.dumps(facts))


def write_atomically(path: Path, text: str) -> None:
    """Writes beside, to the disk, then renames: the file is there as a whole or not at all."""
    beside = path.with_name(f"{path.name}.writing")
    with beside.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    beside.rename(path)


def describe_files(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of a folder's files: another list, another content."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
