"""The tokenizer of a model folder: loading it, which ids end an answer, and whether it fits the embedding table."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase

SENTENCEPIECE = "tokenizer.model"
PROBES = ("Hello world, how are you?", "1 + 23 = 24", "a  b", "naïve 🙂")


def load_tokenizer(path: str, option: str = "actor.tokenizer_path") -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a local folder; the network is never asked.

    Args:
        option: what named the folder, for messages.

    Raises:
        ValueError: no such folder, or nothing in it that transformers can read as a tokenizer.
    """
    if not os.path.isdir(path):
        raise ValueError(f"{option}={path} is not a folder; download the tokenizer and name its folder")
    names_class = "tokenizer_class" in _read_json(Path(path) / "tokenizer_config.json")
    is_sentencepiece = (Path(path) / SENTENCEPIECE).is_file() and not (Path(path) / "tokenizer.json").is_file()
    try:
        # Nothing says what the model in the file is for: transformers would lose its marks of word beginnings.
        kind = LlamaTokenizer if is_sentencepiece and not names_class else AutoTokenizer
        tokenizer = kind.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{option}={path} holds no tokenizer that can be read: {error}") from error
    if is_sentencepiece:
        _check_sentencepiece(tokenizer, Path(path) / SENTENCEPIECE, option)
    return tokenizer


def _check_sentencepiece(tokenizer: PreTrainedTokenizerBase, file: Path, option: str) -> None:
    """Raises ValueError where transformers makes other ids of `tokenizer.model` than sentencepiece does."""
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_file=str(file))
    for text in PROBES:
        got, wanted = tokenizer.encode(text, add_special_tokens=False), original.encode(text)
        if got != wanted:
            raise ValueError(
                f"{option}={file.parent}: {type(tokenizer).__name__} makes {got[:8]} of {text!r}, but tokenizer.model "
                f"means {wanted[:8]}; name the right tokenizer_class in tokenizer_config.json, or add a tokenizer.json"
            )


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def load_chat_template(option: str | None) -> str | None:
    """The text of `data.chat_template`: a Jinja template, or the path of a file with one."""
    if option is None or "{" in option:
        return option
    if not os.path.isfile(option):
        raise ValueError(f"data.chat_template={option} is neither a Jinja template nor a file; name an existing file")
    return Path(option).read_text(encoding="utf-8")


def count_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows of an embedding table that the tokenizer can reach: its highest id + 1."""
    return max(tokenizer.get_vocab().values()) + 1


def check_tokenizer_fits(tokenizer_size: int, table_rows: int) -> None:
    """Refuses a tokenizer with ids beyond the model's embedding table; a table with rows to spare is fine.

    Args:
        tokenizer_size: highest id + 1, see `count_token_ids`.
        table_rows: rows of the embedding table, `vocab_size` in config.json.
    """
    if tokenizer_size > table_rows:
        raise ValueError(
            f"the tokenizer has {tokenizer_size} ids, {tokenizer_size - table_rows} beyond the {table_rows} rows of "
            f"the model's embedding table; use the model's own tokenizer (actor.tokenizer_path), or a model with a "
            f"larger table"
        )


def stop_token_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All ids that end an answer: those of generation_config.json, config.json and the tokenizer together, sorted.

    Raises:
        ValueError: none is named anywhere; answers would never end.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if file.is_file():
            ids |= _as_ids(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id"))
    ids |= _as_ids(tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            f"{model_path}: neither generation_config.json, config.json nor the tokenizer names an eos token; "
            f"set eos_token_id in generation_config.json"
        )
    return tuple(sorted(ids))


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(one) for one in value} if isinstance(value, list | tuple) else {int(value)}
