"""One rank of a run that is to be killed: megarl's own program, which tells beside where it is.

Each rank writes the phase it enters, and what it does inside a save, into `$CHAOS_FOLDER/phase-<rank>`. With
`CHAOS_SLEEP=1:update_actor` rank 1 falls asleep when it comes there; with `CHAOS_KILL=1;update_actor;2;0.03` SIGKILL
takes it 0.03 s after it came there the second time, and `$CHAOS_FOLDER/killed` says when and where.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.obs.metrics import PhaseTimer
from megarl.trainer import checkpoint, checkpoint_files

_visits: Counter[str] = Counter()
_where = ""


def tell(where: str) -> None:
    """Notes where this rank is, and its pid; replaced in one move, so that it is always whole."""
    global _where
    _where, rank = where, os.environ["RANK"]
    file = Path(os.environ["CHAOS_FOLDER"]) / f"phase-{rank}"
    beside = file.with_suffix(f".{threading.get_ident()}")  # a save on a thread tells too
    beside.write_text(f"{os.getpid()} {where}")
    beside.replace(file)
    if os.environ.get("CHAOS_SLEEP") == f"{rank}:{where}":
        time.sleep(10_000)
    victim, phase, visit, delay = os.environ.get("CHAOS_KILL", ";;0;0").split(";")
    if victim == rank and (where == phase or where.startswith(phase + ":")):
        _visits[phase] += 1
        if _visits[phase] == int(visit):
            threading.Thread(target=die, args=(float(delay),), daemon=True).start()


def die(delay: float) -> None:
    """Kills this process after `delay` seconds, wherever it is by then."""
    time.sleep(delay)
    (Path(os.environ["CHAOS_FOLDER"]) / "killed").write_text(f"{time.monotonic()} {_where}")
    os.kill(os.getpid(), signal.SIGKILL)


def told(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tell(where)
        return function(*args, **kwargs)

    return call


def listen() -> None:
    """Wraps the phases of the main loop and the stages of a save."""
    true_phase = PhaseTimer.phase

    @contextmanager
    def phase(self: PhaseTimer, name: str) -> Iterator[None]:
        tell(name)
        with true_phase(self, name):
            yield
        tell("between phases")

    PhaseTimer.phase = phase  # type: ignore[method-assign,assignment]
    for owner, name, where in (
        (checkpoint_files, "begin", "save: making the folder"),
        (checkpoint._Pending, "write", "save: writing"),
        (checkpoint, "finish_folder", "save: writing the metadata"),
        (checkpoint_files, "complete", "save: completing"),
        (checkpoint_files, "point_to", "save: moving the pointer"),
        (checkpoint_files, "prune", "save: clearing old ones"),
    ):
        setattr(owner, name, told(where, getattr(owner, name)))


if __name__ == "__main__":
    listen()
    from megarl.cli import run_train

    sys.exit(run_train(sys.argv[1:]))
