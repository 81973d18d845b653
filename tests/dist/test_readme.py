"""The commands of the README's sections run as they stand there, on small models under the names they use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_task import ROOT, write_job

pytestmark = pytest.mark.timeout(600)


def read_commands(heading: str) -> list[str]:
    """The command lines of a section's block; a trailing backslash joins lines."""
    text = (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", text, re.DOTALL)  # a second one would not be run
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def run_all(heading: str, folder: Path) -> list[str]:
    """Runs a section's commands in `folder` with a shell; what each printed."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "megarl").write_text(f'#!/bin/bash\nexec {sys.executable} -m megarl "$@"\n')
    (tools / "megarl").chmod(0o755)
    environ = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    told: list[str] = []
    for command in read_commands(heading):
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        told.append(done.stdout)
    return told


def test_convert_a_checkpoint(tmp_path) -> None:
    write_job(tmp_path, "qwen2", num_hidden_layers=4, tie_word_embeddings=True)
    (tmp_path / "models").mkdir()
    shutil.move(tmp_path / "model", tmp_path / "models" / "Qwen2.5-0.5B-Instruct")
    told = run_all("Convert a checkpoint", tmp_path)
    assert "50 of 50 tensors equal" in told[1] and re.search(r"same most likely token (\d+)/\1\n", told[1])
    assert (tmp_path / "models" / "exported" / "model.safetensors").is_file()


def test_run_it_on_a_cluster(tmp_path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    told = run_all("Run it on a cluster", tmp_path)
    assert "#SBATCH --nodes=8" in told[0] and "#SBATCH --nodes=16" in told[1]
    assert all("srun" in script for script in told)
