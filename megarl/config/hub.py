"""Models by their name on the Hugging Face hub, where a folder is asked for: found in the local cache, or downloaded.

    actor.model_path=Qwen/Qwen2.5-0.5B-Instruct  ->  load_run  ->  actor.model_path=<cache>/snapshots/5fee7c4...

The only file that knows huggingface_hub. A folder of that name comes first. HF_HUB_OFFLINE=1 forbids the download.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.config.load import load_config, resolve_config
from megarl.config.schema import Config

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # what a model's folder needs here
_PATHS = {  # section -> its options that name a model's folder
    "actor": ("model_path", "tokenizer_path"),
    **{role: ("model_path",) for role in ("critic", "cost_critic", "ref", "reward_model", "cost_model")},
}


def load_run(
    path: str | None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Config, dict[str, str]]:
    """`load_config`, with models of the hub replaced by their folders, and resolved.

    Returns:
        The configuration; and for each model that was not found, why. It keeps its name.
    """
    config, why = find_models(load_config(path, overrides, defaults))
    return resolve_config(config), why


def find_models(config: Config) -> tuple[Config, dict[str, str]]:
    """The configuration with the folder of each model of the hub; and why others were not found, by name."""
    found: dict[str, str] = {}
    why: dict[str, str] = {}
    for section, options in _PATHS.items():
        for option in options:
            name = getattr(getattr(config, section), option)
            if name is None or not is_hub_name(name) or name in found or name in why:
                continue
            try:
                found[name] = find_model(name)
            except ValueError as error:
                why[name] = str(error)
    sections = {
        section: dataclasses.replace(
            getattr(config, section),
            **{option: found.get(path := getattr(getattr(config, section), option), path) for option in options},
        )
        for section, options in _PATHS.items()
    }
    return dataclasses.replace(config, **sections), why


def is_hub_name(path: str) -> bool:
    """Whether `path` can only be a name of the hub: `owner/name`, and nothing of that name is here."""
    return _HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def find_model(name: str) -> str:
    """The folder of a model of the hub, from the local cache or downloaded into it.

    Raises:
        ValueError: it is not in the cache, and was not downloaded; the message says why, and how to get it.
    """
    from huggingface_hub import snapshot_download  # takes a second to import, and only names of the hub need it

    try:
        return snapshot_download(name, allow_patterns=_FILES, local_files_only=True)
    except OSError as error:  # nothing there, or only some of its files
        cause: Exception = error
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE"):
        try:
            return snapshot_download(name, allow_patterns=_FILES)
        except Exception as error:  # noqa: BLE001 - whatever the client raises, the user is told the other way
            cause = error
        reason = f"it could not be downloaded ({(str(cause).strip() or type(cause).__name__).splitlines()[0]})"
    else:
        reason = "HF_HUB_OFFLINE forbids the download"
    raise ValueError(
        f"no such folder, no such model in the local Hugging Face cache, and {reason}; where there is a network, "
        f"`hf download {name} --local-dir FOLDER`, then name FOLDER"
    ) from cause
