"""Joins this process to the ranks of a job: environment, log, device, process group, and the doors of its peers."""

from __future__ import annotations

import datetime
import os

from megarl.launch.local import World
from megarl.launch.peers import PeerWatch
from megarl.obs.log import setup_logging


def join_world(world: World, timeout_s: float, peers: PeerWatch) -> None:
    """Makes this process rank `world.rank` of the job; returns when all ranks are there.

    Args:
        timeout_s: a collective that takes longer ends the job.
        peers: learns where the other ranks listen.
    """
    os.environ |= world.environment()
    setup_logging(world.rank)
    import torch.distributed as dist

    from megarl import device

    device.bind_local_device(world.local_rank)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(device.backend(), rank=world.rank, world_size=world.world_size, timeout=timeout)
    peers.meet(world.rank, world.world_size, world.master_addr)
