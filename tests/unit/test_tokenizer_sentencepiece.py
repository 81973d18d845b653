"""Folders with a sentencepiece `tokenizer.model`, as Llama 2 has: the ids are transformers' and sentencepiece's own.

One difference is transformers': a text that begins with a space gets no further one in front.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece

from megarl.rollout.tokenizer import count_token_ids, load_tokenizer, stop_token_ids

TEXTS = [
    "Hello world", "two  spaces, and a tab\there", " leading and trailing ", "7 + 5 = 12", "über 🙂 naïve",
    "line\nbreak", "", "abc" * 20,
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> bytes:
    """A byte-pair model with byte fallback and Llama's special ids, trained on a few lines."""
    out = io.BytesIO()
    lines = ["Hello world of tokens", "two and three are five", "a b c abc bca cab", "12 + 7 = 19"] * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, vocab_size=330, model_type="bpe", byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, add_dummy_prefix=True, remove_extra_whitespaces=False,
        split_digits=True, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    return out.getvalue()


def write_folder(folder: Path, model: bytes, has_config: bool) -> str:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 330, "eos_token_id": 2}))
    if has_config:
        settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
                    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize("has_config", [True, False])
def test_ids_are_sentencepieces_and_transformers(tmp_path, model: bytes, has_config: bool) -> None:
    from transformers import LlamaTokenizer

    path = write_folder(tmp_path / "model", model, has_config)
    ours, theirs = load_tokenizer(path), LlamaTokenizer.from_pretrained(path)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        if not text.startswith(" "):
            assert ours.encode(text, add_special_tokens=False) == oracle.encode(text), text
    assert count_token_ids(ours) == oracle.vocab_size() == 330
    assert stop_token_ids(path, ours) == (2,)


def test_round_trip_of_text(tmp_path, model: bytes) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path / "model", model, True))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text.removeprefix(" ")


def test_a_class_that_makes_other_ids_is_refused(tmp_path, model: bytes) -> None:
    path = Path(write_folder(tmp_path / "model", model, True))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "GemmaTokenizer"}))
    with pytest.raises(ValueError, match="but tokenizer\\.model means"):
        load_tokenizer(str(path))
