"""Starts a run whose ranks tell where they are, and finds its processes again."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.tiny_task import ROOT


def start_told(folder: Path, words: list[str], num_ranks: int, **environ: str) -> subprocess.Popen[bytes]:
    """Starts `megarl train` with these words, every rank through `tests.chaos.rank`; output goes to `folder`/log."""
    code = (
        "from megarl.launch.local import launch_local\n"
        f"raise SystemExit(launch_local({num_ranks}, {words!r}, 'tests.chaos.rank'))"
    )
    environment = os.environ | environ | {
        "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "CHAOS_FOLDER": str(folder),
    }  # fmt: skip
    for told in folder.glob("phase-*"):
        told.unlink()
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=log, stderr=log, preexec_fn=die_with_parent
        )


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it dies (Linux)."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def read_phase(folder: Path, rank: int) -> tuple[int, str]:
    """(pid, phase) as the rank told last; (0, "") before it told anything."""
    file = folder / f"phase-{rank}"
    if not file.exists():
        return 0, ""
    pid, _, where = file.read_text().partition(" ")
    return int(pid), where


def list_processes(folder: Path) -> list[int]:
    """Every process of the run: its folder is in the environment of all of them."""
    mark = f"CHAOS_FOLDER={folder}\0".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it ended while we looked, or is another user's
                continue
    return found


def is_alive(pid: int) -> bool:
    """False for a process that is gone, or dead and only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """The exit code; a process that is late is killed."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
