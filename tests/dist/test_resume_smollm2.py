"""Exact resume of the quickstart: SmolLM2-135M with critic and vLLM on two ranks, bf16 weights and fp32 masters."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoints import list_differences
from tests.tiny_task import ROOT, run_megarl

STEPS = 2
WORDS = [
    "--config", "examples/ppo_smollm2/config.yaml", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1",
    "trainer.val_before_train=false", "data.val_files=[]", "trainer.test_freq=-1", "trainer.resume_mode=auto",
    "data.train_batch_size=4", "rollout.n=4", "data.max_response_length=8",
]  # fmt: skip


def run(folder: Path) -> str:
    done = run_megarl([*WORDS, f"trainer.default_local_dir={folder}"], timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_smollm2_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert (ROOT / ".cache/quickstart/model/config.json").is_file(), "`make test` prepares the quickstart's model"
    run(tmp_path / "straight")
    first, last = (Path("checkpoints") / f"step_{step:06d}" for step in (1, STEPS))
    shutil.copytree(tmp_path / "straight" / first, tmp_path / "resumed" / first, copy_function=os.link)
    assert "resumed from" in run(tmp_path / "resumed")
    assert list_differences(tmp_path / "straight" / last, tmp_path / "resumed" / last) == []
    rows = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("straight", "resumed")
    ]
    for name in ("actor/pg_loss", "critic/vf_loss", "rollout/logprob_gap", "critic/score/mean", "actor/grad_norm"):
        assert rows[0][name] == rows[1][name], name
