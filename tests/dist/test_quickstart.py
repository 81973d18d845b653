"""The quickstart, shortened: the real model learns the real task, and its engines agree with its trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_task import ROOT, run_megarl

STEPS = 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_held_out_accuracy_rises_within_five_steps(tmp_path: Path) -> None:
    for needed in ("model/config.json", "data/val.parquet"):
        file = ROOT / ".cache" / "quickstart" / needed
        assert file.is_file(), f"{file} is missing: `make test` prepares it"
    done = run_megarl(
        [
            "--config",
            "examples/ppo_smollm2/config.yaml",
            f"trainer.total_training_steps={STEPS}",
            "trainer.test_freq=-1",
            f"trainer.default_local_dir={tmp_path}",
        ],
        timeout_s=850,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    before, after = rows[0], rows[-1]
    assert after["step"] == STEPS
    assert after["val/accuracy_sampled"] > before["val/accuracy_sampled"] + 0.05
    assert after["val/accuracy_greedy"] > before["val/accuracy_greedy"]
    assert all(row["rollout/logprob_gap"] < 0.1 for row in rows[1:]), "bf16 on both sides: hundredths, not tenths"
