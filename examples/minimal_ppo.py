"""PPO from nothing but a model folder: prompts and a reward of your own, one process, before and after.

    make quickstart                                     # once: makes the model
    .venv/bin/python examples/minimal_ppo.py            # 10 steps, minutes on two cores
    .venv/bin/python examples/minimal_ppo.py --model models/Qwen2.5-0.5B-Instruct --steps 50

The policy learns to answer with the bare sum: right is 1, and each word beside the number costs a twentieth.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from typing import Any

from megarl import PPOConfig, PPOTrainer


def build_rows(count: int, seed: int) -> list[dict[str, str]]:
    """`count` questions with their answers."""
    dice = random.Random(seed)
    pairs = [(dice.randint(1, 9), dice.randint(1, 9)) for _ in range(count)]
    return [{"prompt": f"{a} + {b} =", "ground_truth": str(a + b)} for a, b in pairs]


def bare_sum(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """The reward of an answer; what stands beside `score` is averaged and logged."""
    words = solution_str.replace(".", " ").split()
    is_right = bool(words) and words[-1] == ground_truth
    others = sum(1 for word in words if not word.isdigit())
    return {"score": max(0.0, float(is_right) - 0.05 * others), "accuracy": float(is_right)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=".cache/quickstart/model", help="a Hugging Face folder")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=12, help="prompts a step; 8 answers each")
    parser.add_argument("--out", default="runs/minimal_ppo")
    options = parser.parse_args()
    asked = [row["prompt"] for row in build_rows(3, seed=3)]
    trainer = PPOTrainer(
        PPOConfig(
            actor_model_name=options.model,
            prompts=build_rows(1000, seed=1),
            val_prompts=build_rows(50, seed=2),
            max_steps=options.steps,
            rollout_batch_size=options.prompts,
            num_answers=8,
            max_prompt_length=128,
            max_response_length=20,
            learning_rate=5e-5,
            critic_learning_rate=1e-4,
            output_dir=options.out,
            options={"actor.optim.lr_warmup_steps": 2, "trainer.resume_mode": "disable"},
        )
    )
    trainer.set_reward_model(bare_sum)
    before = trainer.generate(asked)
    result = trainer.train()
    for question, first, last in zip(asked, before, trainer.generate(asked), strict=True):
        print(f"{question} | before: {first!r} | after: {last!r}")
    trainer.save(f"{options.out}/model")
    print(f"{len(result.metrics)} rows in {result.run_dir}/metrics.jsonl, the model in {options.out}/model")


if __name__ == "__main__":
    main()
