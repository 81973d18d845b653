"""Functions and classes in the user's own files, for options that say `path/to/file.py:name`; from no other file."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def load_function(key: str, spec: str) -> Callable[..., Any]:
    """The function or class that `spec` names; its file is imported, which runs the user's code.

    Args:
        key: the option, for messages.
        spec: `path/to/file.py:name`.

    Raises:
        ValueError: no such file or name, or a file that cannot be imported.
    """
    path, _, name = spec.rpartition(":")
    if not path:
        raise ValueError(f"{key}={spec} names no function; write {spec}:function")
    if not Path(path).is_file():
        raise ValueError(f"{key}={spec}: the file {path} does not exist")
    module_name = f"megarl_user_{key.replace('.', '_')}_{Path(path).stem}"
    loader = importlib.util.spec_from_file_location(module_name, path)
    if loader is None or loader.loader is None:
        raise ValueError(f"{key}={spec}: {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(loader)
    sys.modules[module_name] = module  # dataclasses and pickling inside the file look it up
    try:
        loader.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"{key}={spec}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            known
            for known, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module_name
        ]
        raise ValueError(f"{key}={spec}: {path} has no function {name}; {near_hint(name, own)}")
    return found


def near_hint(name: str, known: Iterable[str]) -> str:
    """What to write instead of `name`: the known name most like it, else all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names) or 'none'}"
