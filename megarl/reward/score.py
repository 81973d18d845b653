"""The reward of an answer from one or several sources.

    sources: rule functions, a pool, a service, a model            (verdict.Scorer)   ─┐
    dry_run on one real row, before any model is built                                 ├─> join_verdicts ─> Rewards
    a reward model on its own grid of ranks: [B] scores            (read_scores)      ─┘

The reward is the weighted sum of the sources' scores. An answer that one source could not judge has *failed*: a sum
with a part missing would be a wrong reward, and a missing part is not a zero. When more than a set share of a batch
fails, the job ends. A source of weight 0 is only measured: it has no part in the sum, and nothing fails with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.records import Prompt, Rollout
from megarl.reward.function import RewardFunction, read_result
from megarl.reward.verdict import Answer, Scorer, Verdict, failed

_FAILURES_SHOWN = 3


@dataclass(frozen=True)
class Rewards:
    """The scores of B answers.

    Attributes:
        scores: [B] fp32; means nothing where `is_failed_mask` is True (it is 0 there, never NaN).
        is_failed_mask: [B] bool, True = a source failed on this answer: leave it out of everything.
        failures: one message for each failed answer.
        metrics: mean over the answers that have it, of every further number that the sources gave, and of each
            source's own score where there are several.
    """

    scores: Tensor
    is_failed_mask: Tensor
    failures: tuple[str, ...]
    metrics: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Mean score of the answers that did not fail; NaN when all did."""
        return self.scores[~self.is_failed_mask].mean().item()


@dataclass(frozen=True)
class Source:
    """A named part of the reward.

    `role` names the Megatron model that scores, on its own ranks; else rank 0 holds a `scorer`, and the other ranks
    none.
    """

    name: str
    weight: float = 1.0
    scorer: Scorer | None = field(default=None, compare=False)
    role: str | None = None


class FunctionScorer:
    """Calls a function in this very process: for the rules of megarl, which return at once."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def score(self, answers: Sequence[Answer], max_failures: int) -> list[Verdict]:
        """See `Scorer.score`."""
        verdicts: list[Verdict] = []
        for answer in answers:
            prompt = answer.prompt
            try:
                result = self._function(prompt.data_source, answer.text, prompt.ground_truth, prompt.extra_info)
                verdicts.append(Verdict(*read_result(result)))
            except Exception as error:  # noqa: BLE001 - a user's function: the answer is marked, the share capped
                verdicts.append(failed(f"{type(error).__name__}: {error}"))
        return verdicts

    def close(self) -> None:
        """Nothing to free."""


class EpisodeScorer:
    """What the environment of a multi-turn answer gave: the sum over its turns."""

    def score(self, answers: Sequence[Answer], max_failures: int) -> list[Verdict]:
        """See `Scorer.score`."""
        verdicts: list[Verdict] = []
        for answer in answers:
            episode = answer.rollout.episode
            assert episode is not None, f"{answer.name} has no environment; rollout.multi_turn gives it one"
            verdicts.append(Verdict(episode.reward, {"num_turns": float(len(episode.turns))}))
        return verdicts

    def close(self) -> None:
        """Nothing to free."""


def dry_run(scorer: Scorer, prompt: Prompt, spec: str) -> float:
    """Asks a source once about a real row, with the ground truth as the answer.

    Args:
        spec: the option and its value, for messages.

    Returns:
        The score.

    Raises:
        ValueError: the source fails on it.
    """
    token_ids = prompt.token_ids[-1:]  # any answer of one token, for sources that read tokens
    rollout = Rollout(0, 0, token_ids, (0.0,) * len(token_ids), is_finished=True, weights_version=0)
    (verdict,) = scorer.score([Answer(prompt, rollout, str(prompt.ground_truth))], 0)
    if verdict.failure is not None:
        raise ValueError(
            f"{spec} fails on row {prompt.row} (data_source={prompt.data_source!r}, "
            f"ground_truth={prompt.ground_truth!r}): {verdict.failure}"
        )
    return verdict.score


def count_bearable(num_answers: int, max_failure_share: float) -> int:
    """How many of the answers may fail before the job ends."""
    return math.floor(max_failure_share * num_answers + 1e-9)


def read_scores(scores: Tensor) -> list[Verdict]:
    """Verdicts of a model's scores [B]; one that is not finite is a failure."""
    return [
        Verdict(score) if math.isfinite(score) else failed(f"the score is {score}, which is not finite")
        for score in scores.tolist()
    ]


def join_verdicts(
    sources: Sequence[Source],
    verdicts: Sequence[Sequence[Verdict]],
    names: Callable[[int], str],
    max_failure_share: float,
    section: str = "reward",
) -> Rewards:
    """The rewards of B answers from the verdicts of all sources.

    Args:
        sources: one or more.
        verdicts: for each source, one verdict for each answer.
        names: position of an answer -> what it is called in messages.
        max_failure_share: the share of failed answers above which the job ends.
        section: of the configuration, for messages.

    Raises:
        RuntimeError: too many failures; the message holds the first ones.
    """
    assert sources and len(sources) == len(verdicts), f"{len(sources)} sources, verdicts of {len(verdicts)}"
    failures: dict[int, str] = {}
    counted = [pair for pair in zip(sources, verdicts, strict=True) if pair[0].weight != 0]
    for source, judged in counted:
        prefix = f"{source.name}: " if len(sources) > 1 else ""
        for index, verdict in enumerate(judged):
            if verdict.failure is not None:
                failures.setdefault(index, f"{names(index)}: {prefix}{verdict.failure}")
    num_answers = len(verdicts[0])
    told = tuple(failures[index] for index in sorted(failures))
    if len(failures) > count_bearable(num_answers, max_failure_share):
        raise RuntimeError(
            f"the {section} failed on {len(failures)} of {num_answers} answers, more than "
            f"{section}.max_failure_share={max_failure_share}; the first: {'; '.join(told[:_FAILURES_SHOWN])}"
        )
    is_failed = torch.zeros(num_answers, dtype=torch.bool)
    is_failed[list(failures)] = True
    total = torch.zeros(num_answers, dtype=torch.float64)
    for source, judged in counted:
        total += source.weight * torch.tensor([verdict.score for verdict in judged], dtype=torch.float64)
    return Rewards(
        scores=total.where(~is_failed, 0.0).float(),
        is_failed_mask=is_failed,
        failures=told,
        metrics=_average_metrics(sources, verdicts),
    )


def _average_metrics(sources: Sequence[Source], verdicts: Sequence[Sequence[Verdict]]) -> dict[str, float]:
    """Means by name. A name that two sources use is told as `source/name`; so is each source's score."""
    by_source: list[dict[str, list[float]]] = []
    for judged in verdicts:
        numbers: dict[str, list[float]] = {}
        for verdict in judged:
            if verdict.failure is None:
                own = {"score": verdict.score} if len(sources) > 1 else {}
                for name, value in {**verdict.metrics, **own}.items():
                    numbers.setdefault(name, []).append(value)
        by_source.append(numbers)
    named = [name for numbers in by_source for name in numbers]
    return {
        f"{source.name}/{name}" if name == "score" or named.count(name) > 1 else name: sum(values) / len(values)
        for source, numbers in zip(sources, by_source, strict=True)
        for name, values in numbers.items()
    }


def score_answers(sources: Sequence[Source], answers: Sequence[Answer], max_failure_share: float = 0.5) -> Rewards:
    """The rewards of B answers from sources that this rank holds all of. See `join_verdicts`."""
    verdicts = [ask_source(source, answers, max_failure_share) for source in sources]
    return join_verdicts(sources, verdicts, lambda index: answers[index].name, max_failure_share)


def ask_source(source: Source, answers: Sequence[Answer], max_failure_share: float) -> list[Verdict]:
    """One source's verdicts, as many as there are answers. An answer whose environment failed is not asked about."""
    assert source.scorer is not None, f"source {source.name} is not held by this rank"
    asked = [answer for answer in answers if find_lost(answer) is None]
    verdicts = source.scorer.score(asked, count_bearable(len(answers), max_failure_share))
    assert len(verdicts) == len(asked), f"{source.name}: {len(verdicts)} verdicts for {len(asked)} answers"
    found = iter(verdicts)
    return [find_lost(answer) or next(found) for answer in answers]


def find_lost(answer: Answer) -> Verdict | None:
    """The failed verdict of an answer whose environment failed, whatever a source may say of it; else None."""
    episode = answer.rollout.episode
    return (
        None if episode is None or episode.failure is None else failed(f"its environment failed in {episode.failure}")
    )
