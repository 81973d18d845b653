"""What a job reads: tokenizer, prompts, who judges answers, and what of the algorithm is the user's own.

`open_data` finds what is wrong with the user's files before any model is built.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megarl.config.load import ConfigError
from megarl.config.needs import loss_needs_whole
from megarl.config.schema import Config
from megarl.generation import Conversation, open_conversation
from megarl.judging import open_sources
from megarl.models.registry import read_model_spec
from megarl.records import Prompt
from megarl.reward.score import Source
from megarl.reward.verdict import Scorer
from megarl.rollout.prompts import PromptStream, build_prompts
from megarl.rollout.rows import load_rows
from megarl.rollout.tokenizer import check_tokenizer_fits, count_token_ids, load_tokenizer, stop_token_ids
from megarl.trainer.estimators import ESTIMATORS, Estimator, wrap_user_estimator
from megarl.trainer.ppo import POLICY_LOSSES, PolicyLossRule, wrap_user_loss
from megarl.user_code import load_function

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """What the run reads: the tokenizer, training prompts without end, held-out prompts, who judges answers, who the
    policy talks to, and what of the algorithm is the user's own; `cost` is None where answers have no cost,
    `conversation` where they have one turn. `asker`: the thread from which sources are asked that wait elsewhere."""

    tokenizer: Any
    stream: PromptStream
    held_out: list[Prompt]
    stop_ids: tuple[int, ...]
    num_ids: int
    reward: tuple[Source, ...]
    cost: tuple[Source, ...] | None
    conversation: Conversation | None
    estimate: Estimator
    policy_loss: PolicyLossRule
    asker: Executor


def open_data(config: Config, given: Mapping[str, Scorer] = MappingProxyType({})) -> Data:
    """Reads and checks everything that the user's files hold, before any model is built; a collective of the world."""
    options, model_path = config.data, config.actor.model_path
    assert model_path is not None and config.actor.tokenizer_path is not None
    try:
        tokenizer = load_tokenizer(config.actor.tokenizer_path)
        _, spec = read_model_spec(model_path)
        num_ids = count_token_ids(tokenizer)
        check_tokenizer_fits(num_ids, spec.vocab_size)
        estimate, policy_loss = open_algorithm(config)

        def read(files: list[str], limit: int | None) -> list[Prompt]:
            origin = ", ".join(files)
            prompts, counts = build_prompts(
                load_rows(files)[:limit],
                tokenizer,
                max_prompt_length=options.max_prompt_length,
                overlong=options.overlong_prompts.value,
                prompt_key=options.prompt_key,
                chat_template=options.chat_template,
                raw_prompt=options.raw_prompt,
                origin=origin,
            )
            log.info("%s: %s", origin, counts)
            return prompts

        train = read(options.train_files, None)
        held_out = read(options.val_files, options.val_max_samples) if options.val_files else []
        assert options.seed is not None
        stream = PromptStream(
            train,
            options.train_batch_size,
            options.seed,
            shuffle=options.shuffle,
            length_bucketing=options.length_bucketing,
            origin=", ".join(options.train_files),
        )
        stop_ids = stop_token_ids(model_path, tokenizer)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    reward = open_sources(config, "reward", train[0], given.get("reward"))
    cost = None if config.cost is None else open_sources(config, "cost", train[0], given.get("cost"))
    conversation = open_conversation(config, tokenizer, train[0])
    asker = ThreadPoolExecutor(1, "megarl-asker")
    return Data(
        tokenizer, stream, held_out, stop_ids, num_ids, reward, cost, conversation, estimate, policy_loss, asker
    )


def open_algorithm(config: Config) -> tuple[Estimator, PolicyLossRule]:
    """The functions behind `algorithm`: of megarl, or the user's own.

    Raises:
        ValueError: a user's file or function that cannot be had.
    """
    algorithm = config.algorithm
    estimate = ESTIMATORS[algorithm.adv_estimator.value]
    if algorithm.advantage is not None:
        function = load_function("algorithm.advantage", algorithm.advantage)
        estimate = wrap_user_estimator(function, algorithm.advantage)
    if algorithm.loss is not None:
        return estimate, wrap_user_loss(load_function("algorithm.loss", algorithm.loss), algorithm.loss)
    return estimate, PolicyLossRule(POLICY_LOSSES[algorithm.policy_loss.value], loss_needs_whole(config))
