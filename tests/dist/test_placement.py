"""Every role on a grid of its own, over eight ranks, is the same run as every role on one rank, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import save_reward_model
from tests.tiny_task import WORDS, read_metrics, run_megarl, write_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # ranks share the cores with whatever else runs here

PLACEMENT = [
    "trainer.n_gpus_per_node=8",
    "parallel.actor={tp: 2, pp: 2, dp: 2}",
    "parallel.critic={tp: 1, pp: 1, dp: 2}",
    "parallel.reward_model={tp: 1, pp: 1, dp: 1}",
]
COMPARED = (
    "critic/score/mean critic/rewards/mean critic/values/mean critic/advantages/max critic/vf_loss critic/grad_norm "
    "actor/pg_loss actor/entropy actor/grad_norm actor/ppo_kl response_length/mean "
    "reward/share_of_d/score reward/reward_model/score"
).split()
STEPS = 2


def run(folder: Path, *words: str) -> list[dict[str, float]]:
    folder.mkdir()
    given = [word for word in write_job(folder) if not word.startswith("reward.function")]
    reward_model = save_reward_model(folder / "rm", "llama", num_hidden_layers=2, vocab_size=len(WORDS) + 8)
    done = run_megarl([
        *given,
        f"reward.sources=[{{function: '{folder / 'reward.py'}:share_of_d'}}, {{model: reward_model, weight: 0.1}}]",
        f"reward_model.model_path={reward_model}",
        "reward_model.dtype=fp32",
        "rollout.name=naive",
        "rollout.n=2",
        "actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        "actor.ppo_mini_batch_size=4",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "data.val_max_samples=1",
        "rollout.val.n=0",
        *words,
    ], 400)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [row for row in read_metrics(folder) if row["step"] > 0]


def test_eight_ranks_equal_one_step_by_step(tmp_path) -> None:
    alone = run(tmp_path / "one")
    spread = run(tmp_path / "eight", *PLACEMENT)
    assert len(alone) == len(spread) == STEPS
    for one, many in zip(alone, spread, strict=True):
        for name in COMPARED:
            assert many[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), f"step {one['step']}: {name}"
