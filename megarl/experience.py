"""The experience of one step: prompts, the answers to them, and their scores; the same on every rank.

next batch of prompts ─> answers (and a greedy one each) ─> judge ─> keep the groups that tell something ─┐
          ^                                                                                               │
          └───────────────── not enough prompts yet, and batches left (algorithm.filter_groups) ──────────┘
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.groups import find_telling_groups
from megarl.algo.shaping import place_step_rewards
from megarl.config.needs import score_needs
from megarl.job import Job, derive_seed
from megarl.obs.metrics import PhaseTimer
from megarl.records import PackedBatch, Prompt, Rollout, Sampling, pack_rollouts
from megarl.reward.score import Rewards
from megarl.trainer.judge import Evidence
from megarl.validation import judge_costs, judge_rollouts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experience:
    """B answers, packed into T tokens, with their texts and scores.

    `rollouts`, `texts` [B]; `prompts`: what `Rollout.prompt_index` points into. `greedy_scores` [B] fp32: the score of
    the greedy answer to each answer's prompt. `costs` [B] fp32. `turn_rewards` [T] fp32: what of the scores single
    turns have earned, on their last tokens; None where answers have one turn. An answer that has no score, no cost or
    no greedy score, where these are asked for, is failed in `rewards`.
    """

    prompts: list[Prompt]
    rollouts: list[Rollout]
    texts: list[str]
    batch: PackedBatch
    rewards: Rewards
    greedy_scores: Tensor | None
    costs: Tensor | None
    turn_rewards: Tensor | None
    metrics: dict[str, float]


def collect_experience(job: Job, step: int, timer: PhaseTimer) -> Experience:
    """Draws and judges answers until there are `data.train_batch_size` prompts worth training on; a collective of the
    world. Without `algorithm.filter_groups` that is one batch."""
    wanted, filters = job.config.data.train_batch_size, job.config.algorithm.filter_groups
    drawn = _draw(job, step, 1, timer, is_last=not filters.enable)
    if not filters.enable:
        return drawn
    kept: Experience | None = None
    number, num_drawn, num_telling = 1, 0, 0
    while True:
        telling = find_telling_groups(drawn.rewards.scores, drawn.batch.group, drawn.rewards.is_failed_mask)
        found = sorted(set(drawn.batch.group[telling].tolist()))
        num_drawn, num_telling = num_drawn + len(drawn.prompts), num_telling + len(found)
        if found:
            chosen = select_prompts(drawn, found)
            kept = chosen if kept is None else join(kept, chosen)
        if num_telling >= wanted or number == filters.max_num_gen_batches:
            break
        number += 1
        drawn = _draw(job, step, number, timer, is_last=number == filters.max_num_gen_batches)
    job.rest_engine()
    if num_telling < wanted:
        log.warning(
            "step %d: of %d prompts in %d batches %d have answers of different scores, fewer than "
            "data.train_batch_size=%d (algorithm.filter_groups.max_num_gen_batches)",
            step, num_drawn, number, num_telling, wanted,
        )  # fmt: skip
    # where no group at all tells something, the last batch stands: its advantages are 0
    result = drawn if kept is None else select_prompts(kept, range(min(wanted, num_telling)))
    metrics = {"rollout/num_gen_batches": float(number), "rollout/telling_group_share": num_telling / num_drawn}
    return dataclasses.replace(result, metrics=result.metrics | metrics)


def training_sampling(job: Job, step: int, number: int = 1) -> Sampling:
    """How the answers of this step's batch `number` are drawn."""
    config = job.config
    purpose = "rollout" if number == 1 else f"rollout {number}"
    return Sampling(
        config.rollout.n,
        config.rollout.temperature,
        config.data.max_response_length,
        job.data.stop_ids,
        derive_seed(config.trainer.seed, purpose, step),
        with_greedy="greedy" in score_needs(config),
    )


def _draw(job: Job, step: int, number: int, timer: PhaseTimer, is_last: bool) -> Experience:
    """One batch of prompts, answered and judged; before the last one is judged the engine may give its memory back."""
    prompts = job.data.stream.next_batch()
    sampling = training_sampling(job, step, number)
    with timer.phase("gen"):
        rollouts = job.generate(prompts, sampling)
        if is_last:
            job.rest_engine()
    with timer.phase("reward"):
        return judge_experience(job, prompts, rollouts, sampling)


def judge_experience(job: Job, prompts: list[Prompt], rollouts: list[Rollout], sampling: Sampling) -> Experience:
    """Scores and costs of answers; a collective of the world, with the same result on every rank.

    Args:
        rollouts: by prompt, then by sample, as `Job.generate` returned them; where `sampling.with_greedy`, greedy
            answers are judged and then leave the batch.
    """
    rewards, texts = judge_rollouts(job, prompts, rollouts)
    costs = None if job.data.cost is None else judge_costs(job, prompts, rollouts, texts)
    failed = rewards.is_failed_mask
    if costs is not None:
        failed = failed | costs.is_failed_mask
    greedy_scores = None
    rows = torch.arange(len(rollouts))
    if sampling.with_greedy:
        by_prompt = rows.view(len(prompts), sampling.num_answers)
        greedy, rows = by_prompt[:, -1], by_prompt[:, :-1].flatten()
        greedy_scores = rewards.scores[greedy].repeat_interleave(sampling.n)
        failed = failed.clone()
        failed[rows] |= failed[greedy].repeat_interleave(sampling.n)
    rollouts = [rollouts[row] for row in rows.tolist()]
    batch = pack_rollouts(prompts, rollouts)
    return Experience(
        prompts=prompts,
        rollouts=rollouts,
        texts=[texts[row] for row in rows.tolist()],
        batch=batch,
        rewards=dataclasses.replace(rewards, scores=rewards.scores[rows], is_failed_mask=failed[rows]),
        greedy_scores=greedy_scores,
        costs=None if costs is None else costs.scores[rows],
        turn_rewards=place_turn_rewards(batch, rollouts, environment_weight(job)),
        metrics={} if costs is None else {f"cost/{name}": value for name, value in costs.metrics.items()},
    )


def build_evidence(experience: Experience, scores: Mapping[str, Tensor]) -> Evidence:
    """What advantages are computed from: the judged answers, and the [T] scores of `annotate_batch`."""
    return Evidence(
        rewards=experience.rewards.scores,
        is_failed=experience.rewards.is_failed_mask,
        old_logprobs=scores["old_log_prob"],
        turn_rewards=experience.turn_rewards,
        ref_logprobs=scores.get("ref"),
        values=scores.get("values"),
        greedy_scores=experience.greedy_scores,
        costs=experience.costs,
        cost_values=scores.get("cost_values"),
    )


def environment_weight(job: Job) -> float:
    """What the environment's rewards weigh in the score of an answer; 0 where they have no part in it."""
    return sum(source.weight for source in job.config.reward.sources if source.environment)


def place_turn_rewards(batch: PackedBatch, rollouts: Sequence[Rollout], weight: float) -> Tensor | None:
    """[T] fp32: `weight` times what each turn earned, on the last token of the turn; None where nothing of the score
    comes from turns."""
    if not weight or not any(rollout.episode for rollout in rollouts):
        return None
    ends = batch.cu_seqlens[1:].tolist()
    earned: list[float] = []
    places: list[int] = []
    for end, rollout in zip(ends, rollouts, strict=True):
        for turn in rollout.episode.turns if rollout.episode is not None else ():
            earned.append(weight * turn.reward)
            places.append(end - len(rollout.token_ids) + turn.end - 1)
    positions = torch.tensor(places, dtype=torch.int64)
    return place_step_rewards(torch.tensor(earned), positions, batch.response_mask, batch.cu_seqlens)


def select_prompts(experience: Experience, chosen: Sequence[int]) -> Experience:
    """Only the answers to the prompts at the positions `chosen`, which are renumbered from 0."""
    place = {index: new for new, index in enumerate(chosen)}
    rows = [row for row, rollout in enumerate(experience.rollouts) if rollout.prompt_index in place]
    rewards = experience.rewards
    return _pack(
        [experience.prompts[index] for index in chosen],
        [
            dataclasses.replace(experience.rollouts[row], prompt_index=place[experience.rollouts[row].prompt_index])
            for row in rows
        ],
        dataclasses.replace(
            experience,
            texts=[experience.texts[row] for row in rows],
            rewards=dataclasses.replace(
                rewards, scores=rewards.scores[rows], is_failed_mask=rewards.is_failed_mask[rows]
            ),
            greedy_scores=None if experience.greedy_scores is None else experience.greedy_scores[rows],
            costs=None if experience.costs is None else experience.costs[rows],
            turn_rewards=(
                None if experience.turn_rewards is None else experience.turn_rewards[experience.batch.token_rows(rows)]
            ),
        ),
    )


def join(one: Experience, other: Experience) -> Experience:
    """The answers of both, the second's prompts behind the first's. Metrics of the rewards are the second's."""

    def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else torch.cat((a, b))

    moved = [
        dataclasses.replace(rollout, prompt_index=rollout.prompt_index + len(one.prompts)) for rollout in other.rollouts
    ]
    rewards = dataclasses.replace(
        other.rewards,
        scores=torch.cat((one.rewards.scores, other.rewards.scores)),
        is_failed_mask=torch.cat((one.rewards.is_failed_mask, other.rewards.is_failed_mask)),
        failures=one.rewards.failures + other.rewards.failures,
    )
    return _pack(
        [*one.prompts, *other.prompts],
        [*one.rollouts, *moved],
        dataclasses.replace(
            other,
            texts=[*one.texts, *other.texts],
            rewards=rewards,
            greedy_scores=both(one.greedy_scores, other.greedy_scores),
            costs=both(one.costs, other.costs),
            turn_rewards=both(one.turn_rewards, other.turn_rewards),
        ),
    )


def _pack(prompts: list[Prompt], rollouts: list[Rollout], rest: Experience) -> Experience:
    return dataclasses.replace(rest, prompts=prompts, rollouts=rollouts, batch=pack_rollouts(prompts, rollouts))
