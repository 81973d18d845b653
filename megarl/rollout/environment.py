"""The world that a multi-turn answer talks to: a tool, a game, a simulated user.

    environment = build()                    once for each answer, from path/to/file.py:name of the configuration
    environment.reset(prompt)
    step = environment.step("<calc>2+3</calc>")   -> Step("5")                    the episode goes on with this text
    step = environment.step("It is 5.")           -> Step(reward=1.0, is_done=True)

An environment sees text and answers in text; tokens are the trainer's business. What it raises ends its own episode,
which is then left out of the batch: a failure is not a reward of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.records import Prompt
from megarl.user_code import load_function

Message = Mapping[str, str]
"""A chat message: role and content."""


@dataclass(frozen=True)
class Step:
    """What comes back for one answer of the policy.

    `observation`: text (then a message of the role `user`), or whole messages; read only when the episode goes on.
    `reward`: for this turn; the episode's reward is the sum.
    """

    observation: str | Sequence[Message] = ""
    reward: float = 0.0
    is_done: bool = False


class Environment(Protocol):
    """One episode's world. Lives on rank 0; `reset` is called once, then `step` for each turn."""

    def reset(self, prompt: Prompt) -> None:
        """Begins the episode that `prompt` asks for."""
        ...

    def step(self, answer: str) -> Step:
        """Takes the policy's turn: its sampled text without special tokens."""
        ...


def load_environment(spec: str, kwargs: Mapping[str, Any]) -> tuple[Callable[[], Environment], tuple[str, ...]]:
    """A function that builds one environment, and the roles that its messages have.

    An environment that answers in other roles than `user`, such as `tool`, names them in its attribute `roles`.

    Args:
        spec: `path/to/file.py:name` of a class or function.
        kwargs: what it is called with.

    Raises:
        ValueError: no such file or name, arguments that do not fit, or no `reset` and `step` on what it builds.
    """
    build = load_function("rollout.multi_turn.environment", spec)
    try:
        made = build(**kwargs)
    except Exception as error:
        raise ValueError(
            f"rollout.multi_turn.environment={spec} cannot be built with {dict(kwargs)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    missing = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
    if missing:
        raise ValueError(f"rollout.multi_turn.environment={spec} builds a {type(made).__name__} without {missing}")
    return lambda: build(**kwargs), tuple(getattr(made, "roles", ("user",)))


def dry_run_environment(build: Callable[[], Environment], prompt: Prompt, spec: str) -> None:
    """Plays one turn on a real row, with the ground truth as the answer. Raises ValueError when it fails."""
    try:
        environment = build()
        environment.reset(prompt)
        read_step(environment.step(str(prompt.ground_truth)))
    except Exception as error:
        raise ValueError(
            f"rollout.multi_turn.environment={spec} fails on row {prompt.row} (ground_truth={prompt.ground_truth!r}): "
            f"{type(error).__name__}: {error}"
        ) from error


def read_step(step: Any) -> tuple[list[dict[str, str]], float, bool]:
    """(messages, reward, is_done) of what an environment returned.

    Raises:
        ValueError: it is not a `Step`, its reward is not finite, or an episode goes on without anything to read.
    """
    if not isinstance(step, Step):
        raise ValueError(f"step must return a megarl.rollout.environment.Step, not {type(step).__name__}")
    reward = float(step.reward)
    if not math.isfinite(reward):
        raise ValueError(f"the environment's reward is {reward}, which is not finite")
    seen = step.observation
    messages = [{"role": "user", "content": seen}] if isinstance(seen, str) else [dict(message) for message in seen]
    if step.is_done:
        return [], reward, True
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"an observation must be text or messages with role and content, not {message!r}")
    if not any(message["content"] for message in messages):
        raise ValueError("the environment goes on without an observation; return text, or is_done=True")
    return messages, reward, False
