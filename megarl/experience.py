"""The experience of one step: prompts, the answers to them, and their scores; the same on every rank.

    next batch of prompts ─> answers (and a greedy one each) ─> ask ──────── annotate meanwhile ────────> judge

With algorithm.filter_groups what is worth annotating is known only after judging:

    next batch of prompts ─> answers ─> judge ─> keep the groups that tell something ─┬─> annotate
              ^                                                                       │
              └───────────────── not enough prompts yet, and batches left ────────────┘
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.groups import find_telling_groups
from megarl.algo.shaping import place_step_rewards
from megarl.config.needs import score_needs
from megarl.drawn import Drawn, ask_about, join_rewards, judge_now, scoring_passes
from megarl.job import Job, derive_seed
from megarl.obs.metrics import PhaseTimer
from megarl.records import PackedBatch, Prompt, Rollout, Sampling, pack_rollouts
from megarl.reward.score import Rewards
from megarl.trainer.annotate import Pass
from megarl.trainer.judge import Evidence

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


@dataclass(frozen=True)
class Answers:
    """The answers of a step on their way to be an `Experience`.

    `batch`: what the models annotate. `passes`: those of reward models, which may run beside. `judge`: given the scores
    of these passes, waits for the other sources; a collective of the world.
    """

    batch: PackedBatch
    passes: tuple[Pass, ...]
    judge: Callable[[Mapping[str, Tensor]], Experience]


def collect_answers(job: Job, step: int, timer: PhaseTimer) -> Answers:
    """Draws the answers of a step: to `data.train_batch_size` prompts, still being judged when this returns; with
    `algorithm.filter_groups` to as many prompts worth training on, judged already. A collective of the world."""
    if job.config.algorithm.filter_groups.enable:
        found = collect_telling(job, step, timer)
        return Answers(found.batch, (), lambda _: found)
    prompts, rollouts, sampling = _draw(job, step, 1, timer, is_last=True)
    with timer.phase("reward"):
        drawn = ask_about(job, prompts, rollouts)
    rows = training_rows(sampling, len(prompts))
    batch = pack_rollouts(prompts, [rollouts[row] for row in rows.tolist()])

    def judge(scores: Mapping[str, Tensor]) -> Experience:
        with timer.phase("reward"):
            return build_experience(job, drawn, join_rewards(drawn, scores), sampling)

    return Answers(batch, scoring_passes(job, drawn), judge)


def collect_telling(job: Job, step: int, timer: PhaseTimer) -> Experience:
    """Draws and judges batches of answers until there are `data.train_batch_size` prompts worth training on."""
    wanted, filters = job.config.data.train_batch_size, job.config.algorithm.filter_groups
    kept: Experience | None = None
    number, num_drawn, num_telling = 0, 0, 0
    while True:
        number += 1
        prompts, rollouts, sampling = _draw(job, step, number, timer, is_last=number == filters.max_num_gen_batches)
        with timer.phase("reward"):
            drawn = judge_experience(job, prompts, rollouts, sampling)
        telling = find_telling_groups(drawn.rewards.scores, drawn.batch.group, drawn.rewards.is_failed_mask)
        found = sorted(set(drawn.batch.group[telling].tolist()))
        num_drawn, num_telling = num_drawn + len(drawn.prompts), num_telling + len(found)
        if found:
            chosen = select_prompts(drawn, found)
            kept = chosen if kept is None else join(kept, chosen)
        if num_telling >= wanted or number == filters.max_num_gen_batches:
            break
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


def _draw(
    job: Job, step: int, number: int, timer: PhaseTimer, is_last: bool
) -> tuple[list[Prompt], list[Rollout], Sampling]:
    """One batch of prompts, answered; after the last one the engine may give its memory back."""
    prompts = job.data.stream.next_batch()
    sampling = training_sampling(job, step, number)
    with timer.phase("gen"):
        rollouts = job.generate(prompts, sampling)
        if is_last:
            job.rest_engine()
    return prompts, rollouts, sampling


def training_rows(sampling: Sampling, num_prompts: int) -> Tensor:
    """[B] int64: the answers that are trained on, of all that were drawn: greedy ones are not."""
    rows = torch.arange(num_prompts * sampling.num_answers).view(num_prompts, sampling.num_answers)
    return rows[:, : sampling.n].flatten()


def judge_experience(job: Job, prompts: list[Prompt], rollouts: list[Rollout], sampling: Sampling) -> Experience:
    """Scores and costs of answers; a collective of the world, with the same result on every rank.

    Args:
        rollouts: by prompt, then by sample, as `Job.generate` returned them; where `sampling.with_greedy`, greedy
            answers are judged and then leave the batch.
    """
    drawn, judged = judge_now(job, prompts, rollouts)
    return build_experience(job, drawn, judged, sampling)


def build_experience(job: Job, drawn: Drawn, judged: Mapping[str, Rewards], sampling: Sampling) -> Experience:
    """The judged answers, those that are trained on in a batch, each with the score of its greedy sibling if there is
    one."""
    rewards, costs = judged["reward"], judged.get("cost")
    rows = training_rows(sampling, len(drawn.prompts))
    failed = rewards.is_failed_mask if costs is None else rewards.is_failed_mask | costs.is_failed_mask
    failed_rows, greedy_scores = failed[rows], None
    if sampling.with_greedy:
        greedy = torch.arange(len(drawn.prompts)) * sampling.num_answers + sampling.n
        greedy_scores = rewards.scores[greedy].repeat_interleave(sampling.n)
        failed_rows = failed_rows | failed[greedy].repeat_interleave(sampling.n)
    rollouts = [drawn.rollouts[row] for row in rows.tolist()]
    batch = pack_rollouts(drawn.prompts, rollouts)
    return Experience(
        prompts=drawn.prompts,
        rollouts=rollouts,
        texts=[drawn.texts[row] for row in rows.tolist()],
        batch=batch,
        rewards=dataclasses.replace(rewards, scores=rewards.scores[rows], is_failed_mask=failed_rows),
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
