"""Runs from a program: what a `PPOConfig` says is what `megarl train` would be told."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

import megarl
from megarl import PPOConfig
from megarl.api import GRPOTrainer, PPOTrainer, SafeRLHFTrainer, Trainer, _to_scorer
from megarl.api_config import NUM_SUMS, build_words, describe_judge
from megarl.config.load import OPTIONS, ConfigError, load_config
from megarl.records import Prompt, Rollout
from megarl.reward.remote import RemoteRewardModel
from megarl.reward.verdict import Answer
from tests.tiny import save_hf_model

SHORT: dict[str, Any] = {"max_prompt_length": 64, "max_response_length": 8}


def words_of(tmp_path, algorithm: str = "ppo", **changes) -> list[str]:
    config = PPOConfig("model", output_dir=str(tmp_path / "run"), **changes)
    return build_words(config, algorithm, {})


def test_every_field_names_an_option_that_there_is() -> None:
    keys = [each.metadata["key"] for each in dataclasses.fields(PPOConfig) if "key" in each.metadata]
    assert len(keys) > 15 and set(keys) <= set(OPTIONS)


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(megarl, name) is not None for name in megarl.__all__)
    with pytest.raises(AttributeError, match="PPOTrainner"):
        _ = megarl.PPOTrainner  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_megarl_imports_nothing_heavy() -> None:
    code = "import megarl, sys; print([m for m in ('torch', 'omegaconf', 'transformers', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_fields_arrive_in_the_options_they_stand_for(tmp_path) -> None:
    config = load_config(
        None,
        words_of(
            tmp_path, max_steps=7, batch_size=4, rollout_batch_size=8, num_answers=3, learning_rate=2e-5,
            engine="naive", train_files=["a, b.jsonl", "c=[d].jsonl"],
            options={"parallel.actor.pp": 2, "rollout.val.n": 0},
        ),
    )  # fmt: skip
    assert config.trainer.total_training_steps == 7
    assert (config.actor.ppo_mini_batch_size, config.data.train_batch_size, config.rollout.n) == (4, 8, 3)
    assert (config.actor.optim.lr, config.rollout.name.value) == (2e-5, "naive")
    assert config.data.train_files == ["a, b.jsonl", "c=[d].jsonl"]
    assert (config.parallel.actor.pp, config.rollout.val.n) == (2, 0)


def test_an_algorithm_that_compares_answers_draws_several(tmp_path) -> None:
    assert load_config(None, words_of(tmp_path, "grpo")).rollout.n == 4
    assert load_config(None, words_of(tmp_path, "remax")).rollout.n == 1


def test_rows_in_memory_become_a_file_of_the_run(tmp_path) -> None:
    rows = ["three", {"prompt": [{"role": "user", "content": "four"}], "ground_truth": 4}]
    config = load_config(None, words_of(tmp_path, prompts=rows))
    (path,) = config.data.train_files
    written = [json.loads(line) for line in open(path)]
    assert written == [{"prompt": "three"}, rows[1]] and path.startswith(str(tmp_path / "run"))


def test_without_data_there_are_sums_whose_answers_are_right(tmp_path) -> None:
    (path,) = load_config(None, words_of(tmp_path)).data.train_files
    rows = [json.loads(line) for line in open(path)]
    assert len(rows) == NUM_SUMS
    for row in rows:
        a, b = (int(word.strip("?")) for word in row["prompt"].split() if word.strip("?").isdigit())
        assert str(a + b) == row["ground_truth"]


def test_training_on_preferences_invents_no_data(tmp_path) -> None:
    assert load_config(None, words_of(tmp_path, "dpo")).data.train_files == []


def test_rows_in_memory_and_files_are_a_mistake(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"rows in memory \(train\) and data.train_files=.*keep one"):
        words_of(tmp_path, prompts=["a"], train_files=["b.jsonl"])


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        ("http://127.0.0.1:8000/score", {"reward.sources": [{"remote": "http://127.0.0.1:8000/score"}]}),
        ("gsm8k", {"reward.function": "gsm8k"}),
        ("my/judge.py:score", {"reward.function": "my/judge.py:score"}),
        ("models/rm", {"reward_model.model_path": "models/rm", "reward_model.engine": "transformers"}),
        (lambda *_: 0.0, {"reward.sources": [{"given": True}]}),
    ],
)
def test_a_judge_is_named_as_the_configuration_names_it(judge, expected) -> None:
    assert describe_judge("reward", judge) == expected


def test_a_function_is_called_by_the_names_of_its_arguments() -> None:
    def reward(ground_truth, extra_info, solution_str, data_source):
        return len(solution_str) + ground_truth

    prompt = Prompt(row=0, token_ids=(1,), text="p", ground_truth=10)
    answer = Answer(prompt, Rollout(0, 0, (2,), (0.0,), True, 0), "abc")
    (verdict,) = _to_scorer(reward).score([answer], 0)
    assert verdict.score == 13.0 and verdict.failure is None


def test_a_function_with_other_arguments_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"it lacks .*solution_str"):
        _to_scorer(lambda prompts, completions: 0.0)


def test_an_object_that_scores_is_taken_as_it_is() -> None:
    judge = RemoteRewardModel("http://127.0.0.1:1/score", "m")
    assert _to_scorer(judge) is judge


def test_a_number_is_no_reward() -> None:
    with pytest.raises(ConfigError, match="give a function"):
        _to_scorer(3)  # pyright: ignore[reportArgumentType]


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"algorithm='ppoo' is not one of ppo, "):
        Trainer(PPOConfig("m"), "ppoo")


def test_problems_are_told_at_once_before_anything_is_built(tmp_path) -> None:
    save_hf_model(tmp_path / "model", "llama")
    options = {"parallel.actor.tp": 3, "data.max_promt_length": 3}
    trainer = GRPOTrainer(PPOConfig(str(tmp_path / "model"), output_dir=str(tmp_path / "run"), options=options))
    with pytest.raises(ConfigError, match=r"did you mean data\.max_prompt_length"):
        trainer.train()
    options.pop("data.max_promt_length")
    with pytest.raises(ConfigError, match=r"parallel\.actor"):
        trainer.train()


def test_safe_rlhf_asks_for_a_cost(tmp_path) -> None:
    save_hf_model(tmp_path / "model", "llama")
    trainer = SafeRLHFTrainer(PPOConfig(str(tmp_path / "model"), output_dir=str(tmp_path / "run"), **SHORT))
    with pytest.raises(ConfigError, match=r"needs a cost for each answer; set cost.function"):
        trainer.build_config()
    trainer.set_cost_model(lambda data_source, solution_str, ground_truth, extra_info: 0.0)
    assert trainer.build_config().cost is not None


def test_a_reward_model_name_is_a_folder_for_transformers(tmp_path) -> None:
    save_hf_model(tmp_path / "model", "llama")
    (tmp_path / "rm").mkdir()
    trainer = PPOTrainer(
        PPOConfig(str(tmp_path / "model"), str(tmp_path / "rm"), max_steps=100, batch_size=4, rollout_batch_size=8,
                  output_dir=str(tmp_path / "run"), **SHORT)
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"reward_model.model_path=.*no config.json"):
        trainer.build_config()
