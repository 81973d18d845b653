"""What goes into a source of rewards and what comes out: answers in, one verdict for each.

    [Answer] ─> Scorer.score ─> [Verdict]        a rule or user function (function.py, pool.py), a service over HTTP
                                                 (remote.py), a transformers model (model.py), the environment itself

A verdict is a score or a failure, never both. A failure is not a score of zero: the answer leaves the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megarl.records import Prompt, Rollout


@dataclass(frozen=True)
class Answer:
    """One answer to judge; `text` is the decoded answer without special tokens."""

    prompt: Prompt
    rollout: Rollout
    text: str

    @property
    def name(self) -> str:
        return f"row {self.prompt.row}, answer {self.rollout.sample}"


@dataclass(frozen=True)
class Verdict:
    """`score` is finite, and means nothing where `failure` says what went wrong; `metrics` are further numbers."""

    score: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None


class Scorer(Protocol):
    """One source of rewards, held by one rank of the job.

    A class attribute `waits_elsewhere = True` says that it only waits for others (processes, a service) while it
    scores: the trainer then asks it from a thread and goes on with its own passes.
    """

    def score(self, answers: Sequence[Answer], max_failures: int) -> list[Verdict]:
        """One verdict for each answer, in their order.

        Args:
            answers: what to judge.
            max_failures: the caller ends the job when more fail; a slow source may then stop asking and mark the
                rest as failed too.
        """
        ...

    def close(self) -> None:
        """Frees what the source holds; it is of no use afterwards."""
        ...


def failed(reason: str) -> Verdict:
    """The verdict of an answer that could not be judged."""
    return Verdict(0.0, failure=reason)
