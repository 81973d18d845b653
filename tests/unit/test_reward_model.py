"""A transformers reward model: each answer's score is what the model gives it alone, read at its last token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.records import Prompt, Rollout
from megarl.reward.model import TransformersRewardModel
from megarl.reward.score import dry_run
from megarl.reward.verdict import Answer
from tests.tiny import save_hf_model, save_reward_model

WORDS = ["<unk>", "</s>", "<user>", "<assistant>", *"abcdefgh"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} </s> {% endfor %}"


def add_tokenizer(folder: str, template: str | None) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
    made.chat_template = template
    made.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model whose pad token is its end token: padding could hide the last token (case D6)."""
    path = save_reward_model(tmp_path_factory.mktemp("rm"), "llama", num_hidden_layers=2, pad_token_id=1)
    add_tokenizer(path, TEMPLATE)
    return path


def open_model(folder: str, max_tokens: int = 64) -> TransformersRewardModel:
    return TransformersRewardModel(folder, on_cpu=True, dtype=torch.float32, max_tokens=max_tokens)


def answers(*texts: str, messages: bool = True) -> list[Answer]:
    chat = ({"role": "user", "content": "a b"},) if messages else ()
    prompt = Prompt(row=0, token_ids=(1,), text="c ", ground_truth="a", messages=chat)
    return [Answer(prompt, Rollout(0, i, (), (), True, 0), text) for i, text in enumerate(texts)]


def score_alone(folder: str, text: str) -> float:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        return float(model.score(hidden[0, -1]))


def test_each_answer_scores_as_alone_and_ends_where_it_ends(folder):
    texts = ["d", "e", "a b c d", "f", "g h", "e"]
    verdicts = open_model(folder, max_tokens=16).score(answers(*texts), 0)
    for text, verdict in zip(texts, verdicts, strict=True):
        expected = score_alone(folder, f"<user> a b </s> <assistant> {text} </s>")
        assert verdict.score == pytest.approx(expected, abs=1e-5)
    assert len({round(verdict.score, 5) for verdict in verdicts}) == 5, "only the two equal answers score the same"


def test_plain_text_prompts_are_read_before_the_answer(folder):
    (verdict,) = open_model(folder).score(answers("d", messages=False), 0)
    assert verdict.score == pytest.approx(score_alone(folder, "c d"), abs=1e-5)


def test_an_answer_that_is_too_long_fails_and_the_others_do_not(folder):
    verdicts = open_model(folder, max_tokens=8).score(answers("a", "a b c d e f", "b"), 3)
    assert [verdict.failure is None for verdict in verdicts] == [True, False, True]
    assert "more than 8" in str(verdicts[1].failure)


def test_a_model_that_scores_nan_has_failed(tmp_path):
    from safetensors.torch import load_file, save_file

    path = save_reward_model(tmp_path, "llama", num_hidden_layers=1)
    add_tokenizer(path, TEMPLATE)
    tensors = load_file(Path(path) / "model.safetensors")
    tensors["score.weight"].fill_(torch.nan)
    save_file(tensors, Path(path) / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not finite"):  # case H4
        dry_run(open_model(path), answers("a")[0].prompt, "reward.sources[0].model")


def test_a_policy_is_no_reward_model(tmp_path):
    path = save_hf_model(tmp_path, "llama", num_hidden_layers=1)
    add_tokenizer(path, None)
    with pytest.raises(ValueError, match=r"no weights for score\.weight"):
        open_model(path)


def test_two_labels_are_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from tests.tiny import SHAPE

    labels = {0: "bad", 1: "good"}
    LlamaForSequenceClassification(LlamaConfig(**SHAPE, id2label=labels)).save_pretrained(tmp_path)
    add_tokenizer(str(tmp_path), None)
    with pytest.raises(ValueError, match="one"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("missing", ["nowhere", "."])
def test_a_folder_without_model_is_refused(tmp_path, missing):
    with pytest.raises(ValueError, match=r"config\.json"):
        open_model(str(tmp_path / missing))
