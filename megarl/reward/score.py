"""Scores the answers of a batch with one reward function.

    "numeric" | "gsm8k" | "path/to/file.py:function"  ->  load_reward_function  ->  dry_run on one real row, at start
    prompts, rollouts, their texts                    ->  score_rollouts        ->  Rewards, one score an answer

A function that raises, or returns no finite number, has *failed* on that answer: the answer is marked and left out
of training. When it fails on more than a set share of a batch, the job ends.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megarl.records import Prompt, Rollout
from megarl.reward.rules import RULES

RewardFunction = Callable[[str, str, Any, Mapping[str, Any]], Any]
"""(data_source, solution_str, ground_truth, extra_info) -> a number, or a dictionary with "score"."""

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_FAILURES_SHOWN = 3


@dataclass(frozen=True)
class Rewards:
    """The scores of B answers.

    Attributes:
        scores: [B] fp32; means nothing where `is_failed_mask` is True (it is 0 there, never NaN).
        is_failed_mask: [B] bool, True = the function failed on this answer: leave it out of everything.
        failures: one message for each failed answer.
        metrics: mean over the answers that have it, of every further number that the function returned.
    """

    scores: Tensor
    is_failed_mask: Tensor
    failures: tuple[str, ...]
    metrics: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Mean score of the answers that did not fail; NaN when all did."""
        return self.scores[~self.is_failed_mask].mean().item()


def load_reward_function(spec: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Finds a reward function and fixes its further arguments.

    Args:
        spec: the name of a rule, or `path/to/file.py:function`.
        kwargs: further keyword arguments (`reward.kwargs`).

    Raises:
        ValueError: an unknown rule, a missing or failing file, a missing function, arguments that do not fit.
    """
    function = _load_from_file(spec) if ":" in spec or spec.endswith(".py") else RULES.get(spec)
    if function is None:
        raise ValueError(
            f"reward.function={spec} is not a rule of megarl; {_hint(spec, RULES)}, or name path/to/file.py:function"
        )
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


def dry_run(function: RewardFunction, prompt: Prompt, spec: str) -> float:
    """Calls the function once on a real row, with the ground truth as the answer, and checks what it returns.

    Returns:
        The score.

    Raises:
        ValueError: the function raises, or returns neither a finite number nor a dictionary with "score".
    """
    try:
        result = function(prompt.data_source, str(prompt.ground_truth), prompt.ground_truth, prompt.extra_info)
        return read_result(result)[0]
    except Exception as error:
        raise ValueError(
            f"reward.function={spec} fails on row {prompt.row} (data_source={prompt.data_source!r}, "
            f"ground_truth={prompt.ground_truth!r}): {type(error).__name__}: {error}"
        ) from error


def score_rollouts(
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    texts: Sequence[str],
    function: RewardFunction,
    max_failure_share: float = 0.5,
) -> Rewards:
    """Scores B answers.

    Args:
        prompts: the prompts that the engine was given.
        rollouts: B answers; `prompt_index` points into `prompts`.
        texts: B decoded answers, in the order of `rollouts`.
        function: as `load_reward_function` gives it.
        max_failure_share: the share of failed answers above which the job ends.

    Raises:
        RuntimeError: too many failures; the message holds the first ones.
    """
    assert len(rollouts) == len(texts), f"{len(rollouts)} answers but {len(texts)} texts"
    scores: list[float] = []
    is_failed: list[bool] = []
    failures: list[str] = []
    numbers: dict[str, list[float]] = {}
    for rollout, text in zip(rollouts, texts, strict=True):
        prompt = prompts[rollout.prompt_index]
        num_failures = len(failures)
        try:
            score, others = read_result(function(prompt.data_source, text, prompt.ground_truth, prompt.extra_info))
        except Exception as error:  # noqa: BLE001 - a user's function: the answer is marked, the share capped below
            failures.append(f"row {prompt.row}, answer {rollout.sample}: {type(error).__name__}: {error}")
            score, others = 0.0, {}
        is_failed.append(len(failures) > num_failures)
        scores.append(score)
        for name, value in others.items():
            numbers.setdefault(name, []).append(value)
    if len(failures) > max_failure_share * len(rollouts):
        raise RuntimeError(
            f"the reward function failed on {len(failures)} of {len(rollouts)} answers, more than "
            f"reward.max_failure_share={max_failure_share}; the first: {'; '.join(failures[:_FAILURES_SHOWN])}"
        )
    return Rewards(
        scores=torch.tensor(scores, dtype=torch.float32),
        is_failed_mask=torch.tensor(is_failed, dtype=torch.bool),
        failures=tuple(failures),
        metrics={name: sum(values) / len(values) for name, values in numbers.items()},
    )


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
    is_scalar = hasattr(value, "item") and getattr(value, "shape", None) in ((), torch.Size([]), (1,))
    return _as_number(value.item()) if is_scalar else None


def _load_from_file(spec: str) -> Callable[..., Any]:
    path, _, name = spec.rpartition(":")
    if not path:
        raise ValueError(f"reward.function={spec} names no function; write {spec}:function")
    if not Path(path).is_file():
        raise ValueError(f"reward.function={spec}: the file {path} does not exist")
    module = _import_file(path, spec)
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise ValueError(f"reward.function={spec}: {path} has no function {name}; {_hint(name, own)}")
    return function


def _import_file(path: str, spec: str) -> ModuleType:
    name = f"megarl_user_reward_{Path(path).stem}"
    loader = importlib.util.spec_from_file_location(name, path)
    assert loader is not None and loader.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(loader)
    sys.modules[name] = module  # dataclasses and pickling inside the file look it up
    try:
        loader.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(
            f"reward.function={spec}: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module


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
            raise ValueError(f"reward.kwargs.{name} is not an argument of reward.function={spec}; {_hint(name, own)}")
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in (*_ARGUMENTS, *kwargs)
    ]
    if needed:
        raise ValueError(f"reward.function={spec} also needs {', '.join(needed)}; set reward.kwargs.{needed[0]}")


def _hint(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names) or 'none'}"
