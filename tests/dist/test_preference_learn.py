"""Training on preferences: every loss parts good answers from bad ones, on every grid by the same step."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny_task import WORDS, read_metrics, run_megarl, write_job

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

NAMES = ["dpo", "cdpo", "ipo", "kto", "simpo", "reward_model"]
COMMON = [
    "data.train_batch_size=16",
    "actor.optim.lr=1e-3",
    "actor.ppo_max_token_len=256",
    "ref.ppo_max_token_len=256",
    "trainer.total_training_steps=8",
    "trainer.total_epochs=2",
    "trainer.save_hf_at_end=true",
]


def write_pairs(folder: Path) -> list[str]:
    """Pairs on disk; the words that name everything.

    A chosen answer has four or five words d, a rejected one at most two: KTO judges answers one by one, so what makes
    one good must not depend on the other.
    """
    words = [word for word in write_job(folder) if not word.startswith(("data.", "reward."))]
    letters, draw = [word for word in WORDS[5:] if word != "d"], random.Random(0)
    for name, count in (("train", 96), ("val", 40)):
        rows = []
        for _ in range(count):
            good, bad, length = draw.randint(4, 5), draw.randint(0, 2), 6
            answers = []
            for num_d in (good, bad):
                text = ["d"] * num_d + [draw.choice(letters) for _ in range(length - num_d)]
                draw.shuffle(text)
                answers.append(" ".join(text))
            rows.append({"prompt": " ".join(draw.choices(letters, k=4)), "chosen": answers[0], "rejected": answers[1]})
        (folder / f"pairs_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"data.train_files={folder / 'pairs_train.jsonl'}", f"data.val_files={folder / 'pairs_val.jsonl'}"]
    return [*words, *files, "data.max_prompt_length=16", "data.max_response_length=8"]


def train_all(rank: int, world_size: int, cases: dict[str, list[str]]) -> dict[str, list[dict[str, float]]]:
    from megarl.cli import train_on_preferences
    from megarl.config.load import load_config, resolve_config
    from megarl.config.validate import find_problems
    from megarl.launch.stop import StopRequest
    from megarl.obs.metrics import read_metrics as read

    rows: dict[str, list[dict[str, float]]] = {}
    for name, words in cases.items():
        config = resolve_config(load_config(None, words))
        assert find_problems(config, world_size) == [], name
        train_on_preferences(config, StopRequest())
        if rank == 0:
            rows[name] = read(Path(str(config.trainer.default_local_dir)) / "metrics.jsonl")
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def runs(folder) -> dict[str, list[dict[str, float]]]:
    words = write_pairs(folder)
    cases = {
        name: [*words, *COMMON, f"algorithm.name={name}", f"trainer.default_local_dir={folder / name}", "trainer.logger=[jsonl]"]
        for name in NAMES
    }  # fmt: skip
    cases["kto"] += ["actor.optim.lr=2e-3", "trainer.total_training_steps=16", "trainer.total_epochs=4"]
    return run_ranks(train_all, 1, cases, timeout_s=600)[0]


@pytest.mark.parametrize("name", NAMES)
def test_held_out_answers_are_told_apart(runs, name: str) -> None:
    first, last = runs[name][0], runs[name][-1]
    assert last["val/loss"] < first["val/loss"]
    assert last["val/accuracy"] > 0.9, (first["val/accuracy"], last["val/accuracy"])


def test_before_the_first_step_policy_and_reference_are_one(runs) -> None:
    """The loss of DPO is then log 2, of KTO 1/2, of IPO 1/(4 beta²)."""
    assert runs["dpo"][0]["val/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert runs["kto"][0]["val/loss"] == pytest.approx(0.5, abs=1e-5)
    assert runs["ipo"][0]["val/loss"] == pytest.approx(25.0, abs=1e-3)


def test_a_reward_model_reaches_95_in_100_and_transformers_reads_it(runs, folder) -> None:
    assert runs["reward_model"][-1]["val/accuracy"] > 0.95
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = folder / "reward_model" / "hf" / "step_8" / "reward_model"
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    right = 0
    rows = [json.loads(line) for line in (folder / "pairs_val.jsonl").read_text().splitlines()]
    for row in rows:
        scores = []
        for answer in (row["chosen"], row["rejected"]):
            ids = tokenizer(f"<u> {row['prompt']} <a> {answer} </s>", return_tensors="pt", add_special_tokens=False)
            scores.append(float(model(input_ids=ids["input_ids"]).logits))
        right += scores[0] > scores[1]
    assert right / len(rows) == pytest.approx(runs["reward_model"][-1]["val/accuracy"], abs=1 / len(rows) + 1e-6)


def test_the_reward_model_serves_grpo(runs, folder) -> None:
    """It was taught to like the word d; a policy that is rewarded by it says d more often, and scores higher."""
    from tests.dist.test_algorithms_learn import COMMON as RL
    from tests.dist.test_algorithms_learn import train_all as train_on_rewards

    job = [word for word in write_job(folder / "rl") if not word.startswith("reward.")]
    model = folder / "reward_model" / "hf" / "step_8" / "reward_model"
    words = ["algorithm.name=dr_grpo", f"reward_model.model_path={model}", "reward_model.dtype=fp32"]
    rows = run_ranks(train_on_rewards, 1, {"grpo": [*job, *RL, *words]}, timeout_s=300)[0]["grpo"]
    assert rows[-1]["critic/score/mean"] > rows[0]["critic/score/mean"] + 0.1


GRIDS = {
    "one": [],
    "tp2_pp2": ["parallel.actor={tp: 2, pp: 2}", "parallel.ref={tp: 1, pp: 1, dp: 4}"],
    "dp4": ["parallel.actor={dp: 4}", "actor.ppo_micro_batch_size=2"],
}


@pytest.fixture(scope="module")
def on_grids(tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    """Two steps of DPO, KTO and a reward model on four ranks, on different grids; `one` uses rank 0 alone."""
    folder: Path = tmp_path_factory.mktemp("grids")
    words = write_pairs(folder)
    cases = {}
    for grid, own in GRIDS.items():
        alone = ["parallel.actor.ranks=[0]", "parallel.ref.ranks=[0]"] if grid == "one" else own
        for name in ("dpo", "kto", "reward_model"):
            run = f"{name}_{grid}"
            cases[run] = [
                *words, *COMMON, *alone, f"algorithm.name={name}", "trainer.total_training_steps=2",
                "trainer.save_hf_at_end=false", f"trainer.default_local_dir={folder / run}", "trainer.logger=[jsonl]",
            ]  # fmt: skip
    return run_ranks(train_all, 4, cases, timeout_s=600)[0]


@pytest.mark.parametrize("grid", ["tp2_pp2", "dp4"])
@pytest.mark.parametrize("name", ["dpo", "kto", "reward_model"])
def test_every_grid_takes_the_same_steps(on_grids, name: str, grid: str) -> None:
    for row, oracle in zip(on_grids[f"{name}_{grid}"], on_grids[f"{name}_one"], strict=True):
        for key in ("preference/loss", "preference/grad_norm", "val/loss", "val/margin"):
            if key in oracle:
                assert row[key] == pytest.approx(oracle[key], rel=1e-4, abs=1e-5), key


def test_the_program_runs_from_the_command_line(tmp_path) -> None:
    done = run_megarl([*write_pairs(tmp_path), *COMMON, "algorithm.name=dpo", "trainer.total_training_steps=1"], 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Epoch 1 | Step 1 | Loss: 0.69" in done.stdout and "Held-out loss: " in done.stdout
    assert read_metrics(tmp_path)[-1]["perf/throughput"] > 0
    done = run_megarl([*write_pairs(tmp_path), *COMMON, "algorithm.name=dpo", "--dry-run"], 60)
    assert done.returncode == 0 and "preference.loss=dpo" in done.stdout, done.stderr
