"""Reward functions: the rules of megarl and functions in the user's own files, found and checked before they are used.

    "numeric" (a rule) | "path/to/file.py:function"  ->  load_reward_function  ->  a function of four arguments
    what it returned                                 ->  read_result           ->  score, further numbers

Nothing here needs torch: the processes that run scorers (worker.py) start in a blink.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from megarl.reward.rules import RULES
from megarl.user_code import load_function, near_hint

RewardFunction = Callable[[str, str, Any, Mapping[str, Any]], Any]
"""(data_source, solution_str, ground_truth, extra_info) -> a number, or a dictionary with "score"."""

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(spec: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Finds a reward function and fixes its further arguments.

    Args:
        spec: the name of a rule, or `path/to/file.py:function`.
        kwargs: further keyword arguments (`reward.kwargs`).

    Raises:
        ValueError: an unknown rule, a missing or failing file, a missing function, arguments that do not fit.
    """
    function = load_function("reward.function", spec) if ":" in spec or spec.endswith(".py") else RULES.get(spec)
    if function is None:
        raise ValueError(
            f"reward.function={spec} is not a rule of megarl; {near_hint(spec, RULES)}, or name path/to/file.py:name"
        )
    return bind_reward_function(spec, function, kwargs)


def bind_reward_function(
    spec: str, function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None
) -> RewardFunction:
    """`function` with its further arguments fixed, called by the names of its arguments.

    Raises:
        ValueError: arguments that do not fit; `spec` names the function in the message.
    """
    fixed = dict(kwargs or {})
    _check_arguments(spec, function, fixed)

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Any:
        return function(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=dict(extra_info),
            **fixed,
        )

    return score


def read_result(result: Any) -> tuple[float, dict[str, float]]:
    """The score and the other finite numbers of what a reward function returned; texts beside them are left alone.

    Raises:
        ValueError: no number, not finite, or a dictionary without "score".
    """
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"the reward function returned a dictionary without 'score': {sorted(map(str, result))}")
        others = {str(name): _as_number(value) for name, value in result.items() if name != "score"}
        score = _as_number(result["score"])
        shown = result["score"]
    else:
        others, score, shown = {}, _as_number(result), result
    if score is None:
        raise ValueError(f"the reward function must return a number or a dictionary with 'score', not {shown!r}")
    if not math.isfinite(score):
        raise ValueError(f"the reward function returned {score}, which is not finite")
    return score, {name: value for name, value in others.items() if value is not None and math.isfinite(value)}


def _as_number(value: Any) -> float | None:
    """Python, numpy and one-element torch numbers; None for anything else, text included."""
    if isinstance(value, bool | int | float):
        return float(value)
    is_scalar = hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,))
    return _as_number(value.item()) if is_scalar else None


def _check_arguments(spec: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses a function that cannot be called with the four names and `kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        accepted = set(parameters) | set(_ARGUMENTS) | set(kwargs)
    else:
        accepted = {name for name, parameter in parameters.items() if parameter.kind is not parameter.POSITIONAL_ONLY}
    missing = [name for name in _ARGUMENTS if name not in accepted]
    if missing:
        raise ValueError(f"reward.function={spec} must take the arguments {', '.join(_ARGUMENTS)}; it lacks {missing}")
    for name in kwargs:
        if name in _ARGUMENTS or name not in accepted:
            own = sorted(accepted - set(_ARGUMENTS))
            raise ValueError(
                f"reward.kwargs.{name} is not an argument of reward.function={spec}; {near_hint(name, own)}"
            )
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in (*_ARGUMENTS, *kwargs)
    ]
    if needed:
        raise ValueError(f"reward.function={spec} also needs {', '.join(needed)}; set reward.kwargs.{needed[0]}")
