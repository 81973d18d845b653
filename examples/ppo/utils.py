"""What surrounds the loop: this process's place among the ranks, and one line a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch.distributed as dist

from megarl.launch.failure import run_rank
from megarl.launch.join import join_world
from megarl.launch.local import World, find_free_port, find_world
from megarl.launch.peers import PeerWatch
from megarl.obs.log import quiet_environment

SHOWN = {
    "reward": "critic/score/mean",
    "cost": "cost/mean",
    "multiplier": "lagrange/multiplier",
    "policy loss": "actor/pg_loss",
    "value loss": "critic/vf_loss",
    "KL to old": "actor/ppo_kl",
}


def as_rank(main: Callable[[], None], timeout_s: float = 600) -> None:
    """Joins the other ranks (or none) and runs `main`; an error on one rank ends all of them."""
    quiet_environment()
    world = find_world(os.environ) or World(0, 1, 0, 1, "127.0.0.1", find_free_port())
    peers = PeerWatch()

    def run() -> None:
        join_world(world, timeout_s, peers)
        main()
        dist.barrier()

    run_rank(run, peers.describe)


def print_step(step: int, metrics: Mapping[str, float], seconds: float) -> None:
    """The numbers of a step that tell how it goes, on rank 0."""
    if dist.get_rank() == 0:
        told = [f"{name}: {metrics[key]:.3f}" for name, key in SHOWN.items() if key in metrics]
        print(f"step {step} | " + " | ".join(told) + f" | {seconds:.1f} s", flush=True)
