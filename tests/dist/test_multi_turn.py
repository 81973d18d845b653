"""Answers of several turns on several ranks: with a scripted engine, and as a whole job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.topology import Topology
from megarl.records import Prompt, Rollout, Sampling
from megarl.rollout.chat_turns import ChatTurns
from megarl.rollout.environment import Step
from megarl.rollout.multi_turn import MAX_SAMPLES, TurnLimits, generate_episodes
from tests.ranks import run_ranks
from tests.tiny_task import WORDS, read_metrics, run_megarl, write_job

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% else %}<u>{% endif %} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
END = WORDS.index("</s>")


class Tokenizer:
    """Words to positions and back, with a template: enough for `ChatTurns`."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [WORDS.index(word) for word in text.split()]}

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(WORDS[i] for i in ids)

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(WORDS[i] for i in ids if i > 4) for ids in rows]

    def apply_chat_template(self, messages: list[dict[str, str]], *, chat_template: str, **options: bool) -> str:
        from jinja2 import Template

        return Template(chat_template).render(messages=messages, **options)


class Echo:
    """Answers with the last word of its context but two (what the environment said), then ends."""

    def __init__(self) -> None:
        self.asked: list[Prompt] = []
        self.temperatures: list[float] = []

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        assert sampling.num_answers == 1 and sampling.max_tokens == 4
        self.asked += prompts
        self.temperatures += [sampling.temperature] * len(prompts)
        return [
            Rollout(i, 0, (prompt.token_ids[-3], END), (-0.25, -0.5), is_finished=True, weights_version=3)
            for i, prompt in enumerate(prompts)
        ]

    def open_weights(self) -> dict[str, Tensor]: ...
    def share_weights(self, trained: Mapping[str, Tensor]) -> int: ...
    def publish_weights(self, version: int) -> None: ...
    def checksums(self) -> dict[str, int]: ...
    def discard_weights(self) -> None: ...
    def close(self) -> None: ...


class Countdown:
    """Says d, c, b, a ... from the prompt's number on, and is done at a; raises for row 3."""

    def reset(self, prompt: Prompt) -> None:
        self.row, self.left = prompt.row, prompt.row

    def step(self, answer: str) -> Step:
        assert dist.get_rank() == 0, "environments live on rank 0"
        if self.row == 3 and self.left == 2:
            raise RuntimeError("the tool is broken")
        self.left -= 1
        return Step(reward=1.0, is_done=True) if self.left < 0 else Step("abcd"[self.left], reward=0.5)


def play(rank: int, world_size: int) -> tuple[list[Rollout], list[Prompt], list[float]]:
    engine = Echo()
    asked = tuple(map(WORDS.index, ("<u>", "s", "</s>", "<a>")))
    prompts = [Prompt(row=row, token_ids=asked, text="") for row in range(4)]
    rollouts = generate_episodes(
        engine,
        Topology((0, 1), dp_size=2),
        prompts,
        Sampling(n=2, temperature=1.0, max_tokens=99, stop_token_ids=(END,), seed=5, with_greedy=True),
        ChatTurns(Tokenizer(), TEMPLATE),
        Countdown,
        TurnLimits(max_turns=8, max_tokens_per_turn=4, max_response_tokens=40),
    )
    return rollouts, engine.asked, engine.temperatures


@pytest.fixture(scope="module")
def played() -> list[tuple[list[Rollout], list[Prompt], list[float]]]:
    """On each of two ranks, two sampled episodes and a greedy one for each of four prompts."""
    return run_ranks(play, 2, timeout_s=120)


def words(rollout: Rollout) -> str:
    return " ".join(WORDS[i] for i in rollout.token_ids)


def test_turns_and_observations_alternate(played) -> None:
    rollouts = played[0][0]
    named = [(rollout.prompt_index, rollout.sample) for rollout in rollouts]
    assert named == [(i, n) for i in range(4) for n in range(3)]
    assert words(rollouts[0]) == "s </s>"
    assert words(rollouts[3]) == "s </s> <u> a </s> <a> a </s>"
    assert words(rollouts[6]) == "s </s> <u> b </s> <a> b </s> <u> a </s> <a> a </s>"
    mask = rollouts[6].policy_mask
    assert mask is not None and [WORDS[i] for i, own in zip(rollouts[6].token_ids, mask, strict=True) if own] == (
        "s </s> b </s> a </s>".split()
    )
    assert all((logprob == 0.0) != own for logprob, own in zip(rollouts[6].logprobs, mask, strict=True))
    episodes = [rollout.episode for rollout in rollouts[:9:3]]
    assert [episode.reward for episode in episodes if episode is not None] == [1.0, 1.5, 2.0]
    assert all(rollouts[i].is_finished and rollouts[i].weights_version == 3 for i in range(9))


def test_an_environment_that_raises_costs_its_own_episode(played) -> None:
    for rollout in played[0][0][9:]:
        assert rollout.episode is not None and rollout.episode.failure == "turn 2: RuntimeError: the tool is broken"
        assert words(rollout) == "s </s> <u> c </s> <a> c </s>"
        assert not rollout.is_finished


def test_every_rank_has_the_same_answers_and_each_engine_a_part_of_the_work(played) -> None:
    assert played[0][0] == played[1][0]
    first, second = (len(asked) for _, asked, _ in played)
    assert first and second and first + second == 3 * (1 + 2 + 3 + 2)


def test_a_greedy_answer_is_greedy_in_every_turn(played) -> None:
    by_sample: dict[int, set[float]] = {}
    for _, asked, temperatures in played:
        for prompt, temperature in zip(asked, temperatures, strict=True):
            by_sample.setdefault(prompt.row % MAX_SAMPLES, set()).add(temperature)
    assert by_sample == {0: {1.0}, 1: {1.0}, 2: {0.0}}


def test_no_two_requests_of_a_turn_share_their_seed(played) -> None:
    rows = [prompt.row for _, asked, _ in played for prompt in asked if len(prompt.token_ids) == 4]
    assert len(set(rows)) == len(rows) == 12


ENVIRONMENT = """
from megarl.rollout.environment import Step

class Repeat:
    '''The policy should say d, twice; the second turn counts double.'''

    def reset(self, prompt):
        self.turn = 0

    def step(self, answer):
        self.turn += 1
        words = answer.split()
        share = words.count("d") / max(len(words), 1)
        return Step("a b", share) if self.turn == 1 else Step(reward=2 * share, is_done=True)
"""


def test_a_job_of_two_turns_learns_from_both(tmp_path: Path) -> None:
    given = [word for word in write_job(tmp_path) if not word.startswith(("reward.function", "data.max_response"))]
    (tmp_path / "world.py").write_text(ENVIRONMENT)
    done = run_megarl([
        *given,
        f"rollout.multi_turn.environment={tmp_path / 'world.py'}:Repeat",
        "rollout.multi_turn.max_tokens_per_turn=4",
        "data.max_response_length=16",
        f"data.chat_template={TEMPLATE}",
        "trainer.n_gpus_per_node=2",
        "parallel.actor={tp: 1, pp: 2}",
        "rollout.name=naive",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=8",
        "rollout.n=8",
        "actor.optim.lr=5e-3",
    ])  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path)
    assert rows[-1]["critic/score/mean"] > rows[1]["critic/score/mean"] + 0.3
    assert rows[-1]["rollout/logprob_gap_max"] < 1e-4, "the trainer must see the contexts that the engine saw"
    lines = (tmp_path / "run" / "rollouts" / "step_000008.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    told = [WORDS.index(word) for word in ("<u>", "a", "b", "</s>", "<a>")]
    two = [answer for answer in answers if len(answer["token_ids"]) > 4]
    assert two, "no episode came to its second turn"
    for answer in two:
        at = next(i for i in range(len(answer["token_ids"])) if answer["token_ids"][i : i + 5] == told)
        assert answer["rollout_logprobs"][at : at + 5] == [0.0] * 5
        assert answer["advantages"][at : at + 5] == [0.0] * 5


def test_an_environment_that_cannot_be_used_is_told_before_any_model(tmp_path: Path) -> None:  # case H4
    given = [word for word in write_job(tmp_path) if not word.startswith("reward.function")]
    (tmp_path / "world.py").write_text(ENVIRONMENT.replace("return Step(", "return max("))
    option = f"rollout.multi_turn.environment={tmp_path / 'world.py'}:Repeat"
    done = run_megarl([*given, option, "rollout.name=naive", "trainer.n_gpus_per_node=2"], 120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "world.py" in done.stderr and "Traceback" not in done.stderr
    assert "built in" not in done.stderr + done.stdout
