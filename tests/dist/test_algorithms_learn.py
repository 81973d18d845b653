"""Every algorithm raises the reward of a tiny task, changed by one line of the configuration; all in one job."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny_task import write_job

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

STEPS = 6
COMMON = [
    "rollout.name=naive",
    "rollout.n=8",
    "rollout.temperature=1.0",
    "actor.optim.lr=5e-3",
    "critic.optim.lr=5e-3",
    "cost_critic.optim.lr=5e-3",
    "actor.ppo_max_token_len=2048",
    "critic.ppo_max_token_len=2048",
    "cost_critic.ppo_max_token_len=2048",
    "cost_critic.dtype=fp32",
    "ref.ppo_max_token_len=2048",
    "reward.num_workers=0",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "data.val_files=[]",
]
WITHOUT_KL = ["algorithm.use_kl_in_reward=false", "actor.use_kl_loss=false"]
USER_CODE = """
import torch
from megarl.algo.baselines import spread

def centred(x):
    kept = x.scores[~x.failed]
    return spread(x.scores - kept.mean(), x.mask, x.batch.cu_seqlens)

def plain(x):
    return -x.advantages * (x.logprobs - x.old_logprobs).exp()
"""

# What is written in the configuration, and what the run then has beside the actor.
CASES: dict[str, list[str]] = {
    "vapo": ["algorithm.name=vapo"],
    "grpo": ["algorithm.name=grpo"],
    "dr_grpo": ["algorithm.name=dr_grpo"],
    "dapo": ["algorithm.name=dapo", "algorithm.overlong_buffer_len=4", "algorithm.overlong_penalty=0.1"],
    "gspo": ["algorithm.name=gspo", "actor.ppo_mini_batch_size=4", "actor.clip_ratio_low=0.2", "actor.clip_ratio_high=0.2"],
    "cispo": ["algorithm.name=cispo", "actor.ppo_mini_batch_size=4"],
    "gmpo": ["algorithm.name=gmpo", "actor.ppo_mini_batch_size=4"],
    "rloo": ["algorithm.name=rloo", *WITHOUT_KL],
    "opo": ["algorithm.name=opo"],
    "remax": ["algorithm.name=remax", *WITHOUT_KL],
    "reinforce_plus_plus": ["algorithm.name=reinforce_plus_plus", "algorithm.kl_ctrl.kl_coef=0.01"],
    "reinforce_plus_plus_baseline": ["algorithm.name=reinforce_plus_plus_baseline"],
    "corrected": ["algorithm.name=dr_grpo", "algorithm.rollout_correction={level: token, lower: 0.5}"],
    "users": ["algorithm.advantage=USER:centred", "algorithm.loss=USER:plain"],
}  # fmt: skip


class Recorder:
    """Stands for `RunReport` and `Keeper`: keeps each step's metrics, writes nothing, saves nothing."""

    run_dir = Path("nowhere")

    def __init__(self, job: Any) -> None:
        self.rows: list[dict[str, float]] = []
        self._job = job

    def start(self) -> Any:
        from megarl.trainer.run_state import RunState

        return RunState(updates=dict.fromkeys(("actor", *self._job.critics), 0)), self._job.sync_weights(0)

    def after_step(self, *rest: Any) -> bool:
        return False

    def close(self) -> None: ...

    def warn(self, sources: Any) -> None:
        assert not sources, sources

    def step(self, step: int, epoch: int, metrics: dict[str, float], *rest: Any) -> None:
        self.rows.append(dict(metrics))

    def validated(self, *rest: Any) -> None: ...

    def dump(self, *rest: Any) -> None: ...

    def finish(self, *rest: Any) -> None: ...


def train_all(rank: int, world_size: int, cases: dict[str, list[str]]) -> dict[str, list[dict[str, float]]]:
    """The metrics of every step of every case."""
    from megarl.config.load import load_config, resolve_config
    from megarl.config.validate import find_problems
    from megarl.job import open_job
    from megarl.train import train

    rows: dict[str, list[dict[str, float]]] = {}
    for name, words in cases.items():
        config = resolve_config(load_config(None, words))
        assert find_problems(config, world_size) == [], name
        job: Any = open_job(config)
        recorder: Any = Recorder(job)
        train(job, recorder, recorder)
        rows[name] = recorder.rows
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    folder: Path = tmp_path_factory.mktemp("algorithms")
    words = write_job(folder)
    (folder / "mine.py").write_text(USER_CODE)
    cases = {
        name: [*words, *COMMON, *(word.replace("USER", str(folder / "mine.py")) for word in own)]
        for name, own in CASES.items()
    }
    return run_ranks(train_all, 1, cases, timeout_s=600)[0]


def scores(rows: list[dict[str, float]]) -> list[float]:
    return [row["critic/score/mean"] for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_the_reward_rises(runs, name: str) -> None:
    found = scores(runs[name])
    assert len(found) == STEPS
    assert found[-1] > found[0] + 0.15, [round(score, 3) for score in found]


def test_only_what_an_algorithm_needs_is_run(runs) -> None:
    for name, rows in runs.items():
        row = rows[-1]
        assert ("critic/vf_loss" in row) == (name == "vapo"), name
        assert ("critic/greedy_score/mean" in row) == (name == "remax"), name
        assert ("rollout/num_gen_batches" in row) == (name == "dapo"), name
        assert ("rollout/importance_mean" in row) == (name == "corrected"), name
        with_reference = ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        assert ("actor/reward_kl_penalty" in row) == (name in with_reference), name


def test_the_first_update_on_policy_sees_ratio_one(runs) -> None:
    """Case C5, for losses of single tokens and of whole answers; several mini-batches move the policy in between."""
    for name in ("dr_grpo", "rloo", "opo", "users"):
        assert all(abs(row["actor/ppo_kl"]) < 1e-5 for row in runs[name]), name
    for name in ("gspo", "gmpo", "cispo"):
        assert any(abs(row["actor/ppo_kl"]) > 1e-5 for row in runs[name]), name


def test_dynamic_sampling_trains_on_telling_groups_only(runs) -> None:
    for row in runs["dapo"]:
        assert row["critic/flat_group_share"] == 0 and 0 < row["rollout/telling_group_share"] <= 1


def test_the_gap_to_the_sampler_is_logged_by_every_algorithm(runs) -> None:
    for rows in runs.values():
        assert all(row["rollout/logprob_gap_max"] < 1e-3 and row["rollout/ess"] > 0.999 for row in rows)


# cost under a limit

SAFE_STEPS, LIMIT = 40, 0.2
SAFE_TASK = '''
def reward(data_source, solution_str, ground_truth, extra_info=None):
    """A word d is worth half a point, a word e a whole one."""
    words = solution_str.split()
    return (0.5 * words.count("d") + words.count("e")) / max(len(words), 1)


def cost(data_source, solution_str, ground_truth, extra_info=None):
    """But e is a word that costs."""
    words = solution_str.split()
    return words.count("e") / max(len(words), 1)
'''


@pytest.fixture(scope="module")
def safe(tmp_path_factory) -> list[dict[str, float]]:
    folder: Path = tmp_path_factory.mktemp("safe")
    words = [word for word in write_job(folder) if not word.startswith("reward.function")]
    (folder / "task.py").write_text(SAFE_TASK)
    case = [
        *words,
        *COMMON,
        f"reward.function={folder / 'task.py'}:reward",
        f"cost.function={folder / 'task.py'}:cost",
        "cost.num_workers=0",
        "algorithm.name=safe_rlhf",
        "algorithm.use_kl_in_reward=false",
        f"algorithm.lagrange={{cost_limit: {LIMIT}, init: 0.5, lr: 1.0}}",
        "actor.optim.lr=1e-3",
        "actor.entropy_coeff=0.03",
        "critic.optim.lr=1e-3",
        "cost_critic.optim.lr=1e-3",
        f"trainer.total_training_steps={SAFE_STEPS}",
        "trainer.total_epochs=8",
    ]
    return run_ranks(train_all, 1, {"safe_rlhf": case}, timeout_s=600)[0]["safe_rlhf"]


def mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def test_the_cost_goes_under_its_limit_while_the_reward_rises(safe) -> None:
    costs, late = [row["cost/mean"] for row in safe], safe[SAFE_STEPS // 2 :]
    assert max(costs) > LIMIT + 0.05, "the costly word must be tempting first"
    assert mean(late, "cost/mean") < LIMIT, costs
    assert mean(late[-10:], "cost/mean") < LIMIT, costs
    assert mean(late, "critic/score/mean") > safe[0]["critic/score/mean"] + 0.12, scores(safe)


def test_the_multiplier_follows_the_cost(safe) -> None:
    """It rises after every step over the limit and falls after every one under it."""
    moves = []
    for before, after in itertools.pairwise(safe):
        moves.append(after["lagrange/multiplier"] > before["lagrange/multiplier"])
        assert moves[-1] == (before["cost/mean"] > LIMIT), before
    assert set(moves) == {True, False}


def test_the_multiplier_rises_to_a_peak_and_falls_from_it(safe) -> None:
    multipliers = [row["lagrange/multiplier"] for row in safe]
    peak = multipliers.index(max(multipliers))
    assert multipliers[peak] > 1.2 * min(multipliers[: peak + 1]), multipliers
    assert min(multipliers[peak:]) < 0.8 * multipliers[peak], multipliers


def test_both_critics_know_what_is_coming(safe) -> None:
    for name in ("critic", "cost_critic"):
        assert safe[-1][f"{name}/grad_norm"] > 0
        values, returns = (mean(safe[-10:], f"{name}/{kind}/mean") for kind in ("values", "returns"))
        assert values == pytest.approx(returns, abs=0.1), name
