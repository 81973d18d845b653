"""From the names that a user wrote to our own keys; names that mean nothing become problems, with the nearest of ours.

("actor_rollout_ref.model.path", "m")              ->  Setting(key="actor.model_path", value="m")
("critic.model.use_remove_padding", True)          ->  nothing: it is always so
("critic.model.use_remove_padding", False)         ->  a problem with the reason
("data.trian_files", "x")                          ->  a problem: did you mean data.train_files?
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megarl.config.aliases import SAYS_NOTHING, Alias, Foreign, expand_aliases, find_foreign
from megarl.config.options import DICT_OPTIONS, OPTIONS, SECTIONS, list_below
from megarl.config.verl_names import FOREIGN, REWARD_FILE, REWARD_NAME, ROWS

log = logging.getLogger(__name__)

ALIASES = expand_aliases(ROWS, OPTIONS)
KNOWN_NAMES = [*OPTIONS, *ALIASES, *(name for name in FOREIGN if "*" not in name), REWARD_FILE, REWARD_NAME]


@dataclass(frozen=True)
class Setting:
    """One value as the user wrote it: under the name `name`, for our option `key`."""

    name: str
    key: str
    value: Any
    where: str


def to_own_keys(pairs: list[tuple[str, Any]], where: str, problems: list[str]) -> list[Setting]:
    """Translates the names of one layer; unknown names, and two names that contradict, become problems."""
    pairs = _join_reward_function(pairs, where, problems)
    settings: dict[str, Setting] = {}
    silenced: set[str] = set()
    for name, value in pairs:
        alias = find_alias(name)
        if alias is None:
            if _is_known(name, value, where, problems):
                _keep(settings, Setting(name, name, value, where), problems, silenced)
            continue
        if alias.convert is not None and value is not None:
            try:
                value = alias.convert(value)
            except ValueError as error:
                problems.append(f"{name}={value!r} ({where}) is not valid; use {error}")
                continue
        elif value is None and alias.key in OPTIONS and not OPTIONS[alias.key].is_optional:
            continue  # verl's null: its own default
        if value is SAYS_NOTHING:
            continue
        if alias.overrules is not None:
            silenced.add(alias.overrules)
        _keep(settings, Setting(name, alias.key, value, where), problems, silenced)
    return list(settings.values())


def find_alias(name: str) -> Alias | None:
    """The alias that `name` is, or an entry of the option that an alias names (`...reward_kwargs.method`)."""
    if name in ALIASES:
        return ALIASES[name]
    for alias in ALIASES.values():
        if alias.key in DICT_OPTIONS and name.startswith(f"{alias.name}."):
            return Alias(name, alias.key + name.removeprefix(alias.name))
    return None


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when none is like it. A dotted name may be near by its last part."""
    known = list(dict.fromkeys(known))
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if not found and "." in name:
        last = name.rsplit(".", 1)[1]
        by_last = {other.rsplit(".", 1)[-1]: other for other in reversed(known)}
        found = [by_last[near] for near in difflib.get_close_matches(last, by_last, n=1, cutoff=0.8)]
    return found[0] if found else None


def _is_known(name: str, value: Any, where: str, problems: list[str]) -> bool:
    """Whether `name` is an option of ours; says what is wrong when it is not."""
    is_entry = any(name.startswith(f"{key}.") for key in DICT_OPTIONS)
    if name in OPTIONS or is_entry or (name in SECTIONS and SECTIONS[name].is_optional and value is None):
        return True
    foreign = find_foreign(name.replace("/", "."), FOREIGN)
    if foreign is not None:
        _judge_foreign(foreign, name, value, where, problems)
    elif name in SECTIONS:
        problems.append(
            f"{name}={value!r} ({where}): {name} is a section; set the options below it: {list_below(name)}"
        )
    else:
        near = nearest_name(name, KNOWN_NAMES)
        section = next(
            (name[:i] for i in range(len(name), 0, -1) if name[:i] in SECTIONS and name[i : i + 1] == "."), ""
        )
        hint = f"did you mean {near}?" if near else f"known: {list_below(section)}"
        problems.append(f"{name} ({where}) is not an option; {hint}")
    return False


def _judge_foreign(foreign: Foreign, name: str, value: Any, where: str, problems: list[str]) -> None:
    """A name without an option: a warning where no result depends on its value, a problem where one would."""
    if foreign.accepts is None:
        log.warning("%s (%s) has no effect: %s", name, where, foreign.reason)
    elif not foreign.allows(value):
        what = "is not possible" if foreign.accepts else "has no meaning here"
        problems.append(f"{name}={value} ({where}) {what}: {foreign.reason}; leave it out")


def _keep(settings: dict[str, Setting], new: Setting, problems: list[str], silenced: set[str]) -> None:
    """Adds a setting to its layer; of two names for one option the silenced one gives way, else they must agree."""
    old = settings.get(new.key)
    if old is None or old.name == new.name or old.name in silenced:
        settings[new.key] = new
    elif new.name not in silenced and str(old.value) != str(new.value):
        problems.append(
            f"{old.name}={old.value} and {new.name}={new.value} ({new.where}) name the same option "
            f"{new.key} with different values; keep one"
        )


def _join_reward_function(pairs: list[tuple[str, Any]], where: str, problems: list[str]) -> list[tuple[str, Any]]:
    """verl's file and name of a reward function as our one `file.py:function`."""
    given = dict(pairs)
    path, name = given.get(REWARD_FILE), given.get(REWARD_NAME)
    rest = [pair for pair in pairs if pair[0] not in (REWARD_FILE, REWARD_NAME)]
    if path is not None:
        return [*rest, ("reward.function", f"{path}:{name or 'compute_score'}")]
    if name is not None and REWARD_FILE not in given:
        problems.append(f"{REWARD_NAME}={name} ({where}) needs {REWARD_FILE} beside it")
    return rest
