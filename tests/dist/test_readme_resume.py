"""The commands of README's section "Resume", one after the other, on the tiny job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tiny_task import ROOT, run_megarl, write_job

TINY = [
    "rollout.name=naive", "rollout.n=2", "trainer.total_training_steps=2", "trainer.val_before_train=false",
    "data.val_files=[]", "data.max_response_length=4",
]  # fmt: skip


def read_commands() -> list[list[str]]:
    """The words after `megarl train --config FILE` of each command, comments taken off."""
    section = re.search(r"\n## Resume\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert section is not None
    lines = [line.split("#")[0].split() for line in section[1].splitlines()]
    assert all(line[:4] == ["megarl", "train", "--config", "FILE"] for line in lines)
    return [line[4:] for line in lines]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_commands_do_what_their_comments_say(tmp_path: Path) -> None:
    first, again, from_path, anew = read_commands()
    run = tmp_path / "run"
    (tmp_path / "FILE").write_text("{}\n")
    words = ["--config", str(tmp_path / "FILE"), *write_job(tmp_path), *TINY]

    def go(command: list[str]) -> str:
        named = [word.replace("RUN/", f"{run}/").replace("step_000050", "step_000002") for word in command]
        done = run_megarl([*words, *named])
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    saved = run / "checkpoints" / "step_000002"
    assert f"saved {saved}" in go(first) and saved.is_dir()
    assert f"resumed from {saved}" in go(again)
    assert f"resumed from {saved}" in go(from_path)
    assert "resumed from" not in go(anew)
    assert (run / "checkpoints.1" / "step_000002").is_dir()
