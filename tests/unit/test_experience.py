"""The experience of a step without a model: greedy answers taken out, failures joined, groups filtered and refilled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl import experience
from megarl.config.load import load_config
from megarl.drawn import Drawn
from megarl.obs.metrics import PhaseTimer
from megarl.records import Episode, Prompt, Rollout, Sampling, Turn, pack_rollouts
from megarl.reward.score import Rewards
from megarl.rollout.naive_engine import NaiveEngine

# The score of each sampled answer, by row of the data; the last entry of a row is the greedy answer's.
SCORES = {0: [1.0, 1.0, 0.5], 1: [0.0, 1.0, 0.25], 2: [0.0, 0.0, 0.0], 3: [1.0, 0.0, 1.0]}


def prompt_of(row: int) -> Prompt:
    return Prompt(row=row, token_ids=(row + 1,) * (row + 1), text="")


def build_job(*words: str) -> Any:
    """A job whose stream gives rows 0 1, then 2 3, again and again."""
    config = load_config(None, ["rollout.n=2", "data.train_batch_size=2", *words])
    batches = iter([[prompt_of(0), prompt_of(1)], [prompt_of(2), prompt_of(3)]] * 3)
    stream = SimpleNamespace(next_batch=lambda: next(batches))
    data = SimpleNamespace(stream=stream, stop_ids=(9,), cost=None)
    job = SimpleNamespace(config=config, data=data, rests=0)

    def draw(prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        assert job.rests == 0, "the engine was asked after it had given its memory back"
        return generate(prompts, sampling)

    def rest_engine() -> None:
        job.rests += 1

    job.generate, job.rest_engine = draw, rest_engine
    return job


def generate(prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
    return [
        Rollout(index, sample, (prompt.row, sample, 9), (0.0,) * 3, is_finished=True, weights_version=0)
        for index, prompt in enumerate(prompts)
        for sample in range(sampling.num_answers)
    ]


@pytest.fixture(autouse=True)
def no_model(monkeypatch) -> None:
    def judge(job: Any, prompts: list[Prompt], rollouts: list[Rollout]) -> tuple[Drawn, dict[str, Rewards]]:
        scores = [SCORES[prompts[rollout.prompt_index].row][rollout.sample] for rollout in rollouts]
        failed = [rollout.token_ids[:2] in job.config.reward.kwargs.get("failed", []) for rollout in rollouts]
        texts = [str(rollout.token_ids) for rollout in rollouts]
        return Drawn(prompts, rollouts, texts, {}, None), {
            "reward": Rewards(torch.tensor(scores), torch.tensor(failed), (), {})
        }

    judged: list[dict[str, Rewards]] = []

    def ask(job: Any, prompts: list[Prompt], rollouts: list[Rollout]) -> Drawn:
        drawn, rewards = judge(job, prompts, rollouts)
        judged.append(rewards)
        return drawn

    monkeypatch.setattr(experience, "judge_now", judge)
    monkeypatch.setattr(experience, "ask_about", ask)
    monkeypatch.setattr(experience, "join_rewards", lambda drawn, scores: judged[-1])


def collect(job: Any) -> experience.Experience:
    answers = experience.collect_answers(job, 1, PhaseTimer())
    found = answers.judge({})
    assert found.batch.tokens.equal(answers.batch.tokens), "what is annotated is what is trained on"
    return found


def test_without_greedy_or_filter_a_batch_is_what_was_drawn() -> None:
    found = collect(build_job("algorithm.adv_estimator=grpo"))
    assert found.rewards.scores.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert found.batch.group.tolist() == [0, 0, 1, 1] and found.greedy_scores is None


def test_greedy_answers_give_their_score_and_leave_the_batch() -> None:
    found = collect(build_job("algorithm.adv_estimator=remax"))
    assert found.batch.num_sequences == len(found.texts) == len(found.rollouts) == 4
    assert found.rewards.scores.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert found.greedy_scores is not None and found.greedy_scores.tolist() == [0.5, 0.5, 0.25, 0.25]


def test_a_failed_greedy_answer_fails_its_siblings() -> None:
    job = build_job("algorithm.adv_estimator=remax")
    job.config.reward.kwargs["failed"] = [(0, 2), (1, 0)]
    assert collect(job).rewards.is_failed_mask.tolist() == [True, True, True, False]


def test_flat_groups_are_replaced_until_the_batch_is_full() -> None:
    """Rows 0 and 2 are flat; 1 and 3 are kept, from two batches."""
    job = build_job("algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true")
    found = collect(job)
    assert job.rests
    assert [prompt.row for prompt in found.prompts] == [1, 3]
    assert [rollout.prompt_index for rollout in found.rollouts] == [0, 0, 1, 1]
    assert found.rewards.scores.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert found.batch.tokens[:2].tolist() == [2, 2] and found.texts[2] == "(3, 0, 9)"
    assert found.metrics == {"rollout/num_gen_batches": 2.0, "rollout/telling_group_share": 0.5}


def test_at_the_cap_a_step_goes_on_with_fewer_prompts(caplog) -> None:
    words = ("algorithm.filter_groups={enable: true, max_num_gen_batches: 1}", "algorithm.adv_estimator=grpo")
    found = collect(build_job(*words))
    assert [prompt.row for prompt in found.prompts] == [1] and found.batch.num_sequences == 2
    assert "fewer than data.train_batch_size=2" in caplog.text


def test_where_no_group_tells_anything_the_last_batch_stands(monkeypatch) -> None:
    monkeypatch.setitem(SCORES, 1, [0.0, 0.0, 0.0])
    words = ("algorithm.filter_groups={enable: true, max_num_gen_batches: 1}", "algorithm.adv_estimator=grpo")
    found = collect(build_job(*words))
    assert [prompt.row for prompt in found.prompts] == [0, 1] and found.metrics["rollout/telling_group_share"] == 0


def test_rewards_of_turns_find_their_tokens() -> None:
    """Answers of 4 tokens behind prompts of 1 and 2; turns end after 2 and after 4 tokens."""
    prompts, mask = [prompt_of(0), prompt_of(1)], (True, True, False, True)
    episode = Episode((Turn(2, 1.0), Turn(4, 0.5)))
    rollouts = [
        Rollout(index, 0, (5, 6, 7, 8), (0.0,) * 4, True, 0, policy_mask=mask, episode=episode) for index in (0, 1)
    ]
    batch = pack_rollouts(prompts, rollouts)
    found = experience.place_turn_rewards(batch, rollouts, weight=2.0)
    assert found is not None
    assert found.tolist() == [0.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 1.0]
    assert experience.place_turn_rewards(batch, rollouts, weight=0.0) is None


def test_every_batch_of_a_step_draws_with_another_seed() -> None:
    job = build_job("algorithm.adv_estimator=remax")
    first, second = (experience.training_sampling(job, 1, number) for number in (1, 2))
    assert first.seed != second.seed and first.with_greedy and first.num_answers == 3


def test_the_naive_engine_draws_a_greedy_answer_beside_the_sampled_ones() -> None:
    def next_logits(sequences: list[list[int]]) -> torch.Tensor:
        return torch.tensor([[0.0, 0.1, 0.2, 0.3]]).repeat(len(sequences), 1)

    engine = NaiveEngine(next_logits, 64)  # pyright: ignore[reportArgumentType]
    sampling = Sampling(2, 1.0, 12, (), seed=1, with_greedy=True)
    answers = engine.generate([prompt_of(0), prompt_of(1)], sampling)
    assert [(answer.prompt_index, answer.sample) for answer in answers] == [(i, s) for i in (0, 1) for s in (0, 1, 2)]
    for answer in answers:
        assert (set(answer.token_ids) == {3}) == (answer.sample == 2)
