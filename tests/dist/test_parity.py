"""`megarl check parity`: the splits of a model agree, and one that computes something else is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import parity
from megarl.config.load import load_config, resolve_config
from tests.ranks import run_ranks
from tests.tiny_task import ROOT, write_job

pytestmark = pytest.mark.timeout(600)


def run_command(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megarl", "check", "parity", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_split_of_two_ranks_agrees(tmp_path: Path) -> None:
    done = run_command([*write_job(tmp_path, num_hidden_layers=4), "trainer.n_gpus_per_node=2"])
    assert done.returncode == 0, done.stdout + done.stderr
    for split in ("tp1 pp1 dp2", "tp2 pp1 dp1", "1f1b", "interleaved", "zero_bubble", "fused"):
        assert split in done.stdout
    assert "all agree" in done.stdout and "OFF" not in done.stdout


def run_with_a_wrong_split(rank: int, world_size: int, words: list[str]) -> bool:
    """The pipeline of two stages forgets to hand weight gradients of its first chunk on."""
    from megarl.models.deferred import PutAside

    config = resolve_config(load_config(None, words))
    original = PutAside.take
    if rank == 0:
        PutAside.take = lambda self: original(self) if not self.is_open else (original(self), lambda: None)[1]  # type: ignore[method-assign]
    return parity.run_parity(config, parity.TOLERANCE)


def test_a_split_that_computes_something_else_is_found(tmp_path: Path) -> None:
    words = write_job(tmp_path, num_hidden_layers=4)
    assert run_ranks(run_with_a_wrong_split, 2, words) == [False, False]


def test_a_mistake_is_told_before_any_rank_starts(tmp_path: Path) -> None:
    done = run_command([*write_job(tmp_path), "trainer.n_gpus_per_node=2", "parallel.actor.tp=3"])
    assert done.returncode == 2 and "parallel.actor" in done.stderr
