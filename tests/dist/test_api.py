"""Programs that train: alone, in the ranks of torchrun, with preferences; and the examples that are such programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.obs.log import QUIET_ENVIRONMENT
from tests.tiny_task import ROOT, list_words, read_metrics, run_megarl, write_job

pytestmark = pytest.mark.timeout(600)

HEAD = """
import json, sys
from pathlib import Path
from megarl import DPOTrainer, GRPOTrainer, PPOConfig, PPOTrainer, RewardModelTrainer

folder = Path(sys.argv[1])
rows = [json.loads(line) for line in open(folder / "train.jsonl")]
FP32 = {"actor.dtype": "fp32", "critic.dtype": "fp32", "rollout.dtype": "fp32", "rollout.kv_cache_gib": 0.1,
        "rollout.max_num_seqs": 32, "actor.ppo_max_token_len": 64, "critic.ppo_max_token_len": 64,
        "ref.ppo_max_token_len": 64}
COMMON = dict(actor_model_name=str(folder / "model"), max_prompt_length=16, max_response_length=8, learning_rate=5e-3)

def share_of_d(data_source, solution_str, ground_truth, extra_info=None):
    words = solution_str.split()
    return {"score": words.count(ground_truth) / max(len(words), 1), "accuracy": float(words[:1] == [ground_truth])}
"""
TRAINS = """
if __name__ == "__main__":
    trainer = PPOTrainer(PPOConfig(**COMMON, prompts=rows, num_answers=4, max_steps=6, critic_learning_rate=5e-3,
                                   output_dir=str(folder / "run"), engine="naive", options=FP32))
    trainer.set_reward_model(share_of_d)
    before = trainer.generate(["a b c"])
    result = trainer.train()
    after = trainer.generate(["a b c"])
    trainer.save(folder / "saved")
    if result.metrics:
        told = [row["critic/score/mean"] for row in result.metrics]
        (folder / "told.json").write_text(json.dumps([told, before, after, result.is_complete]))
"""
TWO_AND_PREFERENCES = """
if __name__ == "__main__":
    for number, build in enumerate((PPOTrainer, GRPOTrainer)):
        trainer = build(PPOConfig(**COMMON, prompts=rows, num_answers=4, max_steps=2, options=FP32,
                                  output_dir=str(folder / f"run{number}")))
        trainer.set_reward_model(share_of_d)
        assert len(trainer.train().metrics) == 2
    pairs = [{"prompt": row["prompt"], "chosen": "d d", "rejected": "a a"} for row in rows]
    for number, build in enumerate((DPOTrainer, RewardModelTrainer)):
        trainer = build(PPOConfig(**COMMON, prompts=pairs, max_steps=4, output_dir=str(folder / f"pref{number}"),
                                  options={"actor.dtype": "fp32"}))
        told = [row["preference/accuracy"] for row in trainer.train().metrics]
        assert told[-1] == 1.0, told
        trainer.save(folder / f"saved{number}")
    (folder / "done").touch()
"""

BESIDE = """
import threading
from megarl import learn, train
from megarl.reward.verdict import Verdict

annotated = threading.Event()

class Service:
    waits_elsewhere = True

    def score(self, answers, max_failures):
        if len(answers) > 1:
            assert annotated.wait(60), "the trainer waited for the rewards before it annotated"
        return [Verdict(float(len(answer.text))) for answer in answers]

    def close(self): ...

def annotate_batch(*arguments):
    found = learn.annotate_batch(*arguments)
    annotated.set()
    return found

if __name__ == "__main__":
    train.annotate_batch = annotate_batch
    trainer = PPOTrainer(PPOConfig(**COMMON, prompts=rows, max_steps=2, engine="naive", options=FP32,
                                   output_dir=str(folder / "run")))
    trainer.set_reward_model(Service())
    assert len(trainer.train().metrics) == 2
"""


def run_program(folder: Path, body: str, launcher: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(HEAD + body)
    return run_python([*(launcher or []), str(program), str(folder)])


def run_python(words: list[str]) -> subprocess.CompletedProcess[str]:
    quiet = {name: os.environ.get(name, value) for name, value in QUIET_ENVIRONMENT.items()}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | quiet | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_a_program_trains_as_the_command_does_and_its_model_is_saved(tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = write_job(tmp_path)
    done = run_program(tmp_path, TRAINS)
    assert done.returncode == 0, done.stderr[-3000:]
    scores, before, after, is_complete = json.loads((tmp_path / "told.json").read_text())
    assert is_complete and scores[-1] > scores[0] + 0.1 and before != after

    other = tmp_path / "other"
    same = run_megarl([
        *words, "algorithm.name=ppo", "rollout.name=naive", "rollout.n=4", "trainer.total_training_steps=6",
        "actor.optim.lr=5e-3", "critic.optim.lr=5e-3", "data.val_files=[]",
        f"trainer.default_local_dir={other / 'run'}",
    ])  # fmt: skip
    assert same.returncode == 0, same.stderr[-3000:]
    for own, told in zip(read_metrics(tmp_path), read_metrics(other), strict=True):
        for name in ("critic/score/mean", "actor/grad_norm", "critic/vf_loss"):
            assert own[name] == told[name], name

    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "saved")
    chat = [{"role": "user", "content": "a b c"}]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])
    drawn = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(drawn[0, ids.shape[1] :], skip_special_tokens=True) == after[0]


def test_a_program_joins_the_ranks_of_torchrun(tmp_path) -> None:
    write_job(tmp_path)
    done = run_program(tmp_path, TRAINS, ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"])
    assert done.returncode == 0, done.stderr[-3000:]
    scores, _, _, is_complete = json.loads((tmp_path / "told.json").read_text())
    assert is_complete and len(scores) == 6 and scores[-1] > scores[0] + 0.1


def test_rewards_are_found_while_the_models_annotate(tmp_path) -> None:
    write_job(tmp_path)
    done = run_program(tmp_path, BESIDE)
    assert done.returncode == 0, done.stderr[-3000:]


def test_several_trainers_one_after_the_other_also_without_engine(tmp_path) -> None:
    write_job(tmp_path)
    done = run_program(tmp_path, TWO_AND_PREFERENCES)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert (tmp_path / "done").exists()
    assert "lm_head.weight" not in read_names(tmp_path / "saved1") and "score.weight" in read_names(tmp_path / "saved1")
    assert "score.weight" not in read_names(tmp_path / "saved0")


def read_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("algorithm", ["ppo", "remax", "safe_rlhf"])
def test_the_loop_of_five_files_learns_with_one_line_changed(tmp_path, algorithm) -> None:
    write_job(tmp_path)
    folder = tmp_path / "five"
    folder.mkdir()
    for source in (ROOT / "examples" / "ppo").glob("*.py"):
        text = source.read_text()
        if source.name == "main.py":
            assert text.count('ALGORITHM = "ppo"') == 1
            text = text.replace('ALGORITHM = "ppo"', f'ALGORITHM = "{algorithm}"')
        (folder / source.name).write_text(text)
    done = run_python(
        [
            "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(folder / "main.py"),
            *list_words(tmp_path), "rollout.name=naive", "trainer.total_training_steps=6", "actor.optim.lr=5e-3", "critic.optim.lr=5e-3",
            "actor.optim.lr_warmup_steps=0", "cost_critic.dtype=fp32",
        ]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    rewards = [float(line.split("reward: ")[1].split(" |")[0]) for line in lines]
    assert len(rewards) == 6 and rewards[-1] > rewards[0] + 0.1, rewards
    assert ("value loss" in lines[0]) == (algorithm != "remax") and ("multiplier" in lines[0]) == (
        algorithm == "safe_rlhf"
    )
    assert "response_mask" in done.stdout


def test_the_minimal_program_runs_to_the_end(tmp_path) -> None:
    program = (ROOT / "examples" / "minimal_ppo.py").read_text()
    assert len(program.splitlines()) < 200
    words = ["--model", ".cache/quickstart/model", "--steps", "1", "--prompts", "2", "--out", str(tmp_path / "run")]
    assert (ROOT / ".cache/quickstart/model/config.json").is_file(), "`make test` prepares the quickstart's model"
    done = run_python(["examples/minimal_ppo.py", *words])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 rows in" in done.stdout and done.stdout.count("| before:") == 3
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
