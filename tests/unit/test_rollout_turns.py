"""Multi-turn answers: what stands between two turns, what is masked, and what a template must not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algo.advantages import compute_gae, place_rewards
from megarl.records import Episode, Prompt, Rollout, Turn, pack_rollouts
from megarl.rollout.chat_turns import ChatTurns, check_thinking
from megarl.rollout.environment import Step, dry_run_environment, load_environment, read_step
from megarl.rollout.multi_turn import Reply, TurnLimits, _Draft

WORDS = ["<unk>", "</s>", "<user>", "<assistant>", "<tool>", "<system>", "a", "b", "c", "d", "Question", "Observation"]
PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRIPPING = (
    "{% for m in messages %}<{{ m.role }}> "
    "{% if m.role == 'assistant' and not loop.last and messages[-1].role == 'user' %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
FORGETFUL = "{{ messages[-1].content }}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")
    made.chat_template = PLAIN
    return made


def ids(text: str) -> tuple[int, ...]:
    return tuple(WORDS.index(word) for word in text.split())


def test_what_is_put_behind_an_answer_is_what_the_template_would_write(tokenizer):
    """Sampled tokens and observation together are the rendered chat, token for token."""
    chat = ChatTurns(tokenizer)
    observation = [{"role": "tool", "content": "c"}]
    whole = chat.render([
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *observation,
    ], True)  # fmt: skip
    prompt, answer = ids("<user> a </s> <assistant>"), ids("b </s>")
    assert prompt + answer + chat.encode_observation(observation, answer) == ids(whole)


def test_an_answer_that_was_not_ended_is_ended_by_the_template(tokenizer):
    chat = ChatTurns(tokenizer)
    assert chat.encode_observation([{"role": "user", "content": "c"}], ids("b")) == ids(
        "</s> <user> c </s> <assistant>"
    )


def test_an_end_of_the_observation_is_not_taken_for_the_answers(tokenizer):
    """The template ends no assistant message here; the first </s> behind the answer is the observation's own."""
    template = PLAIN.replace("{{ m.content }} </s>", "{{ m.content }}{% if m.role != 'assistant' %} </s>{% endif %}")
    chat = ChatTurns(tokenizer, template)
    assert chat.encode_observation([{"role": "user", "content": "c"}], ids("b </s>")) == ids(
        "<user> c </s> <assistant>"
    )


def test_a_template_that_strips_thinking_is_refused_for_the_roles_it_does_so_for(tokenizer):
    chat = ChatTurns(tokenizer, STRIPPING)
    assert chat.strips_thinking("user") and not chat.strips_thinking("tool")
    assert check_thinking(chat, ["tool"], allow_stripped=False) == []
    with pytest.raises(ValueError, match=r"drops the <think>.*when user speaks.*allow_stripped_thinking=true"):
        check_thinking(chat, ["tool", "user"], allow_stripped=False)
    (note,) = check_thinking(chat, ["user"], allow_stripped=True)
    assert "other contexts" in note
    assert check_thinking(ChatTurns(tokenizer), ["user", "tool"], allow_stripped=False) == []


def test_a_template_without_the_role_or_without_memory_is_refused(tokenizer):
    with pytest.raises(ValueError, match="no tools"):
        check_thinking(ChatTurns(tokenizer, STRICT), ["tool"], allow_stripped=True)
    with pytest.raises(ValueError, match="loses an earlier answer"):
        ChatTurns(tokenizer, FORGETFUL).encode_observation([{"role": "user", "content": "c"}], ids("b </s>"))


def draft() -> _Draft:
    return _Draft(Prompt(row=3, token_ids=(10, 11), text=""), prompt_index=0, sample=2, environment=None)


def turn(*token_ids: int, is_finished: bool = True) -> Rollout:
    return Rollout(0, 0, token_ids, (-0.5,) * len(token_ids), is_finished, weights_version=7)


LIMITS = TurnLimits(max_turns=3, max_tokens_per_turn=4, max_response_tokens=14)


def test_tool_tokens_are_masked_and_the_policys_are_kept_as_sampled():
    made = draft()
    made.add(turn(1, 2, 3), Reply((8, 9), reward=0.25), LIMITS)
    assert made.ask().token_ids == (10, 11, 1, 2, 3, 8, 9)
    made.add(turn(4, 5), Reply(reward=1.0, is_done=True), LIMITS)
    rollout = made.to_rollout()
    assert rollout.token_ids == (1, 2, 3, 8, 9, 4, 5)
    assert rollout.policy_mask == (True, True, True, False, False, True, True)
    assert rollout.logprobs == (-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5)
    episode = Episode((Turn(3, 0.25), Turn(7, 1.0)))
    assert rollout.episode == episode and episode.reward == 1.25
    assert (rollout.is_finished, rollout.weights_version) == (True, 7)
    batch = pack_rollouts([made.prompt], [rollout])
    assert batch.response_mask.tolist() == [False, False, *made.mask]


@pytest.mark.parametrize(
    ("turns", "is_over"),
    [
        ([(turn(1, 2, is_finished=False), Reply((8,)))], True),  # cut in the middle of a turn
        ([(turn(1, 2), Reply((8,), failure="x"))], True),
        ([(turn(1), Reply((8,)))] * 3, True),  # all turns used
        ([(turn(1), Reply((8,)))] * 2, False),
        ([(turn(1, 2, 3, 4), Reply((8,) * 7))], True),  # 4 + 7 + 4 > 14: no room for another turn
        ([(turn(1, 2, 3, 4), Reply((8,) * 6))], False),
    ],
)
def test_when_an_episode_ends(turns, is_over):
    made = draft()
    for sampled, reply in turns:
        made.add(sampled, reply, LIMITS)
    assert made.is_over == is_over
    assert not made.is_finished, "only the environment says that an episode came to its end"
    assert made.mask[-1] == is_over, "an answer that goes no further ends with a token of the policy"


def test_no_two_episodes_share_their_random_numbers():
    rows = {
        _Draft(Prompt(row=row, token_ids=(1,), text=""), 0, sample, None).ask().row
        for row in range(5) for sample in range(7)
    }  # fmt: skip
    assert len(rows) == 35


def test_gae_steps_over_what_the_environment_said():
    """Case D3 with tokens in the middle: the result is that of the answer without them."""
    prompt = Prompt(row=0, token_ids=(1,), text="")
    with_tool = Rollout(0, 0, (2, 3, 8, 9, 4), (0.0,) * 5, True, 0, policy_mask=(True, True, False, False, True))
    without = Rollout(0, 0, (2, 3, 4), (0.0,) * 3, True, 0)
    found = []
    for rollout in (with_tool, without):
        batch = pack_rollouts([prompt], [rollout])
        mask = batch.response_mask
        values = torch.full((batch.num_tokens,), torch.nan)
        values[mask] = torch.tensor([0.1, 0.2, 0.3])
        rewards = place_rewards(torch.tensor([1.0]), mask, batch.cu_seqlens)
        advantages, returns = compute_gae(rewards, values, mask, batch.cu_seqlens, 0.9, 0.8)
        found.append((advantages[mask], returns[mask]))
    torch.testing.assert_close(found[0], found[1])


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def run(body: str) -> str:
        (tmp_path / "mine.py").write_text("from megarl.rollout.environment import Step\n" + body)
        return f"{tmp_path / 'mine.py'}:World"

    return run


GOOD = """
class World:
    roles = ("tool",)
    def __init__(self, goal=1.0): self.goal = goal
    def reset(self, prompt): self.truth = prompt.ground_truth
    def step(self, answer): return Step(reward=self.goal, is_done=True)
"""


def test_an_environment_comes_from_the_file_that_is_named(write):
    build, roles = load_environment(write(GOOD), {"goal": 2.0})
    assert roles == ("tool",) and build().step("x").reward == 2.0 and build() is not build()
    dry_run_environment(build, Prompt(0, (1,), "", ground_truth="5"), "mine.py:World")


@pytest.mark.parametrize(
    ("body", "kwargs", "words"),
    [
        (GOOD, {"gaol": 1}, "gaol"),
        (GOOD.replace("World", "Word"), {}, "did you mean Word"),
        (GOOD.replace("def step", "def stop"), {}, r"without \['step'\]"),
    ],
)
def test_an_environment_that_cannot_be_used_is_told_at_once(write, body, kwargs, words):
    with pytest.raises(ValueError, match=words):
        load_environment(write(body), kwargs)


@pytest.mark.parametrize("returned", ["1.0", "Step(reward=float('nan'))", "Step('')", "Step([{'text': 'x'}])", "1 / 0"])
def test_the_dry_call_finds_a_wrong_step(write, returned):  # case H4
    build, _ = load_environment(write(GOOD.replace("Step(reward=self.goal, is_done=True)", returned)), {})
    with pytest.raises(ValueError, match="fails on row 0"):
        dry_run_environment(build, Prompt(0, (1,), "", ground_truth="5"), "mine.py:World")


def test_steps_are_read_as_text_or_as_messages():
    assert read_step(Step("more", 0.5)) == ([{"role": "user", "content": "more"}], 0.5, False)
    message = {"role": "tool", "content": "5"}
    assert read_step(Step([message])) == ([message], 0.0, False)
    assert read_step(Step("unread", 1.0, is_done=True)) == ([], 1.0, True)
