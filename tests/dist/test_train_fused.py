"""`megarl train` with actor and critic on one pipeline: fused, and one after the other, step for step the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_task import read_metrics, run_megarl, write_job

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

WORDS = [
    "trainer.n_gpus_per_node=2",
    "parallel.actor.pp=2",
    "parallel.critic.pp=2",
    "rollout.name=naive",
    "rollout.n=2",
    "actor.ppo_mini_batch_size=4",
    "algorithm.use_kl_in_reward=true",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.logger=[jsonl]",
    "data.val_files=[]",
    "trainer.trace=true",
    "actor.optim.clip_grad=0",  # the norm adds up over ranks in another order, and with it a clipped gradient
    "critic.optim.clip_grad=0",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """schedule -> folder of a finished run."""
    folders: dict[str, Path] = {}
    for schedule in ("auto", "1f1b"):
        folders[schedule] = tmp_path_factory.mktemp(schedule)
        words = write_job(folders[schedule], "qwen3", num_hidden_layers=4)
        done = run_megarl([*words, *WORDS, f"pipeline.schedule={schedule}"])
        assert done.returncode == 0, done.stdout + done.stderr
        if schedule == "auto":
            assert "update of actor and critic, equal costs: schedule fused: predicted idle" in done.stdout + done.stderr
    return folders


def test_the_schedule_changes_no_number(runs) -> None:
    fused, in_turn = (read_metrics(runs[schedule]) for schedule in ("auto", "1f1b"))
    for one, other in zip(fused, in_turn, strict=True):
        for name in ("actor/pg_loss", "actor/entropy", "critic/vf_loss", "critic/values/mean", "critic/score/mean"):
            assert one[name] == other[name], name
        for name in ("actor/grad_norm", "critic/grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-5), name


def test_idle_share_and_trace_are_written(runs) -> None:
    row = read_metrics(runs["auto"])[-1]
    assert 0 <= row["pipeline/idle_share"] < 1 and 0 <= row["pipeline/annotate_idle_share"] < 1
    parts = row["timing_s/update_actor"] + row["timing_s/update_critic"]
    assert 0 < parts <= row["timing_s/update_actor_critic"]
    folder = runs["auto"] / "run" / "trace"
    assert (folder / "update_000002.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "update_000002.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["tid"] for span in spans} == {0, 1} and {span["cat"] for span in spans} == {"actor", "critic"}
    assert sum(span["name"].startswith("STEP actor") for span in spans) == 2 * 2, "two mini-batches on two ranks"
