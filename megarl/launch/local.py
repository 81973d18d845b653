"""Ranks on this machine, started by one command; and whether somebody else has started us already.

    megarl train ─> find_world(environ) ─┬─ a World: torchrun or srun started this process, join it
                                         └─ None:    launch_local(n, argv), which starts n ranks and waits

`launch_local` uses torch's own process launcher (torch.distributed.elastic.multiprocessing): no restarts, loopback
only. The first rank that fails ends all; its cause is printed first. A first SIGTERM or SIGUSR1 is passed on to the
ranks, which save and leave with REQUEUE_EXIT; so does this launcher then.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.launch.failure import LAUNCHER_PID, Failure, format_failure, format_peer_loss, read_failure
from megarl.launch.stop import REQUEUE_EXIT, STOP_SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

TRAINER = "megarl.train"
POLL_S = 0.1
SETTLE_S = 1.0  # after the first failure, for ranks that fail of it to say so
END_S = 5  # until ranks that were killed are gone
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


@dataclass(frozen=True)
class RankExit:
    """How one rank ended by itself: its exit code (negative = killed by that signal), when, and what it recorded."""

    rank: int
    code: int
    time: float
    failure: Failure | None


@dataclass(frozen=True)
class World:
    """This process's place among those that torchrun or srun started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def environment(self) -> dict[str, str]:
        """The variables that torch.distributed reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def is_under_launcher(environ: Mapping[str, str]) -> bool:
    """Whether torchrun (or we) or srun started this process. A batch script of Slurm itself is not under srun."""
    return ("RANK" in environ and "WORLD_SIZE" in environ) or (
        "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ
    )


def find_world(environ: Mapping[str, str]) -> World | None:
    """The world this process was started in, or None when it was started alone.

    Raises:
        ValueError: a launcher's variables that are incomplete or no numbers.
    """
    if not is_under_launcher(environ):
        return None
    if "RANK" in environ and "WORLD_SIZE" in environ:
        world_size = _read_int(environ, "WORLD_SIZE")
        return World(
            rank=_read_int(environ, "RANK"),
            world_size=world_size,
            local_rank=_read_int(environ, "LOCAL_RANK"),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", world_size)),
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_read_int(environ, "MASTER_PORT"),
        )
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or socket.gethostname()
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    job = int(environ.get("SLURM_JOB_ID", "0")) + int(environ.get("SLURM_STEP_ID", "0"))
    return World(
        rank=_read_int(environ, "SLURM_PROCID"),
        world_size=_read_int(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=_read_int(environ, "SLURM_LOCALID"),
        local_world_size=expand_tasks_per_node(per_node)[int(environ.get("SLURM_NODEID", "0"))],
        master_addr=environ.get("MASTER_ADDR") or first_host(nodes),
        master_port=int(environ.get("MASTER_PORT") or 20000 + job % 20000),
    )


def resolve_world(nnodes: int | None, n_gpus_per_node: int | None, environ: Mapping[str, str]) -> World | None:
    """`find_world`, refused where the configuration says something else.

    Args:
        nnodes, n_gpus_per_node: as the user wrote them, None where the user did not.

    Raises:
        ValueError: sizes that do not agree with the launcher's, or several nodes without a launcher.
    """
    world = find_world(environ)
    if world is None:
        if nnodes is not None and nnodes > 1:
            raise ValueError(
                f"trainer.nnodes={nnodes}: this command alone starts ranks on one machine only; start it with torchrun "
                "or srun on every node, or set trainer.nnodes=1"
            )
        return None
    if n_gpus_per_node is not None and n_gpus_per_node != world.local_world_size:
        raise ValueError(
            f"trainer.n_gpus_per_node={n_gpus_per_node} does not agree with the {world.local_world_size} processes "
            f"that the launcher started on this node; set trainer.n_gpus_per_node={world.local_world_size}, or start "
            f"{n_gpus_per_node} a node (torchrun --nproc_per_node, srun --ntasks-per-node)"
        )
    per_node = world.local_world_size
    if nnodes is not None and nnodes * per_node != world.world_size:
        raise ValueError(
            f"trainer.nnodes={nnodes} × {per_node} processes a node = {nnodes * per_node}, but the launcher started "
            f"{world.world_size}; set trainer.nnodes={max(1, world.world_size // per_node)}, or start as many nodes"
        )
    return world


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[003-006,9],other` -> `gpu003`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} names no host; set MASTER_ADDR to the first node's name")
    return re.sub(r"\[([^\]]*)\]", lambda match: re.split(r"[-,]", match[1])[0], first[0])


def expand_tasks_per_node(text: str) -> list[int]:
    """Slurm's short form of tasks per node: `4(x2),3` -> [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def launch_local(num_ranks: int, argv: Sequence[str], module: str = TRAINER) -> int:
    """Starts `num_ranks` ranks of `python -m <module> <argv>` on this machine and waits for them.

    No rank outlives this call, nor this process if it is killed.

    Args:
        num_ranks: processes, 1 or more.
        argv: the words after the module.
        module: what each rank runs; its `main` goes through `run_rank`.

    Returns:
        0 when every rank returned 0; 130 (Ctrl-C) or 143 after a signal; else the exit code of the first cause.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)  # repeats what we say
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    exits: list[RankExit] = []
    caught: signal.Signals | None = None
    passed_on: list[signal.Signals] = []
    context: SubprocessContext | None = None
    with tempfile.TemporaryDirectory(prefix="megarl-ranks-") as folder:
        try:
            started = start_processes(
                name="megarl",
                entrypoint=sys.executable,
                args={rank: ("-u", "-m", module, *argv) for rank in range(num_ranks)},
                envs=build_environments(num_ranks, os.environ),
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            assert isinstance(started, SubprocessContext), f"torch gave a {type(started).__name__}"
            context = started
            passed_on = _pass_on_stop_signals(list(context.pids().values()))
            exits = _wait_for_ranks(context)
        except SignalException as error:  # raised by the handlers that start_processes sets
            caught = error.sigval
        finally:
            _end_all(context, handlers)
    if caught is not None:
        sys.stderr.write(f"\nmegarl: {caught.name}: all {num_ranks} ranks are ended\n")
        return 128 + caught
    if passed_on and all(end.code == -passed_on[0] for end in exits):  # it came before the ranks could listen
        sys.stderr.write(
            f"megarl: {passed_on[0].name}: all {num_ranks} ranks are ended; nothing was there to save yet\n"
        )
        return 128 + passed_on[0]
    return _report(exits, num_ranks)


def _pass_on_stop_signals(pids: Sequence[int]) -> list[signal.Signals]:
    """From now on the first SIGTERM or SIGUSR1 goes to the ranks, which save and leave; the second ends all at once.

    Returns:
        A list that gets the signals as they come.
    """
    seen: list[signal.Signals] = []

    def pass_on(number: int, _frame: object) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        seen.append(signal.Signals(number))
        if len(seen) > 1:
            raise SignalException(f"a second {seen[-1].name}", signal.Signals(number))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, pass_on)
    return seen


def build_environments(num_ranks: int, environ: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """What each rank finds in its environment beyond ours; threads are shared out unless the user set them."""
    common = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        LAUNCHER_PID: str(os.getpid()),
    }
    if "OMP_NUM_THREADS" not in environ:
        common["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    return {rank: common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)}


def find_free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pick_first_cause(exits: Sequence[RankExit]) -> RankExit:
    """The rank to blame: the earliest that did not merely lose a peer; `exits` holds failed ranks only."""
    return min(exits, key=lambda end: (end.failure is not None and end.failure.is_peer_loss, end.time))


def _wait_for_ranks(context: SubprocessContext) -> list[RankExit]:
    """Waits until every rank returned, or one failed and those that fail of it had `SETTLE_S` to say so."""
    running = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
    exits: list[RankExit] = []
    deadline: float | None = None
    while running and (deadline is None or time.monotonic() < deadline):
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            failure = read_failure(Path(context.error_files[rank])) if code not in (0, REQUEUE_EXIT) else None
            exits.append(RankExit(rank, code, failure.time if failure else time.time(), failure))
            if code not in (0, REQUEUE_EXIT) and deadline is None:
                deadline = time.monotonic() + SETTLE_S
        time.sleep(POLL_S)
    return exits


def _end_all(context: SubprocessContext | None, handlers: Mapping[signal.Signals, Any]) -> None:
    """Ends every rank and whatever it started; no signal interrupts this. Then puts our signal handlers back."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    if context is not None:
        context.close(signal.SIGKILL, timeout=END_S)  # to SIGTERM they would listen, and save
        for pid in context.pids().values():  # each rank leads a process group; its own children are in it
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _report(exits: Sequence[RankExit], num_ranks: int) -> int:
    """Prints the first cause, then a line for every other rank that failed. Returns the exit code."""
    failed = [end for end in exits if end.code not in (0, REQUEUE_EXIT)]
    if not failed:
        return max((end.code for end in exits), default=0)
    first = pick_first_cause(failed)
    lines = [_describe_exit(first)]
    for end in sorted(failed, key=lambda end: end.time):
        is_same = end.failure is not None and first.failure is not None and end.failure.error == first.failure.error
        if end is not first and not is_same:
            is_loss = end.failure is not None and end.failure.is_peer_loss
            told = format_peer_loss(end.failure) if end.failure and is_loss else _describe_exit(end).splitlines()[0]
            lines.append(f"after that: {told}")
    if first.failure is not None and first.failure.is_peer_loss:  # nobody failed of his own
        left = [end for end in exits if end not in failed]
        lines += [f"rank {end.rank} left before that, with exit code {end.code}" for end in left]
    if first.failure is None or not first.failure.is_user_mistake:
        lines.append(f"megarl: rank {first.rank} failed, all {num_ranks} ranks are ended")
    sys.stderr.write("\n".join(lines) + "\n")
    return 128 - first.code if first.code < 0 else first.code


def _describe_exit(end: RankExit) -> str:
    if end.failure is not None:
        return format_failure(end.failure)
    if end.code < 0:
        hint = " (often: the machine ran out of memory)" if -end.code == signal.SIGKILL else ""
        return f"[rank {end.rank}] was killed by {signal.Signals(-end.code).name}{hint}"
    return f"[rank {end.rank}] ended with exit code {end.code} and did not say why"


def _read_int(environ: Mapping[str, str], name: str) -> int:
    """An integer that the launcher must have set."""
    text = environ.get(name, "")
    if not text.lstrip("-").isdigit():
        raise ValueError(f"{name}={text!r} should be a number that torchrun or srun sets; unset RANK to start alone")
    return int(text)
