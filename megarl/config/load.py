"""From defaults, a YAML file and `key=value` words to a `Config`. The only file that knows OmegaConf.

    defaults (schema.py)  <  what algorithm.name sets  <  YAML file  <  command line
        each layer:  flatten to {dotted key: value}  ->  names.py to our keys  ->  check each value against its type

Every mistake of every layer is collected; one `ConfigError` lists them all. `${other.key}` and `${oc.env:NAME}` work
in values, and a text that begins with `~/` or `$HOME/` is a path below the home folder. A key written twice on the
command line means its last value, two *names* of one option with different values are a mistake.
"""

from __future__ import annotations

import dataclasses
import os.path
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.algo.algorithms import ALGORITHMS
from megarl.config.aliases import read_flag
from megarl.config.choices import Choice
from megarl.config.names import ALIASES, Setting, nearest_name, to_own_keys
from megarl.config.options import OPTIONS, SECTIONS, Option, read_schema
from megarl.config.schema import Config
from megarl.config.sources import list_costs, list_rewards, pick_engine
from megarl.config.verl_names import REFUSED_VALUES, SYNONYMS


class ConfigError(ValueError):
    """What the user must mend, all of it at once; `problems` has one line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        many = f"{len(self.problems)} problems" if len(self.problems) != 1 else "1 problem"
        super().__init__(f"configuration: {many}\n" + "\n".join(f"  - {problem}" for problem in self.problems))


def load_config(
    path: str | None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] = types.MappingProxyType({})
) -> Config:
    """Merges the defaults, the YAML file and the command line.

    Args:
        path: a YAML file, or None for defaults only.
        overrides: `key=value` words; keys are ours or verl's.
        defaults: by our keys, where a command starts from others than those of the schema.

    Raises:
        ConfigError: every unreadable file, unknown key, wrong value and contradiction of all layers.
    """
    problems: list[str] = []
    settings: list[Setting] = []
    if path is not None:
        settings += to_own_keys(_read_yaml(path, problems), path, problems)
    settings += to_own_keys(_read_words(overrides, problems), "command line", problems)

    merged = OmegaConf.structured(Config)
    first = [Setting(key, key, value, "defaults") for key, value in defaults.items()]
    for setting in [*first, *_read_algorithm(settings), *settings]:
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
        if name[:1] == "~" or "@" in name:
            problems.append(f"{word!r} on the command line is for Hydra, which is not used here; write key=value")
            continue
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
        why = REFUSED_VALUES.get(setting.key, {}).get(str(setting.value))
        allowed += f": {why}" if why else ""
        problems.append(f"{name}={shown} ({setting.where}) is not valid; use {allowed}")


def _entry_type(option: Option) -> Any:
    """The dataclass of the entries of an option that is a list of sections; else None."""
    inner = typing.get_args(option.type)[:1]
    return inner[0] if typing.get_origin(option.type) is list and dataclasses.is_dataclass(inner[0]) else None


def _check_entries(setting: Setting, option: Option, problems: list[str]) -> Any:
    """The entries of a list of sections, each value converted; what is wrong in one is told by its place."""
    if not isinstance(setting.value, list):
        return setting.value
    known, _ = read_schema(_entry_type(option))
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
        return SYNONYMS.get(option.type, {}).get(str(value)) or option.type(str(value))
    if option.type is bool:
        return read_flag(value)
    if option.type is str and not isinstance(value, str | int | float):
        raise ValueError(value)
    if typing.get_origin(option.type) is list and isinstance(value, str | int):
        value = [part.strip() for part in str(value).split(",") if part.strip()]
    return [_expand_home(part) for part in value] if isinstance(value, list) else _expand_home(value)


def _expand_home(value: Any) -> Any:
    """`~/x` and `$HOME/x` as the path they mean, where a shell left them as they are; anything else unchanged."""
    for mark in ("~/", "$HOME/"):
        if isinstance(value, str) and value.startswith(mark):
            return os.path.join(os.path.expanduser("~"), value.removeprefix(mark))
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
