"""The options of the schema by their dotted names: `actor.optim.lr` -> its type, and whether it may be unset."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from megarl.config.schema import Config


@dataclass(frozen=True)
class Option:
    """One option of the schema: its type without `| None`, and whether it may be unset."""

    type: Any
    is_optional: bool


def _without_none(hint: Any) -> tuple[Any, bool]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0], len(inner) < len(typing.get_args(hint))
    return hint, False


def read_schema(cls: Any, prefix: str = "") -> tuple[dict[str, Option], dict[str, Option]]:
    """All options and all sections below `cls`, by dotted key."""
    options: dict[str, Option] = {}
    sections: dict[str, Option] = {}
    for name, hint in typing.get_type_hints(cls).items():
        inner, is_optional = _without_none(hint)
        if dataclasses.is_dataclass(inner):
            sections[prefix + name] = Option(inner, is_optional)
            below = read_schema(inner, f"{prefix}{name}.")
            options |= below[0]
            sections |= below[1]
        else:
            options[prefix + name] = Option(inner, is_optional)
    return options, sections


OPTIONS, SECTIONS = read_schema(Config)
DICT_OPTIONS = tuple(key for key, option in OPTIONS.items() if option.type == dict[str, Any])


def list_below(section: str) -> str:
    """What a section holds, in words; "" is the whole configuration."""
    prefix = f"{section}." if section else ""
    return ", ".join(dict.fromkeys(key.removeprefix(prefix).split(".")[0] for key in OPTIONS if key.startswith(prefix)))
