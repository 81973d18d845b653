"""The batch script on a real Slurm of one machine: warned, the run saves, is queued again, and finishes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli import main
from tests.cluster.possible import need, only_when_asked
from tests.cluster.slurm_machine import install_packages, one_machine_cluster, run
from tests.tiny_task import ROOT, read_metrics, write_job

pytestmark = [only_when_asked, pytest.mark.timeout(1500)]

NUM_STEPS = 40
STEP_S = 8.0  # of sleep in the rewards while the file `slow` is there: no machine finishes before the warning
LIMIT_S = 1200


def write_slow_job(folder: Path) -> list[str]:
    words = write_job(folder)
    reward = folder / "reward.py"
    slow = f"    if os.path.exists({str(folder / 'slow')!r}):\n        time.sleep({STEP_S} / 16)\n"  # 16 answers a step
    reward.write_text("import os, time\n" + reward.read_text().replace("    words = ", f"{slow}    words = "))
    (folder / "slow").touch()
    return [
        *words, "rollout.name=naive", "rollout.n=2", "parallel.actor.pp=2", "trainer.val_before_train=false",
        "data.val_files=[]", f"trainer.total_training_steps={NUM_STEPS}", "trainer.total_epochs=20",
        "actor.optim.lr=1e-3", "trainer.experiment_name=tiny", "trainer.timeout_s=120",
    ]  # fmt: skip


def test_warned_saved_requeued_finished(tmp_path, capsys, monkeypatch) -> None:
    need(install_packages())
    words = write_slow_job(tmp_path)
    (tmp_path / "config.yaml").write_text("{}\n")
    (tmp_path / "slurm").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    with one_machine_cluster(tmp_path / "slurm", cpus=4) as environ:
        monkeypatch.setenv("SLURM_CONF", environ["SLURM_CONF"])
        code = main([
            "launch", "slurm", "--config", "config.yaml", "--nodes", "1", "--gpus-per-node", "0",
            "--ranks-per-node", "2", "--cpus-per-rank", "1", "--time", "00:03:00", "--warn-s", "60",
            "--setup", f"export PATH={Path(sys.executable).parent}:$PATH", *words,
        ])  # fmt: skip
        assert code == 0
        job_id = capsys.readouterr().out.split("Submitted batch job ")[1].split()[0].rstrip(":")
        log_file = tmp_path / f"tiny-{job_id}.log"
        state = wait_for_end(job_id, environ, lambda: log_file.exists() and "asking Slurm" in log_file.read_text())
        (tmp_path / "slow").unlink()
        state = state or wait_for_end(job_id, environ)
        log = log_file.read_text()
        logs = {path.name: path.read_text(errors="replace")[-3000:] for path in (tmp_path / "run" / "logs").iterdir()}
        assert state == "COMPLETED", f"{state}\n{log}\n{logs}"
    assert "asking Slurm to start this job again (start 0 is over)" in log
    starts = {name.split(".")[1] for name in logs}
    assert len(starts) >= 2
    assert set(logs) == {f"{job_id}.{start}.rank-{rank}.log" for start in starts for rank in (0, 1)}
    assert "SIGUSR1: saved after step" in logs[f"{job_id}.0.rank-0.log"]
    assert [row["step"] for row in read_metrics(tmp_path) if row["step"] > 0] == list(range(1, NUM_STEPS + 1))


def wait_for_end(job_id: str, environ: dict[str, str], may_stop: Callable[[], bool] = lambda: False) -> str:
    """The final state of a job; empty when `may_stop` said so before."""
    deadline, state = time.monotonic() + LIMIT_S, "UNKNOWN"
    while time.monotonic() < deadline:
        if may_stop():
            return ""
        shown = run(["scontrol", "show", "job", job_id], environ)
        state = shown.split("JobState=")[1].split()[0] if "JobState=" in shown else "UNKNOWN"
        if state in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
            return state
        time.sleep(1)
    return f"still {state} after {LIMIT_S} s"
