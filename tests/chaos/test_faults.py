"""Whole runs with one fault each: a rank that sleeps, a disk that fills up, a kill while it starts."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from megarl.trainer.checkpoint_files import find_newest
from tests.chaos.start import is_alive, list_processes, read_phase, start_told, wait
from tests.tiny_task import read_metrics, write_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WORDS = [
    "trainer.n_gpus_per_node=2", "rollout.name=naive", "rollout.n=2", "trainer.total_training_steps=3",
    "trainer.val_before_train=false", "data.val_files=[]",
]  # fmt: skip


def test_a_rank_that_sleeps_past_the_time_out_ends_the_job(tmp_path: Path) -> None:  # case I2
    words = write_job(tmp_path)
    process = start_told(tmp_path, [*words, *WORDS, "trainer.timeout_s=20"], 2, CHAOS_SLEEP="1:update_actor")
    deadline = time.monotonic() + 200
    while read_phase(tmp_path, 1)[1] != "update_actor":
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
        time.sleep(0.1)
    pids, slept = list_processes(tmp_path), time.monotonic()
    assert wait(process, 120) not in (0, 2, 75)
    told = (tmp_path / "log").read_text()
    assert "[rank 0 |" in told and "| update_actor]" in told and "imed out" in told, told[-3000:]
    assert time.monotonic() - slept < 60
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_disk_that_is_full_costs_checkpoints_but_not_the_run(tmp_path: Path) -> None:
    words, run = write_job(tmp_path), tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=11m", "tmpfs", str(run / "checkpoints")], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr}")
    try:
        code = wait(start_told(tmp_path, [*words, *WORDS, "trainer.save_freq=1"], 2), 200)
        told = (tmp_path / "log").read_text()
        assert "not saved (1 in a row" in told and "GiB are to be written" in told, told[-3000:]
        assert len(read_metrics(tmp_path)) == 3, "the run goes on without that checkpoint"
        assert code not in (0, 75), "the run was to end with a save, which failed"
        assert find_newest(run / "checkpoints").path == run / "checkpoints" / "step_000001", "there was room for one"
    finally:
        subprocess.run(["umount", str(run / "checkpoints")], check=True)


def test_a_run_that_is_killed_while_it_starts_leaves_nothing_that_hinders_the_next(tmp_path: Path) -> None:
    words = [*write_job(tmp_path), *WORDS, "rollout.name=vllm", "parallel.rollout.tp=2"]
    before = set(os.listdir("/dev/shm"))
    process = start_told(tmp_path, words, 2)
    deadline = time.monotonic() + 120
    while not (new := set(os.listdir("/dev/shm")) - before):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
        time.sleep(0.005)
    pids = list_processes(tmp_path)
    process.kill()  # the launcher; its ranks die with it
    process.wait()
    for pid in pids:
        while is_alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    stale = [Path("/dev/shm") / name for name in set(os.listdir("/dev/shm")) & new]
    for file in stale:
        os.utime(file, (0, 0))  # as if it had lain there for long
    assert wait(start_told(tmp_path, [*words, "trainer.total_training_steps=1"], 2), 200) == 0
    ours = [file for file in stale if "megarl" in file.name]
    assert not [file for file in ours if file.exists()], "what a killed start left is cleared by a later one"
