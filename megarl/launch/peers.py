"""Who the other ranks are and which of them still answer: what a rank adds to its message when it lost somebody.

Each rank listens on a port of its own for as long as it lives. `meet` (a collective, once) tells everybody where.
When a collective breaks or runs out of time, `describe` knocks at every door at once:

    no answer          the machine, or the network between, is gone
    refused            the process has ended
    answers            it is there: busy, or waiting for somebody else
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

PROBE_S = 3.0
SHOWN = 8


@dataclass(frozen=True)
class Peer:
    """Where a rank listens."""

    rank: int
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.address})"


class PeerWatch:
    """This rank's door, and the doors of all others once they have met."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self._door = socket.create_server(("", 0))
        threading.Thread(target=self._answer, name="megarl-door", daemon=True).start()

    def meet(self, rank: int, world_size: int, master_addr: str) -> None:
        """Tells all ranks where this one listens. A collective of the world."""
        own = Peer(rank, socket.gethostname(), own_address(master_addr), self._door.getsockname()[1])
        everybody: list[Peer | None] = [None] * world_size
        dist.all_gather_object(everybody, own)
        self._peers = [peer for peer in everybody if peer is not None and peer.rank != rank]

    def describe(self) -> str:
        """One line for each peer that does not answer, or one that all do; empty before they have met."""
        if not self._peers:
            return ""
        with ThreadPoolExecutor(min(64, len(self._peers))) as pool:
            told = dict(zip(self._peers, pool.map(probe, self._peers), strict=True))
        lost = [f"{peer}: {state}" for peer, state in told.items() if state != ANSWERS]
        if not lost:
            return f"all {len(told)} other ranks answer: one of them is busy or waits for something else"
        more = [f"... and {len(lost) - SHOWN} more"] if len(lost) > SHOWN else []
        return "\n".join([*lost[:SHOWN], *more])

    def _answer(self) -> None:
        """Takes every call and hangs up: who calls knows then that this process lives."""
        with suppress(OSError):  # the door is closed with the process
            while True:
                self._door.accept()[0].close()


ANSWERS = "answers"


def probe(peer: Peer) -> str:
    """What becomes of a call to this peer."""
    try:
        socket.create_connection((peer.address, peer.port), timeout=PROBE_S).close()
    except ConnectionRefusedError:
        return "its process has ended"
    except OSError as error:
        return f"no answer: its machine, or the network between, is gone ({error})"
    return ANSWERS


def own_address(towards: str) -> str:
    """The address of this machine on the way to `towards`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as scout:
        try:
            scout.connect((towards, 9))
        except OSError:
            return socket.gethostname()
        return scout.getsockname()[0]
