"""How a rank ends when something goes wrong: at once, with one clear message, and so that every other rank ends too.

    a rank raises ─> `run_rank` tells [rank 1 | host | phase] Error: message, writes its error file, leaves by os._exit
        local start    the launcher reads the error files, prints the first cause, ends the rest   (launch/local.py)
        torchrun       sees the exit code and ends the rest
        srun           peers in a gloo collective see the connection close; the batch script asks to kill on a bad exit

A peer that only noticed ("connection closed by peer") says so in one line, after the rank that was the cause.
Leaving by `os._exit` matters: threads of the engine or of gloo may wait for ever for a peer that is gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from megarl.config.load import ConfigError

USER_MISTAKE_EXIT = 2
INTERRUPTED_EXIT = 130
LAUNCHER_PID = "MEGARL_LAUNCHER_PID"  # set by the local launcher: it prints, the ranks only record
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by it and by torchrun
PEERS_WAIT_S = 2.0  # the cause speaks first

_PEER_LOSS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "gloo/transport",
    "remote process exited",
    "Failed to recv, got 0 bytes",
    "recvValue failed",
)


@dataclass(frozen=True)
class Failure:
    """Why one rank ended. `is_peer_loss`: it only noticed that another rank was gone; `peers`: who does not answer."""

    rank: int
    host: str
    phase: str
    error: str
    trace: str
    exit_code: int
    time: float
    is_peer_loss: bool
    is_user_mistake: bool
    peers: str = ""

    def headline(self) -> str:
        where = " | ".join(part for part in (f"rank {self.rank}", self.host, self.phase) if part)
        return f"[{where}] {self.error}"


def run_rank(main: Callable[[], None], describe_peers: Callable[[], str] = lambda: "") -> None:
    """Runs `main` as this process's rank and returns when it returns.

    When `main` raises, the process leaves at once: exit code 2 for a user's mistake (`ConfigError`), the code of a
    `SystemExit`, 130 for Ctrl-C, else 1. The note `phase: NAME` on an exception (`PhaseTimer`) is told.

    Args:
        describe_peers: says which other ranks do not answer; asked when a collective broke or was late.
    """
    _die_with_the_launcher()
    try:
        main()
    except KeyboardInterrupt:
        _leave(INTERRUPTED_EXIT)
    except BaseException as error:  # noqa: BLE001 (whatever ends a rank is told, then the process is over)
        if isinstance(error, SystemExit) and error.code in (0, None):
            return
        failure = describe_failure(error, rank=int(os.environ.get("RANK", "0")))
        if failure.is_peer_loss or _is_timeout(error):
            failure = replace(failure, peers=describe_peers())
        _record(failure)
        if LAUNCHER_PID not in os.environ:
            _tell(failure)
        _leave(failure.exit_code)


def describe_failure(error: BaseException, rank: int) -> Failure:
    """What is known of an exception that ends a rank."""
    notes = [note.removeprefix("phase: ") for note in getattr(error, "__notes__", ()) if note.startswith("phase: ")]
    is_user_mistake = isinstance(error, ConfigError)
    text = str(error) if is_user_mistake else f"{type(error).__name__}: {error}"
    exit_code = USER_MISTAKE_EXIT if is_user_mistake else 1
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            exit_code = error.code & 0xFF or 1
        else:
            text = str(error.code)
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        phase=notes[0] if notes else "",
        error=text,
        trace="".join(traceback.format_exception(type(error), error, _below_run_rank(error))).rstrip(),
        exit_code=exit_code,
        time=time.time(),
        is_peer_loss=_is_peer_loss(error),
        is_user_mistake=is_user_mistake,
    )


def format_failure(failure: Failure) -> str:
    """The block for people: headline and traceback; of a user's mistake only its message."""
    if failure.is_user_mistake:
        return failure.error
    return "\n".join(part for part in (failure.headline(), failure.peers, failure.trace) if part)


def format_peer_loss(failure: Failure) -> str:
    """One line of a rank that only noticed that another was gone."""
    reason = failure.error.splitlines()[0].split(". This is typically")[0]
    told = f"[rank {failure.rank} | {failure.host}] ended because another rank was gone ({reason})"
    return f"{told}\n{failure.peers}" if failure.peers else told


def read_failure(path: Path) -> Failure | None:
    """What a rank recorded in its error file; None when it left none."""
    try:
        return Failure(**json.loads(path.read_text())["megarl"])
    except FileNotFoundError:
        return None


def _below_run_rank(error: BaseException) -> TracebackType | None:
    """The traceback without the line of `run_rank` that called `main`."""
    trace = error.__traceback__
    return trace.tb_next if trace is not None and trace.tb_next is not None else trace


def _is_peer_loss(error: BaseException) -> bool:
    """A collective that runs out of time is not one: its peer may be there, and nobody else may have a cause."""
    text = str(error)
    return (
        isinstance(error, RuntimeError | OSError)
        and "Timed out" not in text
        and any(mark in text for mark in _PEER_LOSS)
    )


def _is_timeout(error: BaseException) -> bool:
    """A collective, or a wait for the store, that ran out of time."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and ("timed out" in text or "timeout" in text)


def _record(failure: Failure) -> None:
    """Writes the error file in torch's form (so that torchrun's summary shows it), ours inside."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    message = {
        "message": failure.headline(),
        "extraInfo": {"py_callstack": failure.trace, "timestamp": str(int(failure.time))},
    }
    beside = Path(f"{path}.writing")
    beside.write_text(json.dumps({"message": message, "megarl": asdict(failure)}))
    beside.replace(path)


def _tell(failure: Failure) -> None:
    """Prints the block; ranks that have nothing of their own to tell let the first cause speak first."""
    if failure.is_peer_loss or (failure.is_user_mistake and failure.rank != 0):
        time.sleep(PEERS_WAIT_S)
    text = format_peer_loss(failure) if failure.is_peer_loss else format_failure(failure)
    if failure.is_user_mistake and failure.rank != 0:
        text = f"[rank {failure.rank} | {failure.host}] {text}"
    sys.stderr.write(text + "\n")


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_the_launcher() -> None:
    """Asks the kernel to kill this rank when the local launcher dies, however it dies (Linux)."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(launcher):
        os._exit(1)  # it died before the line above
