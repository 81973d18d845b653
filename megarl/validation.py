"""Validation on held-out prompts: one greedy answer each, and sampled ones; a collective of the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.drawn import judge_now
from megarl.job import Job, derive_seed
from megarl.obs.report import Accuracy
from megarl.records import Rollout, Sampling
from megarl.rollout.prompts import split_batches


@dataclass(frozen=True)
class Validation:
    """`metrics` under `val/`; `answers` [one a held-out prompt] greedy texts; `num_tokens` generated."""

    accuracy: Accuracy
    metrics: dict[str, float]
    answers: list[str]
    num_tokens: int


def validate(job: Job) -> Validation:
    """Answers every held-out prompt greedily, and `rollout.val.n` times at `rollout.val.temperature`."""
    config = job.config
    val = config.rollout.val
    seed = derive_seed(config.trainer.seed, "validation", 0)  # the same draws each time: changes are the model's
    greedy = Sampling(1, 0.0, config.data.max_response_length, job.data.stop_ids, seed)
    metrics: dict[str, float] = {}
    answers, scores, num_tokens = _answer(job, greedy)
    metrics |= _describe("greedy", scores, answers)
    sampled_share = None
    texts = [text for _, text in answers]
    if val.n:
        sampled = Sampling(
            val.n, val.temperature, config.data.max_response_length, job.data.stop_ids, seed, val.top_p, val.top_k
        )
        drawn, scores, more = _answer(job, sampled)
        metrics |= _describe("sampled", scores, drawn)
        sampled_share = metrics["val/accuracy_sampled"]
        num_tokens += more
    return Validation(Accuracy(metrics["val/accuracy_greedy"], sampled_share), metrics, texts, num_tokens)


@dataclass(frozen=True)
class _Scored:
    scores: Tensor
    accuracy_sum: float
    count: int


def _answer(job: Job, sampling: Sampling) -> tuple[list[tuple[Rollout, str]], _Scored, int]:
    pairs: list[tuple[Rollout, str]] = []
    parts: list[Tensor] = []
    right = 0.0
    for prompts in split_batches(job.data.held_out, job.config.data.val_batch_size):
        rollouts = job.generate(prompts, sampling)
        drawn, judged = judge_now(job, prompts, rollouts, with_costs=False)
        rewards = judged["reward"]
        kept = rewards.scores[~rewards.is_failed_mask]
        share = rewards.metrics.get("accuracy", rewards.metrics.get("acc", float((kept >= 1.0).double().mean())))
        right += share * kept.numel()
        parts.append(kept)
        pairs += zip(rollouts, drawn.texts, strict=True)
    scores = torch.cat(parts) if parts else torch.zeros(0)
    return pairs, _Scored(scores, right, scores.numel()), sum(len(rollout.token_ids) for rollout, _ in pairs)


def _describe(kind: str, scored: _Scored, answers: Sequence[tuple[Rollout, str]]) -> dict[str, float]:
    count = max(1, scored.count)
    return {
        f"val/accuracy_{kind}": scored.accuracy_sum / count,
        f"val/score_{kind}": float(scored.scores.double().sum()) / count,
        f"val/response_length_{kind}": sum(len(rollout.token_ids) for rollout, _ in answers) / max(1, len(answers)),
    }
