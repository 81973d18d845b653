"""Actor, critic and reward model of one run: thin faces over the roles of a `Job`.

    prompts ─ actor ─> Sequences ─ reward model ─> Experience ─ critic ─> Judged ─ actor ─> weights, in the engines too

Every call is a collective of all ranks: each computes its share on its own grid, and all get the whole result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megarl import device
from megarl.experience import Experience, build_evidence, judge_experience, training_sampling
from megarl.job import Job
from megarl.learn import PipelineWatch, annotate_batch, learn
from megarl.obs.metrics import PhaseTimer
from megarl.records import Prompt, Rollout, Sampling
from megarl.trainer.judge import Coefficients, Judged, advance, first_coefficients, judge


@dataclass(frozen=True)
class Sequences:
    """Prompts and the answers to them, by prompt, then by sample."""

    prompts: list[Prompt]
    rollouts: list[Rollout]
    sampling: Sampling


@dataclass(frozen=True)
class Advantages:
    """What the update reads: the judged batch, and what it was judged from."""

    judged: Judged
    experience: Experience


@dataclass
class Progress:
    """What moves from step to step beside the weights, shared by actor and critic."""

    job: Job
    watch: PipelineWatch
    coefficients: Coefficients
    step: int = 1
    updates: dict[str, int] = field(default_factory=dict)


class RewardModel:
    """What scores the answers: a rule, a service, a model (`reward.*`, `reward_model.*`), and their costs if any."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def get_rewards(self, sequences: Sequences) -> Experience:
        """Scores of all answers; ReMax's greedy answers give the baselines here."""
        return judge_experience(self._job, sequences.prompts, sequences.rollouts, sequences.sampling)


class Critic:
    """The value models that the algorithm needs (none for ReMax), and the advantages that come of their values."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def compute_advantages(self, sequences: Sequences, rewards: Experience) -> Advantages:
        """Old log-probs, reference log-probs and values in one forward-only stream, then the advantages."""
        now, job = self._progress, self._progress.job
        scores, _ = annotate_batch(job, now.watch, rewards.batch, now.step)
        evidence = build_evidence(rewards, scores)
        limit = sequences.sampling.max_tokens
        judged = judge(job.config.algorithm, rewards.batch, evidence, now.coefficients, job.data.estimate, limit)
        return Advantages(judged, rewards)


class Actor:
    """The policy: the engines that answer, and the model that learns."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        progress.job.sync_weights(version=0)

    def generate_sequences(self, prompts: list[Prompt]) -> Sequences:
        """`rollout.n` answers to each prompt, from all engines."""
        job = self._progress.job
        sampling = training_sampling(job, self._progress.step)
        return Sequences(prompts, job.generate(prompts, sampling), sampling)

    def update_policy(self, sequences: Sequences, advantages: Advantages) -> dict[str, float]:
        """Trains the policy and its critics (in one pipeline schedule where they share stages), then hands the new
        weights to the engines. Returns the metrics of the step."""
        now, job = self._progress, self._progress.job
        batch, judged = advantages.experience.batch, advantages.judged
        timer = PhaseTimer(device.synchronize)
        results, metrics = learn(job, now.watch, batch, judged, now.step, now.updates, timer)
        job.sync_weights(version=now.step)
        algorithm = job.config.algorithm
        now.coefficients = advance(algorithm, now.coefficients, judged.metrics, batch.num_sequences, now.step)
        now.step += 1
        for result in results.values():
            metrics |= result.stats
        return judged.metrics | metrics


def build_models(job: Job) -> tuple[Actor, Critic, RewardModel]:
    """The faces of a job's roles; a collective of the world."""
    watch = PipelineWatch(job, Path(str(job.config.trainer.default_local_dir)))
    updates = dict.fromkeys(("actor", *job.critics), 0)
    progress = Progress(job, watch, first_coefficients(job.config.algorithm, {}), updates=updates)
    return Actor(progress), Critic(progress), RewardModel(job)
