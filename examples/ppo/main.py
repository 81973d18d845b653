"""PPO with the main loop in your hands; one process, or the ranks of torchrun. See README.md.

python examples/ppo/main.py key=value ...
"""

from __future__ import annotations

import sys
import time

from config import build_config
from data import PromptData
from model import build_models
from utils import as_rank, print_step

from megarl.job import open_job

ALGORITHM = "ppo"  # "remax": a greedy answer is the baseline, no critic; "safe_rlhf": a cost, held under a limit


def main() -> None:
    job = open_job(build_config(ALGORITHM, sys.argv[1:]))
    data = PromptData(job)
    data.debug_sample()
    actor, critic, reward_model = build_models(job)
    for step in range(1, job.total_steps + 1):
        started = time.perf_counter()
        prompts = data.next_batch()
        sequences = actor.generate_sequences(prompts)
        rewards = reward_model.get_rewards(sequences)
        advantages = critic.compute_advantages(sequences, rewards)
        metrics = actor.update_policy(sequences, advantages)
        print_step(step, metrics, time.perf_counter() - started)


if __name__ == "__main__":
    as_rank(main)
