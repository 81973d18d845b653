"""Training on preferences that is taken up again: bit for bit as if it had never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoints import list_differences
from tests.dist.test_preference_learn import write_pairs
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

STEPS, NUM_RANKS = 6, 2
OPTIONS = [
    "data.train_batch_size=16", f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=2", "trainer.save_freq=3",
    "actor.optim={lr: 1e-3, lr_warmup_steps: 4, lr_decay_style: cosine}", "trainer.logger=[jsonl]", "trainer.test_freq=2",
    "actor.ppo_max_token_len=256", "ref.ppo_max_token_len=256",
]  # fmt: skip
JOBS = {
    "dpo": ["algorithm.name=dpo", "parallel.actor.tp=2"],
    "reward_model": ["algorithm.name=reward_model", "parallel.actor.pp=2"],
}


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:06d}"


def run(rank: int, world_size: int, folder: Path, words: list[str]) -> dict[str, list[tuple[int, str]]]:
    """Each job once without a stop; and from its checkpoint after step 3, stopped after one step, then to the end."""
    import torch.distributed as dist

    from megarl.cli import train_on_preferences
    from megarl.config.load import load_config, resolve_config
    from megarl.launch.stop import StopRequest

    endings: dict[str, list[tuple[int, str]]] = {}
    for name, own in JOBS.items():
        straight, resumed = folder / name, folder / f"{name}_resumed"

        def train(out: Path, wall_time_s: float | None = None, own=own, name=name) -> None:
            config = resolve_config(load_config(None, [*words, *OPTIONS, *own, f"trainer.default_local_dir={out}"]))
            ending = train_on_preferences(config, StopRequest(wall_time_s))
            endings.setdefault(name, []).append((ending.code, ending.why.split(": ")[-1]))

        train(straight)
        if rank == 0:
            shutil.copytree(checkpoint(straight, 3), checkpoint(resumed, 3))
        dist.barrier()
        train(resumed, wall_time_s=0.0)
        train(resumed)
    return endings


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, list[dict[str, list[tuple[int, str]]]]]:
    folder = tmp_path_factory.mktemp("pairs")
    return folder, run_ranks(run, NUM_RANKS, folder, write_pairs(folder), timeout_s=600)


@pytest.mark.parametrize("name", JOBS)
def test_three_and_three_steps_are_six(runs, name: str) -> None:
    folder, _ = runs
    straight, resumed = folder / name, folder / f"{name}_resumed"
    assert list_differences(checkpoint(straight, STEPS), checkpoint(resumed, STEPS)) == []
    rows, again = ([learned(row) for row in read_rows(out)] for out in (straight, resumed))
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert again == rows


@pytest.mark.parametrize("name", JOBS)
def test_a_run_that_is_to_stop_saves_and_asks_to_be_started_again(runs, name: str) -> None:
    done = "all 6 steps are done"
    for endings in runs[1]:
        assert endings[name] == [(0, done), (75, "saved after step 4"), (0, done)]


@pytest.mark.parametrize(("name", "head"), [("dpo", None), ("reward_model", "score.weight")])
def test_a_checkpoint_is_converted_with_its_head(runs, tmp_path, name: str, head: str | None) -> None:
    from safetensors.torch import load_file

    from megarl.cli import main

    folder, _ = runs
    words = ["--ckpt", str(folder / name), "--hf", str(folder / "model"), "--out", str(tmp_path / "out")]
    assert main(["convert", "megatron-to-hf", *words]) == 0
    first, trained = (load_file(path / "model.safetensors") for path in (folder / "model", tmp_path / "out"))
    assert trained.keys() - first.keys() == ({head} if head else set())
    assert not torch.equal(trained["model.norm.weight"], first["model.norm.weight"])


def read_rows(out: Path) -> list[dict[str, float]]:
    from megarl.obs.metrics import read_metrics

    return read_metrics(out / "metrics.jsonl")


def learned(row: dict[str, float]) -> dict[str, float]:
    """A row of metrics without clocks and memory."""
    return {name: value for name, value in row.items() if not name.startswith(("timing_s/", "perf/", "pipeline/"))}
