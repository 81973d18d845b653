"""The few numbers of a model that a configuration is checked against, read from the `config.json` of its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelFacts:
    """`family` is the model_type of config.json; `vocab_size` the rows of the embedding table."""

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int


def read_model_facts(path: str) -> ModelFacts:
    """Reads the facts of the Hugging Face folder `path`.

    Raises:
        ValueError: no such folder, no readable `config.json`, a family that megarl does not know, a missing entry.
            The message leaves the name of the option to the caller.
    """
    if not Path(path).is_dir():
        raise ValueError("no such folder; models are read from local folders, download it first")
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError("the folder has no config.json; it must be a Hugging Face model folder")
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config.json is not readable: {error}") from error
    family = entries.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"model_type={family!r} in config.json is not a family that megarl knows: {', '.join(FAMILIES)}"
        )
    hidden, heads = _entry(entries, "hidden_size"), _entry(entries, "num_attention_heads")
    head_dim = entries.get("head_dim")
    return ModelFacts(
        family=family,
        num_layers=_entry(entries, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if entries.get("num_key_value_heads") is None else _entry(entries, "num_key_value_heads"),
        head_dim=hidden // heads if head_dim is None else _entry(entries, "head_dim"),
        hidden_size=hidden,
        vocab_size=_entry(entries, "vocab_size"),
        max_position_embeddings=_entry(entries, "max_position_embeddings"),
    )


def _entry(entries: dict[str, Any], name: str) -> int:
    value = entries.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} in config.json must be a whole number of 1 or more")
    return value
