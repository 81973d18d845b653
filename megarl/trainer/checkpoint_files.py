"""Checkpoints as folders on disk: written beside, completed, then made current; found again; cleared away.

    checkpoints/
        step_000010/               complete: complete.json is in it and names every file with its size
        .step_000020.writing/      begun; megarl.json in it says that it is ours
        latest                     "step_000010"; replaced in one move, last of all

A crash leaves a `.writing` folder or a pointer that is one step behind; `find_newest` looks at the folders themselves.
Nothing is removed that does not carry our mark, and an old checkpoint goes only when a newer one is complete.
One process calls these functions: rank 0.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FORMAT = 1
MARK, COMPLETE, LATEST = "megarl.json", "complete.json", "latest"
_NAME = re.compile(r"step_(\d{6,})")
_HIDDEN = re.compile(r"\.step_\d{6,}\.(writing|old)")


@dataclass(frozen=True)
class Found:
    """What `find_newest` saw: the newest complete checkpoint, if any, and why newer ones were passed over."""

    path: Path | None
    step: int
    skipped: tuple[str, ...]


def folder_name(step: int) -> str:
    return f"step_{step:06d}"


def begin(root: Path, step: int) -> Path:
    """Makes the folder that is written into; what an earlier run left unfinished there is removed.

    Raises:
        ValueError: a folder that is not a checkpoint of ours stands where this one must go.
    """
    final = root / folder_name(step)
    if final.exists() and not _is_ours(final):
        raise ValueError(
            f"{final} is in the way and is no checkpoint of megarl; move it, or set trainer.default_local_dir"
        )
    root.mkdir(parents=True, exist_ok=True)
    writing = root / f".{final.name}.writing"
    if writing.exists():
        if not _is_ours(writing):
            raise ValueError(f"{writing} is in the way and is not megarl's; move it")
        _remove(writing)
    writing.mkdir()
    write_json(writing / MARK, {"format": FORMAT, "step": step})
    return writing


def complete(writing: Path) -> Path:
    """Makes a written folder a checkpoint and the current one. Everything in it has reached the disk first.

    Returns:
        Its final path.
    """
    sizes = {path.relative_to(writing).as_posix(): path.stat().st_size for path in _list_files(writing)}
    for path in _list_files(writing):
        _sync(path)
    for folder in sorted(path for path in writing.rglob("*") if path.is_dir()):
        _sync(folder)
    write_json(writing / COMPLETE, {"format": FORMAT, "files": sizes})
    _sync(writing)
    root = writing.parent
    final = root / writing.name.removeprefix(".").removesuffix(".writing")
    old = root / f".{final.name}.old"
    if final.exists():
        final.rename(old)
    writing.rename(final)
    _sync(root)
    point_to(final)
    if old.exists():
        _remove(old)
    return final


def point_to(final: Path) -> None:
    """Makes `final` the current checkpoint: the pointer is replaced in one move."""
    beside = final.parent / f".{LATEST}.writing"
    beside.write_text(final.name + "\n")
    _sync(beside)
    beside.replace(final.parent / LATEST)
    _sync(final.parent)


def abandon(writing: Path) -> None:
    """Removes a folder that `begin` made and that came to nothing."""
    if _is_ours(writing):
        _remove(writing)


def prune(root: Path, keep: int) -> list[Path]:
    """Removes all but the newest `keep` complete checkpoints, and what killed runs left; returns what was removed.

    Broken ones do not count and stay, to be looked at.
    """
    removed = [path for _, path in _list_steps(root) if _is_ours(path) and not why_incomplete(path)][keep:]
    removed += [path for path in root.iterdir() if _HIDDEN.fullmatch(path.name) and _is_ours(path)]
    for path in removed:
        gone = path if path.name.startswith(".") else path.rename(root / f".{path.name}.old")
        _remove(gone)
    return removed


def set_aside(root: Path, step: int) -> Path | None:
    """Moves our checkpoints beyond `step` into a folder beside `root`: a run that starts at `step` is about to write
    others under these names. Returns that folder, or None when there was nothing to move."""
    moved = [path for number, path in _list_steps(root) if number > step and _is_ours(path)]
    if not moved:
        return None
    number = next(n for n in itertools.count(1) if not root.with_name(f"{root.name}.{n}").exists())
    aside = root.with_name(f"{root.name}.{number}")
    aside.mkdir()
    for path in moved:
        path.rename(aside / path.name)
    left = find_newest(root).path
    if left is not None:
        point_to(left)
    else:
        (root / LATEST).unlink(missing_ok=True)
    return aside


def find_newest(root: Path) -> Found:
    """The newest complete checkpoint below `root`, and what newer there is and cannot be used."""
    skipped: list[str] = []
    if root.is_dir():
        for path in sorted(root.iterdir(), reverse=True):
            if _HIDDEN.fullmatch(path.name) and path.name.endswith(".writing") and _is_ours(path):
                skipped.append(f"{path}: it was never completed")
    for step, path in _list_steps(root):
        why = why_incomplete(path)
        if not why:
            newer = [line for line in skipped if _step_in(line) > step]
            return Found(path, step, tuple(newer))
        skipped.append(f"{path}: {why}")
    return Found(None, 0, tuple(skipped))


def why_incomplete(path: Path) -> str:
    """Why a folder is not a complete checkpoint, in words; empty when it is one."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        manifest = json.loads((path / COMPLETE).read_text())
        files = dict(manifest["files"])
    except FileNotFoundError:
        return f"it has no {COMPLETE}: it was never completed, or is not megarl's"
    except (ValueError, KeyError, TypeError) as error:
        return f"its {COMPLETE} cannot be read ({error})"
    if manifest.get("format") != FORMAT:
        return f"it is of format {manifest.get('format')}, this megarl reads format {FORMAT}"
    for name, size in files.items():
        try:
            there = (path / name).stat().st_size
        except FileNotFoundError:
            return f"the file {name} is missing"
        if there != size:
            return f"the file {name} has {there} bytes instead of {size}: it was cut short or changed"
    return ""


def step_of(path: Path) -> int:
    """The step of a checkpoint that `why_incomplete` found nothing wrong with."""
    return int(json.loads((path / MARK).read_text())["step"])


def write_json(path: Path, value: object) -> None:
    """Writes a small file and waits until it is on the disk."""
    path.write_text(json.dumps(value, indent=1) + "\n")
    _sync(path)


def _list_steps(root: Path) -> Iterator[tuple[int, Path]]:
    """(step, folder) of everything that is named like a checkpoint, newest first."""
    if not root.is_dir():
        return
    named = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    yield from sorted(named, reverse=True)


def _step_in(line: str) -> int:
    match = _NAME.search(line.partition(": ")[0].rpartition("/")[2])
    assert match is not None, f"no step in {line!r}"
    return int(match[1])


def _is_ours(path: Path) -> bool:
    """Whether a folder carries our mark; one without anything in it is what a killed `_remove` left."""
    return path.is_dir() and not path.is_symlink() and ((path / MARK).is_file() or not any(path.iterdir()))


def _remove(folder: Path) -> None:
    """Removes a folder of ours, the mark last: what a kill leaves is still known as ours."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()
    (folder / MARK).unlink(missing_ok=True)
    folder.rmdir()


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
