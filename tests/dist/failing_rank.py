"""What the tests of the launcher start as a rank: meets its peers, then fails in the way it is told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from megarl.config.load import ConfigError
from megarl.launch.failure import run_rank
from megarl.obs.metrics import PhaseTimer


def main() -> None:
    import torch
    import torch.distributed as dist

    how, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    number = torch.ones(1)
    dist.all_reduce(number)
    child = subprocess.Popen(["sleep", "1000"]) if how == "child" else None
    pids = f"{os.getpid()} {child.pid if child else ''}"
    (folder / f"{rank}.writing").write_text(pids)
    (folder / f"{rank}.writing").rename(folder / f"{rank}.pids")
    if how == "fine":
        dist.barrier()  # the interpreter's end must not meet a peer that still needs this one
        dist.destroy_process_group()
        return
    threading.Thread(target=time.sleep, args=(1000,)).start()  # a thread that does not end must not hold us up
    with PhaseTimer().phase("update"):
        if rank == 1 or how == "mistake":
            fail(how)
        dist.all_reduce(number)  # rank 1 never comes


def fail(how: str) -> None:
    if how in ("raise", "child"):
        raise RuntimeError("the sky fell")
    if how == "leave":  # as a rank would whose data end before the others'
        os._exit(0)
    if how == "exit":
        raise SystemExit(3)
    if how == "killed":
        os.kill(os.getpid(), 9)
    if how == "mistake":
        raise ConfigError(["critic.pp=4 is wrong"])
    time.sleep(1000)


if __name__ == "__main__":
    run_rank(main)
