"""What a program says of a run, and the `key=value` words of `megarl train` that mean the same.

    PPOConfig(actor_model_name="m", batch_size=4), "grpo"  ->  build_words  ->  algorithm.name=grpo
                                                                                actor.model_path=m
                                                                                actor.ppo_mini_batch_size=4 ...

Each field names its option; rows in memory are written to the folder of the run, where an option can name them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.algo.algorithms import ADVANTAGES, ALGORITHMS
from megarl.config.load import ConfigError
from megarl.reward.rules import RULES
from megarl.reward.verdict import Scorer
from megarl.rollout.sums import build_sums

Rows = Sequence[str | Mapping[str, Any]]
Judge = str | Path | Scorer | Callable[..., float | Mapping[str, float]]
NUM_SUMS = 512  # prompts where the user gives none
NUM_SIBLINGS = 4  # answers a prompt where the algorithm compares them


def _option(key: str, default: Any = None) -> Any:
    return field(default=default, metadata={"key": key})


@dataclass(frozen=True)
class PPOConfig:
    """What a run needs, for every algorithm; None = the default of `megarl train`.

    Rows are texts, or mappings with `prompt` and what the reward reads (`ground_truth`, `data_source`, `extra_info`).
    Without prompts and files the run trains on sums of two one-digit numbers, and says so. Preference training reads
    rows with `prompt`, `chosen` and `rejected` instead.

    A reward or cost model is named by a Hugging Face folder, the http(s) address of a service, a rule of megarl or
    `path/to/file.py:function`; without one the rule `numeric` compares an answer's last number with `ground_truth`.
    """

    actor_model_name: str = field(metadata={"key": "actor.model_path"})
    reward_model_name: str | None = None
    cost_model_name: str | None = None  # SafeRLHFTrainer
    critic_model_name: str | None = _option("critic.model_path")  # None = the actor's, with a fresh value head
    reference_model_name: str | None = _option("ref.model_path")
    prompts: Rows = ()
    val_prompts: Rows = ()
    train_files: Sequence[str] = _option("data.train_files", ())
    val_files: Sequence[str] = _option("data.val_files", ())
    max_steps: int = _option("trainer.total_training_steps", 100)
    rollout_batch_size: int = _option("data.train_batch_size", 8)  # prompts of a step
    batch_size: int | None = _option("actor.ppo_mini_batch_size")  # prompts of an optimizer step; None = all of a step
    num_answers: int | None = None  # to each prompt; None = 1, or 4 where the algorithm compares them
    max_prompt_length: int | None = _option("data.max_prompt_length")  # tokens
    max_response_length: int = _option("data.max_response_length", 128)  # tokens
    temperature: float | None = _option("rollout.temperature")
    learning_rate: float | None = _option("actor.optim.lr")
    critic_learning_rate: float | None = _option("critic.optim.lr")
    cost_limit: float | None = _option("algorithm.lagrange.cost_limit")  # SafeRLHFTrainer
    engine: str | None = _option("rollout.name")  # vllm, or naive
    eval_every: int | None = _option("trainer.test_freq")  # steps
    save_every: int | None = _option("trainer.save_freq")  # steps; the same program then goes on where it was stopped
    output_dir: str | None = _option("trainer.default_local_dir")
    seed: int | None = _option("trainer.seed")
    options: Mapping[str, Any] = field(default_factory=dict)  # any other option, by its dotted name


def build_words(config: PPOConfig, algorithm: str, judges: Mapping[str, Judge]) -> list[str]:
    """The `key=value` words of a run; writes rows that are in memory as files of its folder.

    Args:
        algorithm: a name of `ALGORITHMS`.
        judges: what scores the answers ("reward") and what they cost ("cost").

    Raises:
        ConfigError: rows in memory beside files.
    """
    facts = ALGORITHMS[algorithm]
    settings: dict[str, Any] = {"trainer.experiment_name": algorithm, "algorithm.name": algorithm}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if "key" in each.metadata and value not in (None, ()):
            settings[each.metadata["key"]] = value
    for section, judge in judges.items():
        settings |= describe_judge(section, judge)
    if config.num_answers is not None:
        settings["rollout.n"] = config.num_answers
    elif facts.advantage is not None and "siblings" in ADVANTAGES[facts.advantage].needs:
        settings["rollout.n"] = NUM_SIBLINGS
    settings |= dict(config.options)
    run_dir = Path(settings.get("trainer.default_local_dir") or Path("runs") / "megarl" / algorithm)
    settings["trainer.default_local_dir"] = str(run_dir)
    rows = {"train": config.prompts, "val": config.val_prompts}
    if lacks_data(config, algorithm):
        rows["train"] = build_sums(NUM_SUMS, seed=1)
    for name, given in rows.items():
        key = f"data.{name}_files"
        if given and settings.get(key):
            raise ConfigError([f"rows in memory ({name}) and {key}={settings[key]} are both given; keep one"])
        if given:
            path = run_dir / "data" / f"{name}.jsonl"
            write_jsonl(path, [{"prompt": row} if isinstance(row, str) else row for row in given])
            settings[key] = [str(path)]
    return [to_word(key, value) for key, value in settings.items()]


def lacks_data(config: PPOConfig, algorithm: str) -> bool:
    """Whether nothing says what to train on, and sums will do."""
    is_given = config.prompts or config.train_files or config.options.get("data.train_files")
    return not is_given and ALGORITHMS[algorithm].advantage is not None


def describe_judge(section: str, judge: Judge) -> dict[str, Any]:
    """The options that name a judge, for the section "reward" or "cost"."""
    if not isinstance(judge, str | Path):
        return {f"{section}.sources": [{"given": True}]}
    name = str(judge)
    if name.startswith(("http://", "https://")):
        return {f"{section}.sources": [{"remote": name}]}
    if ":" in name or name in RULES:
        return {f"{section}.function": name}
    return {f"{section}_model.model_path": name, f"{section}_model.engine": "transformers"}


def to_word(key: str, value: Any) -> str:
    """`key=value` as the command line takes it; lists and sections as JSON."""
    return f"{key}={value}" if isinstance(value, str) else f"{key}={json.dumps(value)}"


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as jsonl, beside first and then renamed; every rank of a job may write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
