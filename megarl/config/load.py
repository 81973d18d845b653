"""From defaults, a YAML file and `key=value` words to a `Config`. The only file that knows OmegaConf.

    defaults (schema.py)  <  what algorithm.name sets  <  YAML file  <  command line
        each layer:  flatten to {dotted key: value}  ->  aliases to our keys  ->  check each value against its type

Every mistake of every layer is collected; one `ConfigError` lists them all. `${other.key}` and `${oc.env:NAME}` work
in values. A key written twice on the command line means its last value, two *names* of one option with different
values are a mistake.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.algo.algorithms import ALGORITHMS
from megarl.config import aliases
from megarl.config.choices import Choice
from megarl.config.schema import Config
from megarl.config.sources import list_costs, list_rewards, pick_engine

log = logging.getLogger(__name__)


class ConfigError(ValueError):
    """What the user must mend, all of it at once; `problems` has one line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        many = f"{len(self.problems)} problems" if len(self.problems) != 1 else "1 problem"
        super().__init__(f"configuration: {many}\n" + "\n".join(f"  - {problem}" for problem in self.problems))


@dataclass(frozen=True)
class Option:
    """One option of the schema: its type without `| None`, and whether it may be unset."""

    type: Any
    is_optional: bool


@dataclass(frozen=True)
class Setting:
    """One value as the user wrote it: under the name `name`, for our option `key`."""

    name: str
    key: str
    value: Any
    where: str


def _without_none(hint: Any) -> tuple[Any, bool]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0], len(inner) < len(typing.get_args(hint))
    return hint, False


def _read_schema(cls: Any, prefix: str = "") -> tuple[dict[str, Option], dict[str, Option]]:
    """All options and all sections below `cls`, by dotted key."""
    options: dict[str, Option] = {}
    sections: dict[str, Option] = {}
    for name, hint in typing.get_type_hints(cls).items():
        inner, is_optional = _without_none(hint)
        if dataclasses.is_dataclass(inner):
            sections[prefix + name] = Option(inner, is_optional)
            below = _read_schema(inner, f"{prefix}{name}.")
            options |= below[0]
            sections |= below[1]
        else:
            options[prefix + name] = Option(inner, is_optional)
    return options, sections


OPTIONS, SECTIONS = _read_schema(Config)
ALIASES = aliases.expand_aliases(OPTIONS)
KNOWN_NAMES = [
    *OPTIONS, *ALIASES, *aliases.FIXED, *aliases.WITHOUT_EFFECT, aliases.REWARD_FILE, aliases.REWARD_NAME,
]  # fmt: skip


def load_config(path: str | None, overrides: Sequence[str] = ()) -> Config:
    """Merges the defaults, the YAML file and the command line.

    Args:
        path: a YAML file, or None for defaults only.
        overrides: `key=value` words; keys are ours or verl's.

    Raises:
        ConfigError: every unreadable file, unknown key, wrong value and contradiction of all layers.
    """
    problems: list[str] = []
    settings: list[Setting] = []
    if path is not None:
        settings += _to_own_keys(_read_yaml(path, problems), path, problems)
    settings += _to_own_keys(_read_words(overrides, problems), "command line", problems)

    merged = OmegaConf.structured(Config)
    for setting in [*_read_algorithm(settings), *settings]:
        _assign(merged, setting, problems)
    if problems:
        raise ConfigError(problems)
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError([f"{error.full_key}: {_first_line(error)}"]) from error
    assert isinstance(config, Config)
    return config


def _read_algorithm(settings: Sequence[Setting]) -> list[Setting]:
    """What `algorithm.name` stands for, to be laid under everything that the user wrote."""
    names = [str(setting.value) for setting in settings if setting.key == "algorithm.name"]
    if not names or names[-1] not in ALGORITHMS:
        return []
    where = f"algorithm.name={names[-1]}"
    return [Setting(key, key, value, where) for key, value in ALGORITHMS[names[-1]].settings().items()]


def resolve_config(config: Config) -> Config:
    """Fills what is "unset = something else in the configuration"; applied twice it changes nothing more."""
    put = dataclasses.replace
    actor, data, trainer = config.actor, config.data, config.trainer
    actor = put(
        actor,
        tokenizer_path=_or(actor.tokenizer_path, actor.model_path),
        ppo_mini_batch_size=_or(actor.ppo_mini_batch_size, data.train_batch_size),
        clip_ratio_low=_or(actor.clip_ratio_low, actor.clip_ratio),
        clip_ratio_high=_or(actor.clip_ratio_high, actor.clip_ratio),
    )
    critic = put(
        config.critic,
        model_path=_or(config.critic.model_path, actor.model_path),
        ppo_epochs=_or(config.critic.ppo_epochs, actor.ppo_epochs),
        ppo_mini_batch_size=_or(config.critic.ppo_mini_batch_size, actor.ppo_mini_batch_size),
    )
    reward_model, cost_model = pick_engine(config.reward_model), pick_engine(config.cost_model)
    cost_critic = put(
        config.cost_critic,
        model_path=_or(config.cost_critic.model_path, actor.model_path),
        ppo_epochs=_or(config.cost_critic.ppo_epochs, actor.ppo_epochs),
        ppo_mini_batch_size=_or(config.cost_critic.ppo_mini_batch_size, actor.ppo_mini_batch_size),
    )
    shares_actor_grid = config.parallel.ref is None
    ref = put(
        config.ref,
        model_path=_or(config.ref.model_path, actor.model_path),
        uneven_stages=config.ref.uneven_stages or (shares_actor_grid and actor.uneven_stages),
    )
    folder = f"runs/{trainer.project_name}/{trainer.experiment_name}"
    return put(
        config,
        data=put(data, seed=_or(data.seed, trainer.seed)),
        actor=actor,
        critic=critic,
        cost_critic=cost_critic,
        ref=ref,
        reward=list_rewards(config, reward_model),
        reward_model=reward_model,
        cost=list_costs(config.cost, cost_model),
        cost_model=cost_model,
        trainer=put(trainer, default_local_dir=_or(trainer.default_local_dir, folder)),
        parallel=put(config.parallel, ref=_or(config.parallel.ref, config.parallel.actor)),
    )


def dump_config(config: Config) -> str:
    """The configuration as YAML that `load_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(_to_plain(dataclasses.asdict(config))))


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when none is like it. A dotted name may be near by its last part."""
    known = list(dict.fromkeys(known))
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if not found and "." in name:
        last = name.rsplit(".", 1)[1]
        by_last = {other.rsplit(".", 1)[-1]: other for other in reversed(known)}
        found = [by_last[near] for near in difflib.get_close_matches(last, by_last, n=1, cutoff=0.8)]
    return found[0] if found else None


def _or(value: Any, other: Any) -> Any:
    return other if value is None else value


def _to_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(inner) for inner in value]
    return value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _read_yaml(path: str, problems: list[str]) -> list[tuple[str, Any]]:
    """(name, value) of every option written in the file."""
    if not Path(path).is_file():
        problems.append(f"the configuration file {path} does not exist")
        return []
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        problems.append(f"{path} is not readable as YAML: {' '.join(str(error).split())}")
        return []
    if not isinstance(content, dict):
        problems.append(f"{path} must hold sections such as `data:`, not a list")
        return []
    return list(_flatten(content, ""))


def _read_words(words: Sequence[str], problems: list[str]) -> list[tuple[str, Any]]:
    """(name, value) of every `key=value` word; the last value of a name counts. A leading + is dropped."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip().lstrip("+")
        if not equals or not name:
            problems.append(f"{word!r} on the command line is not of the form key=value")
            continue
        value = _parse_text(name, text)
        pairs = _flatten(value, name) if isinstance(value, dict) else [(name, value)]
        for inner_name, inner in pairs:
            found.pop(inner_name, None)
            found[inner_name] = inner
    return list(found.items())


def _parse_text(name: str, text: str) -> Any:
    """The value of `text`: as it is for options that hold text, read as YAML for the others."""
    key = ALIASES[name].key if name in ALIASES else name
    text = text.strip()
    if key in OPTIONS and OPTIONS[key].type is str:
        if text in ("", "null", "~"):
            return None
        is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if is_quoted else text
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        return parsed["value"]
    except (OmegaConfBaseException, yaml.YAMLError):
        return text


def _flatten(value: Any, name: str) -> Iterable[tuple[str, Any]]:
    """(dotted name, value) of every option below `name`; the dictionary of an option that holds one stays whole."""
    key = ALIASES[name].key if name in ALIASES else name
    if key in OPTIONS or not isinstance(value, dict) or (not value and key not in ("", *SECTIONS)):
        is_empty_section = value is None and (key in SECTIONS and not SECTIONS[key].is_optional)
        if not is_empty_section:
            yield name, value
        return
    for inner_name, inner in value.items():
        yield from _flatten(inner, f"{name}.{inner_name}" if name else str(inner_name))


def _to_own_keys(pairs: list[tuple[str, Any]], where: str, problems: list[str]) -> list[Setting]:
    """Translates the names of one layer; unknown names, and two names that contradict, become problems."""
    pairs = _join_reward_function(pairs, where, problems)
    settings: dict[str, Setting] = {}
    silenced: set[str] = set()
    for name, value in pairs:
        alias = ALIASES.get(name)
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
        if value is aliases.SAYS_NOTHING:
            continue
        if alias.overrules is not None:
            silenced.add(alias.overrules)
        _keep(settings, Setting(name, alias.key, value, where), problems, silenced)
    return list(settings.values())


def _is_known(name: str, value: Any, where: str, problems: list[str]) -> bool:
    """Whether `name` is an option of ours; says what is wrong when it is not."""
    is_entry = any(name.startswith(f"{key}.") and OPTIONS[key].type == dict[str, Any] for key in OPTIONS)
    if name in OPTIONS or is_entry or (name in SECTIONS and SECTIONS[name].is_optional and value is None):
        return True
    if name in aliases.WITHOUT_EFFECT:
        log.warning("%s (%s) has no effect: %s", name, where, aliases.WITHOUT_EFFECT[name])
    elif name in aliases.FIXED:
        accepted, reason = aliases.FIXED[name]
        if str(value).lower() not in (str(accepted).lower(), "none"):
            problems.append(f"{name}={value} ({where}) is not possible: {reason}; leave it out")
    elif name in SECTIONS:
        problems.append(f"{name}={value!r} ({where}): {name} is a section; set the options below it: {_below(name)}")
    else:
        near = nearest_name(name, KNOWN_NAMES)
        section = next(
            (name[:i] for i in range(len(name), 0, -1) if name[:i] in SECTIONS and name[i : i + 1] == "."), ""
        )
        hint = f"did you mean {near}?" if near else f"known: {_below(section)}"
        problems.append(f"{name} ({where}) is not an option; {hint}")
    return False


def _below(section: str) -> str:
    prefix = f"{section}." if section else ""
    return ", ".join(dict.fromkeys(key.removeprefix(prefix).split(".")[0] for key in OPTIONS if key.startswith(prefix)))


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
    path, name = given.get(aliases.REWARD_FILE), given.get(aliases.REWARD_NAME)
    rest = [pair for pair in pairs if pair[0] not in (aliases.REWARD_FILE, aliases.REWARD_NAME)]
    if path is not None:
        return [*rest, ("reward.function", f"{path}:{name or 'compute_score'}")]
    if name is not None and aliases.REWARD_FILE not in given:
        problems.append(f"{aliases.REWARD_NAME}={name} ({where}) needs {aliases.REWARD_FILE} beside it")
    return rest


def _assign(merged: Any, setting: Setting, problems: list[str]) -> None:
    """Writes one setting into the merged configuration, or says why its value is refused."""
    option = OPTIONS.get(setting.key)
    parent = setting.key.rsplit(".", 1)[0]
    if option is not None and _entry_type(option) is not None:
        setting = dataclasses.replace(setting, value=_check_entries(setting, option, problems))
    try:
        value = setting.value if option is None else _to_type(setting.value, option)
        if parent in SECTIONS and OmegaConf.select(merged, parent) is None:
            OmegaConf.update(merged, parent, OmegaConf.structured(SECTIONS[parent].type))
        OmegaConf.update(merged, setting.key, value, merge=False)
    except (OmegaConfBaseException, ValueError, TypeError):
        shown = "null" if setting.value is None else repr(setting.value)
        name = setting.name if setting.name == setting.key else f"{setting.name} ({setting.key})"
        allowed = _describe(option) if option else "an option of this section"
        problems.append(f"{name}={shown} ({setting.where}) is not valid; use {allowed}")


def _entry_type(option: Option) -> Any:
    """The dataclass of the entries of an option that is a list of sections; else None."""
    inner = typing.get_args(option.type)[:1]
    return inner[0] if typing.get_origin(option.type) is list and dataclasses.is_dataclass(inner[0]) else None


def _check_entries(setting: Setting, option: Option, problems: list[str]) -> Any:
    """The entries of a list of sections, each value converted; what is wrong in one is told by its place."""
    if not isinstance(setting.value, list):
        return setting.value
    known, _ = _read_schema(_entry_type(option))
    entries: list[Any] = []
    for number, entry in enumerate(setting.value):
        where = f"{setting.name}[{number}]"
        if not isinstance(entry, dict):
            problems.append(f"{where}={entry!r} ({setting.where}) must be a section of names and values")
            continue
        entries.append(OmegaConf.structured(_entry_type(option)))
        for name, value in entry.items():
            if name not in known:
                near = nearest_name(str(name), known)
                hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
                problems.append(f"{where}.{name} ({setting.where}) is not an option; {hint}")
                continue
            try:
                OmegaConf.update(entries[-1], name, _to_type(value, known[name]), merge=False)
            except (OmegaConfBaseException, ValueError, TypeError):
                problems.append(
                    f"{where}.{name}={value!r} ({setting.where}) is not valid; use {_describe(known[name])}"
                )
    return entries


def _to_type(value: Any, option: Option) -> Any:
    """What OmegaConf's own conversion does not know: choices by value, lists as text, strict booleans."""
    if value is None or (isinstance(value, str) and "${" in value):
        return value
    if isinstance(option.type, type) and issubclass(option.type, Choice):
        return aliases.SYNONYMS.get(option.type, {}).get(str(value)) or option.type(str(value))
    if option.type is bool:
        return aliases.read_flag(value)
    if option.type is str and not isinstance(value, str | int | float):
        raise ValueError(value)
    if typing.get_origin(option.type) is list and isinstance(value, str | int):
        return [part.strip() for part in str(value).split(",") if part.strip()]
    return value


def _describe(option: Option) -> str:
    """What an option accepts, in words."""
    kind = option.type
    if isinstance(kind, type) and issubclass(kind, Choice):
        text = "one of " + ", ".join(member.value for member in kind)
    elif typing.get_origin(kind) is list:
        if dataclasses.is_dataclass(typing.get_args(kind)[0]):
            return "a list of sections such as [{name: a, weight: 1}]"
        item = "whole numbers" if typing.get_args(kind)[0] is int else "text"
        text = f"a list of {item} such as {'[0,1]' if item == 'whole numbers' else '[a,b]'}"
    elif typing.get_origin(kind) is tuple:
        text = f"a list of {len(typing.get_args(kind))} numbers"
    elif kind == dict[str, Any]:
        text = "a section of names and values"
    else:
        text = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    return f"{text}, or null" if option.is_optional else text
