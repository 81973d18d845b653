"""Answers of a job's policy: of one turn, or of several with an environment; one call for training and validation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megarl.config.load import ConfigError
from megarl.config.schema import Config
from megarl.judging import agree_on_problems
from megarl.parallel.topology import Topology
from megarl.records import Prompt, Rollout, Sampling
from megarl.rollout.chat_turns import ChatTurns, check_thinking
from megarl.rollout.collect import generate_everywhere
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.environment import Environment, dry_run_environment, load_environment
from megarl.rollout.multi_turn import TurnLimits, generate_episodes
from megarl.rollout.tokenizer import load_chat_template

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversation:
    """What a job of several turns needs; `build` makes an environment, on rank 0 only."""

    chat: ChatTurns
    limits: TurnLimits
    build: Callable[[], Environment]


def open_conversation(config: Config, tokenizer: object, prompt: Prompt) -> Conversation | None:
    """The environment of the configuration, tried once on a real row; None for answers of one turn. A collective.

    Raises:
        ConfigError: on every rank, when the environment or the chat template cannot be used.
    """
    options = config.rollout.multi_turn
    if options.environment is None:
        return None
    limits = TurnLimits(
        options.max_turns,
        options.max_tokens_per_turn or config.data.max_response_length // options.max_turns,
        config.data.max_response_length,
    )
    chat = ChatTurns(tokenizer, load_chat_template(config.data.chat_template))
    build: Callable[[], Environment] = _no_environment_here
    problems: list[str] = []
    if dist.get_rank() == 0:
        try:
            build, roles = load_environment(options.environment, options.kwargs)
            dry_run_environment(build, prompt, options.environment)
            for note in check_thinking(chat, roles, options.allow_stripped_thinking):
                log.warning("%s", note)
        except ValueError as error:
            problems.append(str(error))
    problems = agree_on_problems(problems)
    if problems:
        raise ConfigError(problems)
    return Conversation(chat, limits, build)


def generate(
    engine: RolloutEngine | None,
    topology: Topology,
    conversation: Conversation | None,
    prompts: Sequence[Prompt],
    sampling: Sampling,
) -> list[Rollout]:
    """Draws answers to `prompts` on all engines; a collective of the world.

    Returns:
        All answers by prompt, then by sample, the same on every rank.
    """
    if conversation is None:
        return generate_everywhere(engine, topology, prompts, sampling)
    return generate_episodes(
        engine, topology, prompts, sampling, conversation.chat, conversation.build, conversation.limits
    )


def _no_environment_here() -> Environment:
    raise AssertionError("environments live on rank 0")
