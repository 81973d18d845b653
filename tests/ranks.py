"""Runs one function on several gloo ranks of this machine, for tests.

`run_ranks(fn, 4, *args)` starts four processes; each joins one gloo process group through a file store, calls
`fn(rank, world_size, *args)` and hands its result back through a file. The caller gets the results by rank.
When a rank fails or the time is over, every rank is killed and the first failure's traceback is raised here.

The ranks are forked from a server that has imported torch and Megatron and done nothing else: these imports take a
core eight seconds, and there are hundreds of ranks in a run of all tests.

`fn` must be importable by name from its module (a top-level function); arguments and results must pickle.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = ["megarl.train", "megarl.train_preference"]
GRACE_S = 1.0  # after the first failure, for other ranks to write down what they saw


class RankFailed(AssertionError):
    """A rank raised, died, or did not end in time; the message holds its traceback."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120, num_threads: int = 1
) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` on `world_size` gloo ranks.

    Args:
        fn: a top-level function.
        world_size: processes to start.
        args: passed on to every rank.
        timeout_s: after this every rank is killed.
        num_threads: OpenMP threads of each rank.

    Returns:
        The results, by rank.

    Raises:
        RankFailed: with the traceback of the rank that failed first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="megarl-ranks-") as folder, _one_thread():
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                environ = _environment(rank, world_size, num_threads)
                process = context.Process(
                    target=_run_rank, args=(fn, rank, world_size, folder, args, timeout_s, environ)
                )
                process.start()
                processes.append(process)
            _wait(processes, Path(folder), timeout_s)
            return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world_size)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _environment(rank: int, world_size: int, num_threads: int) -> dict[str, str]:
    """The variables of a rank: those of this process now (the server has those it was started with), and its own."""
    return dict(os.environ) | {
        "OMP_NUM_THREADS": str(num_threads),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


@contextlib.contextmanager
def _one_thread():
    """The server, if it is started now, may compute with one thread: its OpenMP reads that when it is loaded."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _wait(processes: list[BaseProcess], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes) or list(folder.glob("error-*")):
            break
        if time.monotonic() > deadline:
            late = [rank for rank, process in enumerate(processes) if process.is_alive()]
            raise RankFailed(f"ranks {late} of {len(processes)} did not end within {timeout_s} s")
        time.sleep(0.02)
    if all(process.exitcode == 0 for process in processes):
        return
    time.sleep(GRACE_S)
    errors = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        raise RankFailed(f"{errors[0].name.replace('error-', 'rank ')} failed first:\n{errors[0].read_text()}")
    dead = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
    names = {rank: signal.Signals(-code).name if code < 0 else f"exit code {code}" for rank, code in dead.items()}
    raise RankFailed(f"ranks died without a traceback: {names}")


def _run_rank(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    args: tuple[Any, ...],
    timeout_s: float,
    environ: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ |= environ
    import datetime

    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        result = fn(rank, world_size, *args)
        temporary = Path(folder) / f"writing-{rank}"
        temporary.write_bytes(pickle.dumps(result))
        temporary.rename(Path(folder) / f"result-{rank}")
        dist.barrier()  # nobody tears down the connections while another still works
        exit_code = 0
    except BaseException:  # noqa: BLE001  SystemExit of a rank is a failure too
        temporary = Path(folder) / f"failing-{rank}"
        temporary.write_text(traceback.format_exc())
        temporary.rename(Path(folder) / f"error-{rank}")
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # no destructors: gloo threads and engines may be half torn down by now
