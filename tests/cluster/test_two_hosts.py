"""torchrun over two hosts trains; when the cable between them is pulled, both sides end in time and name each other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.possible import need, only_when_asked
from tests.cluster.two_hosts import Host, two_hosts, why_impossible
from tests.tiny_task import ROOT, read_metrics, write_job

pytestmark = [only_when_asked, pytest.mark.timeout(600)]

TIMEOUT_S = 20
MARGIN_S = 40  # after the time-out: asking the peers, writing down the cause, torchrun's own end


class Side:
    """torchrun on one host; its output is read as it comes."""

    def __init__(self, host: Host, node_rank: int, words: list[str], rendezvous: list[str]) -> None:
        self.lines: list[str] = []
        self.process = host.start(
            ["torch.distributed.run", "--nnodes", "2", "--node-rank", str(node_rank), "--nproc-per-node", "1",
             *rendezvous, "-m", "megarl.train", *words],
            PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1",
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait(self, timeout_s: float) -> int:
        code = self.process.wait(timeout=timeout_s)
        self._reader.join(timeout=10)
        return code

    def stop(self) -> None:
        """Ends torchrun and its workers, which are in its session."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


STATIC = ["--master-addr", "10.77.0.1", "--master-port", "29500"]
ELASTIC = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29501", "--rdzv-id", "7", "--max-restarts", "0"]


@contextlib.contextmanager
def torchrun_on_both(folder: Path, rendezvous: list[str], *more: str):
    words = [
        *write_job(folder), "rollout.name=naive", "rollout.n=2", "parallel.actor.pp=2", "parallel.critic.tp=2",
        "trainer.val_before_train=false", f"trainer.timeout_s={TIMEOUT_S}", *more,
    ]  # fmt: skip
    with two_hosts() as hosts:
        sides = [Side(host, rank, words, rendezvous) for rank, host in enumerate(hosts)]
        try:
            yield hosts, sides
        finally:
            for side in sides:
                side.stop()


@pytest.fixture(autouse=True)
def possible() -> None:
    need(why_impossible())


@pytest.mark.parametrize("rendezvous", [STATIC, ELASTIC], ids=["static", "elastic"])
def test_two_hosts_train_together(tmp_path, rendezvous: list[str]) -> None:
    with torchrun_on_both(tmp_path, rendezvous, "trainer.total_training_steps=3") as (_, sides):
        codes = [side.wait(240) for side in sides]
        assert codes == [0, 0], "\n".join(side.text for side in sides)
    assert [row["step"] for row in read_metrics(tmp_path)][-1] == 3


def test_a_cut_cable_ends_both_sides_in_time_with_the_peers_name(tmp_path) -> None:
    with torchrun_on_both(tmp_path, STATIC, "trainer.total_training_steps=500", "trainer.total_epochs=100") as (
        hosts,
        sides,
    ):
        deadline = time.monotonic() + 240
        while "Step 2 |" not in sides[0].text:
            assert time.monotonic() < deadline and sides[0].process.poll() is None, sides[0].text
            time.sleep(0.2)
        hosts[0].cut()
        cut_at = time.monotonic()
        codes = [side.wait(TIMEOUT_S + MARGIN_S) for side in sides]
        took = time.monotonic() - cut_at
    assert all(code != 0 for code in codes), codes
    assert "rank 1 (hostb, 10.77.0.2): no answer" in sides[0].text, sides[0].text
    assert "rank 0 (hosta, 10.77.0.1): no answer" in sides[1].text, sides[1].text
    assert took < TIMEOUT_S + MARGIN_S
