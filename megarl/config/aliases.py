"""What a row of verl_names.py can say of a foreign name, and how such names are found.

    Alias      the name means an option of ours, its value converted where the meaning differs
    Foreign    the name means no option: which of its values agree with what happens here anyway, and why no other is
               possible. No values = every one is accepted with a warning (`any_value`) or refused (`no_value`)

A name that ends in `.*` stands for all names below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SAYS_NOTHING = object()
"""What a conversion returns when the value leaves the option to others."""


@dataclass(frozen=True)
class Alias:
    """A foreign name of the option `key`; `overrules` is another foreign name that gives way when this one speaks.

    `note` tells readers of docs/verl.md what `convert` does, or where the meaning is not quite the same.
    """

    name: str
    key: str
    convert: Callable[[Any], Any] | None = None
    overrules: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Foreign:
    """A name without an option of ours; `accepts` None = every value, with a warning. null is always accepted."""

    accepts: tuple[Any, ...] | None
    reason: str

    def allows(self, value: Any) -> bool:
        """Whether the value changes nothing here."""
        accepted = [str(each).lower() for each in self.accepts or ()]
        return self.accepts is None or value in (None, "", {}, []) or str(value).lower() in accepted


def always(reason: str, *accepts: Any) -> Foreign:
    """A name whose value is what happens here anyway."""
    return Foreign(accepts, reason)


def any_value(reason: str) -> Foreign:
    """A name on which no result depends here."""
    return Foreign(None, reason)


def no_value(reason: str) -> Foreign:
    """A name that means nothing here; the reason names what is nearest."""
    return Foreign((), reason)


def find_foreign(name: str, table: Mapping[str, Foreign]) -> Foreign | None:
    """The row of `name`, or of the nearest section above it that has a row ending in `.*`."""
    if name in table:
        return table[name]
    parts = name.split(".")
    sections = (".".join(parts[:length]) + ".*" for length in range(len(parts) - 1, 0, -1))
    return next((table[section] for section in sections if section in table), None)


def expand_aliases(rows: Iterable[Alias], keys: Iterable[str]) -> dict[str, Alias]:
    """The rows by name, those that end in `.*` written out for every one of our `keys` they fit."""
    rows, keys = list(rows), list(keys)
    table: dict[str, Alias] = {row.name: row for row in rows if not row.name.endswith(".*")}
    for row in rows:
        if not row.name.endswith(".*"):
            continue
        for key in keys:
            if key.startswith(row.key[:-1]):
                name = row.name[:-1] + key.removeprefix(row.key[:-1])
                table.setdefault(name, Alias(name, key))
    return table


def read_flag(value: Any) -> bool:
    """True or False from what YAML or a command line holds. Raises ValueError for anything else."""
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if str(value).lower() not in words:
        raise ValueError("true or false")
    return words[str(value).lower()]
