"""Whole runs that are taken up again: exactly as if they had never stopped, on another grid but for rounding."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoints import list_differences
from tests.tiny_task import ROOT, list_words, read_metrics, run_megarl, write_job

pytestmark = pytest.mark.timeout(900)

STEPS = 6
FOUR_RANKS = ["trainer.n_gpus_per_node=4", "parallel.actor={tp: 2, pp: 2}", "parallel.critic={tp: 1, pp: 2, dp: 2}"]
OPTIONS = [
    f"trainer.total_training_steps={STEPS}",
    "trainer.total_epochs=4",
    "trainer.save_freq=2",
    "data.train_batch_size=32",  # two steps an epoch: a save after step 2 or 4 is one after the last batch of an epoch
    "data.val_files=[]",
    "rollout.name=naive",
    "rollout.n=2",
    "actor.ppo_mini_batch_size=16",
    "actor.optim={lr: 1e-3, lr_warmup_steps: 10, lr_decay_style: cosine}",
    "critic.optim.lr=1e-3",
    "actor.use_kl_loss=true",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.01, target_kl: 0.01, horizon: 64}",
]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "run" / "checkpoints" / f"step_{step:06d}"


def run(folder: Path, *words: str) -> str:
    """Runs the job of `folder` to a good end; what it printed."""
    done = run_megarl([*list_words(folder), *OPTIONS, *words])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def learned(row: dict[str, float]) -> dict[str, float]:
    """A row of metrics without clocks and memory."""
    clocks = ("timing_s/", "perf/", "pipeline/", "sync/")
    return {name: value for name, value in row.items() if not name.startswith(clocks)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Six steps of PPO with critic on TP 2 × PP 2, saved after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("straight")
    write_job(folder, "qwen2", tie_word_embeddings=True)
    run(folder, *FOUR_RANKS)
    return folder


def copy_at(straight: Path, folder: Path, step: int) -> Path:
    """The same job as it was when `step` steps were done and saved."""
    shutil.copytree(straight, folder, ignore=shutil.ignore_patterns("run"))
    checkpoint(folder, step).parent.mkdir(parents=True)
    shutil.copytree(checkpoint(straight, step), checkpoint(folder, step))
    return folder


@pytest.mark.parametrize("step", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_resumed_run_is_bit_for_bit_the_straight_one(straight: Path, tmp_path: Path, step: int) -> None:  # F3, F4
    folder = copy_at(straight, tmp_path / "resumed", step)
    told = run(folder, *FOUR_RANKS)
    assert f"resumed from {checkpoint(folder, step)}" in told
    assert list_differences(checkpoint(straight, STEPS), checkpoint(folder, STEPS)) == []
    shares = [int(share) for share in re.findall(r"(\d+)% │", told)]
    assert 0 < sum(shares) <= 100 + len(shares), "phases of all starts are shares of the time of all starts"
    rows, again = read_metrics(straight), read_metrics(folder)
    assert [row["step"] for row in again] == [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [learned(row) for row in again] == [learned(row) for row in rows]


def test_the_run_saves_nothing_into_its_results(straight: Path, tmp_path: Path) -> None:
    """A run that never saved before its end has the same weights."""
    folder = tmp_path / "unsaved"
    shutil.copytree(straight, folder, ignore=shutil.ignore_patterns("run"))
    run(folder, *FOUR_RANKS, f"trainer.save_freq={STEPS}", "trainer.async_save=true")
    assert list_differences(checkpoint(straight, STEPS), checkpoint(folder, STEPS)) == []


def test_another_grid_goes_on_with_the_same_losses_but_for_rounding(straight: Path, tmp_path: Path) -> None:  # F5
    folder = copy_at(straight, tmp_path / "other", 4)
    run(folder, "trainer.n_gpus_per_node=2", "parallel.actor={tp: 1, pp: 1}", "parallel.critic={tp: 2, ranks: [0, 1]}")
    rows, again = read_metrics(straight)[4:5], read_metrics(folder)[4:5]  # a step is two updates of each role
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "critic/vf_loss", "actor/lr", "critic/score/mean"):
        values = [row[name] for row in again]
        assert values == pytest.approx([row[name] for row in rows], rel=1e-3, abs=1e-5), name


def test_auto_passes_over_a_broken_checkpoint_and_says_why(straight: Path, tmp_path: Path) -> None:  # F1
    folder = copy_at(straight, tmp_path / "broken", 2)
    shutil.copytree(checkpoint(straight, 4), checkpoint(folder, 4))
    victim = next(checkpoint(folder, 4).rglob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-100])
    told = run(folder, *FOUR_RANKS, "trainer.total_training_steps=3")
    assert re.search(r"passed over .*step_000004: the file .*distcp has \d+ bytes instead of \d+", told)
    assert f"resumed from {checkpoint(folder, 2)}" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trainer.resume_mode=path", "trainer.resume_from_path={base}"], "never completed, or is not megarl's"),
        (["data.seed=7"], "was made with other training data"),
        (["algorithm.adv_estimator=grpo"], "holds actor and critic, this configuration trains actor"),
        (["actor.dtype=bf16"], "its weights are float32, here actor.dtype is torch.bfloat16"),
    ],
)
def test_what_cannot_be_resumed_is_told_in_one_message(straight: Path, tmp_path: Path, words, told: str) -> None:
    folder = copy_at(straight, tmp_path / "wrong", 2)
    words = [word.format(base=folder / "model") for word in words]
    done = run_megarl([*list_words(folder), *OPTIONS, *FOUR_RANKS, *words], 120)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr and "Traceback" not in done.stderr


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return start_module(["megarl", "train"], folder, *words)


def start_module(module: list[str], folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *module, *list_words(folder), *OPTIONS, *words],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= step):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"]
)
def test_a_signal_saves_and_leaves_with_the_requeue_code_and_the_same_command_goes_on(
    straight: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "warned"
    shutil.copytree(straight, folder, ignore=shutil.ignore_patterns("run"))
    process = start(folder, *FOUR_RANKS, "trainer.save_freq=-1")
    wait_for_step(folder, 1, process)
    process.send_signal(number)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert f"{number.name}: saved after step" in out and "Traceback" not in errors
    stopped = len(read_metrics(folder))
    assert stopped < STEPS and checkpoint(folder, stopped).is_dir()
    assert read_ending(folder) == {"code": 75, "why": f"{number.name}: saved after step {stopped}"}
    run(folder, *FOUR_RANKS, f"trainer.save_freq={STEPS}")
    assert list_differences(checkpoint(straight, STEPS), checkpoint(folder, STEPS)) == []
    assert read_ending(folder) == {"code": 0, "why": f"all {STEPS} steps are done"}


def read_ending(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run" / "exit.json").read_text())


@pytest.mark.long
def test_under_torchrun_the_ending_is_told_in_a_file(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "torchrun"
    shutil.copytree(straight, folder, ignore=shutil.ignore_patterns("run"))
    process = start_module(
        ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "--shutdown-timeout=100", "-m", "megarl.train"],
        folder, *FOUR_RANKS, "trainer.save_freq=-1",
    )  # fmt: skip
    wait_for_step(folder, 1, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    stopped = len(read_metrics(folder))
    assert process.returncode not in (0, 75) and checkpoint(folder, stopped).is_dir(), errors
    assert read_ending(folder) == {"code": 75, "why": f"SIGTERM: saved after step {stopped}"}


@pytest.mark.long
def test_a_run_whose_time_is_over_saves_and_asks_to_be_started_again(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "timed"
    shutil.copytree(straight, folder, ignore=shutil.ignore_patterns("run"))
    done = run_megarl([*list_words(folder), *OPTIONS, *FOUR_RANKS, "trainer.max_wall_time_s=1"])
    assert done.returncode == 75, done.stderr
    assert "trainer.max_wall_time_s=1: saved after step 1" in done.stdout
    assert checkpoint(folder, 1).is_dir()


@pytest.mark.long
def test_starting_anew_beside_old_checkpoints_keeps_them(straight: Path, tmp_path: Path) -> None:
    folder = copy_at(straight, tmp_path / "anew", 4)
    words = ["trainer.resume_mode=disable", "trainer.total_training_steps=2"]
    told = run(folder, *FOUR_RANKS, *words)
    assert "checkpoints.1" in told and (folder / "run" / "checkpoints.1" / "step_000004").is_dir()
    assert [path.name for path in checkpoint(folder, 2).parent.glob("step*")] == ["step_000002"]


