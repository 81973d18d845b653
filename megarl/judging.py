"""Rewards and costs of a job: opens the sources that the configuration names, and asks them about answers.

open_sources   rank 0 holds every source that is not a Megatron model, and has each judge one real row at start
ask_sources    rank 0 asks its sources, those that wait elsewhere from a thread ──┐
               Megatron models score on their own grids meanwhile ───────────────┴─> join_answers: the weighted sum,
                                                                                     the same on every rank
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import device
from megarl.config.load import ConfigError
from megarl.config.schema import Config, ModelDevice, ModelEngine, RewardConfig, ScoringModelConfig, SourceConfig
from megarl.config.sources import KINDS, MODEL_ROLES
from megarl.models.registry import read_model_spec
from megarl.records import Prompt, Rollout
from megarl.reward.function import load_reward_function
from megarl.reward.score import (
    EpisodeScorer,
    FunctionScorer,
    Rewards,
    Source,
    ask_source,
    dry_run,
    find_lost,
    join_verdicts,
    read_scores,
)
from megarl.reward.verdict import Answer, Scorer, Verdict
from megarl.weights.hf import HFFolder, check_folder

log = logging.getLogger(__name__)


def open_sources(config: Config, section: str, prompt: Prompt, given: Scorer | None = None) -> tuple[Source, ...]:
    """The sources of `section` ("reward" or "cost"); a collective of the world.

    Args:
        prompt: a real row; every source that rank 0 holds judges its ground truth once.
        given: what a source with `given=true` stands for; read on rank 0 only.

    Raises:
        ConfigError: on every rank, when a source cannot be opened, or fails on the row.
    """
    options: RewardConfig = getattr(config, section)
    scorers: dict[str, Scorer] = {}
    problems: list[str] = []
    if dist.get_rank() == 0:
        for number, source in enumerate(options.sources):
            where = f"{section}.sources[{number}]"
            try:
                scorer = _open_scorer(config, options, source, given)
                if isinstance(scorer, EpisodeScorer):
                    scorers[str(source.name)] = scorer
                elif scorer is not None:
                    score = dry_run(scorer, prompt, f"{where}.{_describe(source)}")
                    scorers[str(source.name)] = scorer
                    log.info(
                        "%s from %s: the ground truth of row %d scores %g", section, source.name, prompt.row, score
                    )
            except ValueError as error:
                text = str(error)
                problems.append(text if text.startswith(where) else f"{where} ({source.name}): {text}")
    problems = agree_on_problems(problems)
    if problems:
        raise ConfigError(problems)
    return tuple(
        Source(str(source.name), source.weight, scorers.get(str(source.name)), _role_of(config, source))
        for source in options.sources
    )


def agree_on_problems(problems: list[str]) -> list[str]:
    """What rank 0 found wrong, on every rank: all of them can then end with the same message."""
    box = [problems]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@dataclass(frozen=True)
class Asked:
    """Answers that the sources of one section were asked about. `found`: verdicts that are there, by source; `pending`:
    those that a thread waits for; both on rank 0 only."""

    section: str
    options: RewardConfig
    sources: tuple[Source, ...]
    answers: tuple[Answer, ...]
    found: dict[str, list[Verdict]]
    pending: Future[dict[str, list[Verdict]]] | None

    @property
    def roles(self) -> tuple[str, ...]:
        """The Megatron models among the sources."""
        return tuple(source.role for source in self.sources if source.role is not None)


def ask_sources(
    options: RewardConfig,
    sources: Sequence[Source],
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    texts: Sequence[str],
    asker: Executor,
    section: str = "reward",
) -> Asked:
    """Asks rank 0's sources about B answers, and returns while those that wait elsewhere still do; local.

    Args:
        options: the section of the configuration.
        sources: as `open_sources` gave them.
        prompts: the prompts that the engine was given.
        rollouts: B answers; `prompt_index` points into `prompts`.
        texts: B decoded answers, in the order of `rollouts`.
        asker: one thread, always the same: a pool's processes live as long as the thread that started them.
    """
    assert len(rollouts) == len(texts), f"{len(rollouts)} answers but {len(texts)} texts"
    answers = tuple(
        Answer(prompts[rollout.prompt_index], rollout, text) for rollout, text in zip(rollouts, texts, strict=True)
    )

    def ask(some: Sequence[Source]) -> dict[str, list[Verdict]]:
        return {source.name: ask_source(source, answers, options.max_failure_share) for source in some}

    own = [source for source in sources if source.scorer is not None]
    elsewhere = [source for source in own if getattr(source.scorer, "waits_elsewhere", False)]
    pending = asker.submit(ask, elsewhere) if elsewhere else None
    found = ask([source for source in own if source not in elsewhere])
    return Asked(section, options, tuple(sources), answers, found, pending)


def join_answers(asked: Asked, model_scores: Mapping[str, Tensor]) -> Rewards:
    """The rewards of B answers; a collective of the world, with the same result on every rank.

    Args:
        model_scores: [B] what each of `asked.roles` gave, on every rank.

    Raises:
        RuntimeError: on every rank, when too many answers could not be judged.
    """
    answers, sources = asked.answers, asked.sources
    by_role: dict[str, list[Verdict]] = {}
    for source in sources:
        if source.role is not None:
            scores = read_scores(model_scores[source.role])
            by_role[source.name] = [find_lost(answer) or own for answer, own in zip(answers, scores, strict=True)]
    box = [asked.found | (asked.pending.result() if asked.pending is not None else {})]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    verdicts = [(by_role | box[0])[source.name] for source in sources]
    share = asked.options.max_failure_share
    return join_verdicts(sources, verdicts, lambda index: answers[index].name, share, asked.section)


def _role_of(config: Config, source: SourceConfig) -> str | None:
    if source.model is None or source.model not in MODEL_ROLES.values():
        return None
    return source.model if getattr(config, source.model).engine is ModelEngine.megatron else None


def _describe(source: SourceConfig) -> str:
    kind = next(kind for kind in KINDS if getattr(source, kind) not in (None, False))
    return f"{kind}={getattr(source, kind)}"


def _open_scorer(config: Config, options: RewardConfig, source: SourceConfig, given: Scorer | None) -> Scorer | None:
    """What rank 0 holds of a source; None for a Megatron model, whose folder is checked. Raises ValueError."""
    if source.given:
        if given is None:
            raise ValueError(
                "given=true stands for an object of the program that trained; start that program, not `megarl train`"
            )
        return given
    if source.environment:
        return EpisodeScorer()
    if source.function is not None:
        if ":" not in source.function or options.num_workers == 0:
            return FunctionScorer(load_reward_function(source.function, source.kwargs))
        from megarl.reward.pool import ScorerPool

        return ScorerPool(source.function, source.kwargs, options.num_workers, options.time_limit_s)
    if source.remote is not None:
        from megarl.reward.remote import RemoteRewardModel

        return RemoteRewardModel(
            source.remote,
            source.model_name,
            style=None if source.style is None else source.style.value,
            api_key_env=source.api_key_env,
            timeout_s=source.timeout_s,
            num_retries=source.num_retries,
            concurrency=source.concurrency,
            max_reply_bytes=source.max_reply_bytes,
            fields=source.fields,
        )
    assert source.model is not None, f"source {source.name} names nothing"
    role = _role_of(config, source)
    if role is not None:
        path = getattr(config, role).model_path
        family, spec = read_model_spec(path)
        check_folder(HFFolder(path, family), family, spec, "value", needs_value_head=True)
        return None
    from megarl.reward.model import TransformersRewardModel

    model = getattr(config, source.model) if source.model in MODEL_ROLES.values() else ScoringModelConfig()
    return TransformersRewardModel(
        model.model_path or source.model,
        on_cpu=ModelDevice.cpu in (model.device, source.device),
        dtype=device.pick_dtype(model.dtype.value),
        max_tokens=model.ppo_max_token_len,
    )
