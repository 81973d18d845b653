"""The options of this run: those of `megarl train`, in words; what the command line says goes over them."""

from __future__ import annotations

import os

from megarl.config.hub import load_run
from megarl.config.load import ConfigError
from megarl.config.schema import Config
from megarl.config.validate import find_problems

COMMON = [
    "data.train_files=[.cache/quickstart/data/train.parquet]",
    "data.train_batch_size=12",
    "data.max_prompt_length=128",
    "data.max_response_length=20",
    "actor.model_path=.cache/quickstart/model",
    "actor.ppo_max_token_len=1024",
    "actor.optim.lr=5e-5",
    "actor.optim.lr_warmup_steps=2",
    "critic.ppo_max_token_len=1024",
    "critic.optim.lr=1e-4",
    "rollout.n=8",
    "rollout.kv_cache_gib=0.5",
    "rollout.max_num_seqs=96",
    "reward.function=numeric",
    "trainer.total_training_steps=10",
]

# What an algorithm needs beyond its name.
EXTRA = {
    "safe_rlhf": [
        "cost.function=examples/safe_rlhf/cost.py:words_beside_the_number",
        "cost_critic.ppo_max_token_len=1024",
        "cost_critic.optim.lr=1e-4",
        "algorithm.lagrange.cost_limit=0.2",
        "algorithm.use_kl_in_reward=false",
    ],
    "remax": ["algorithm.use_kl_in_reward=false"],
}


def build_config(algorithm: str, words: list[str]) -> Config:
    """Every option of the run, checked.

    Raises:
        ConfigError: every problem at once.
    """
    words = [f"algorithm.name={algorithm}", *COMMON, *EXTRA.get(algorithm, []), *words]
    config, not_found = load_run(None, words)
    problems = find_problems(config, int(os.environ.get("WORLD_SIZE", "1")), not_found=not_found)
    if problems:
        raise ConfigError(problems)
    return config
