"""A rank that lost somebody can say whom: alive, ended, or out of reach."""

from __future__ import annotations

import contextlib
import socket

import pytest

from megarl.launch import peers
from megarl.launch.failure import Failure, format_failure, format_peer_loss
from megarl.launch.peers import Peer, PeerWatch, own_address, probe


def test_a_living_peer_answers_and_an_ended_one_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        assert probe(Peer(1, "here", "127.0.0.1", port)) == "answers"
    assert probe(Peer(1, "here", "127.0.0.1", port)) == "its process has ended"


def test_a_peer_out_of_reach_gives_no_answer(monkeypatch) -> None:
    """A door that nobody opens, with a queue before it: what comes next is dropped, as on a cable that is cut."""
    monkeypatch.setattr(peers, "PROBE_S", 0.2)
    with socket.socket() as door, contextlib.ExitStack() as queue:
        door.bind(("127.0.0.1", 0))
        door.listen(0)
        for _ in range(4):
            caller = queue.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(door.getsockname())
        assert probe(Peer(1, "far", *door.getsockname())).startswith("no answer")


def test_the_lost_are_named_and_only_they(monkeypatch) -> None:
    watch, other = PeerWatch(), PeerWatch()
    assert watch.describe() == "", "before the ranks have met nothing is known"
    with socket.create_server(("127.0.0.1", 0)) as door:
        gone = Peer(2, "b", "127.0.0.1", door.getsockname()[1])
    alive = Peer(1, "a", "127.0.0.1", other._door.getsockname()[1])
    watch._peers = [alive, gone]
    assert watch.describe() == "rank 2 (b, 127.0.0.1): its process has ended"
    watch._peers = [alive]
    assert "all 1 other ranks answer" in watch.describe()


@pytest.mark.parametrize("towards", ["127.0.0.1", "no.such.host.invalid"])
def test_ones_own_address_is_the_one_on_the_way(towards: str) -> None:
    assert own_address(towards) == ("127.0.0.1" if towards == "127.0.0.1" else socket.gethostname())


def test_the_report_names_the_lost_right_below_the_headline() -> None:
    failure = Failure(0, "a", "update", "RuntimeError: Timed out", "trace", 1, 0.0, False, False, "rank 1 (b): gone")
    assert format_failure(failure).splitlines() == [
        "[rank 0 | a | update] RuntimeError: Timed out", "rank 1 (b): gone", "trace",
    ]  # fmt: skip
    assert format_peer_loss(failure).splitlines()[1] == "rank 1 (b): gone"
