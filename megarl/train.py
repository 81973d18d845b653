"""The training program: `python -m megarl.train --config FILE key=value ...`, the same on every rank.

One step, and who waits for whom:

    sequences = generate(prompts)             engines; then every rank has the answers   (experience.py)
    rewards   = ask(sequences)                rank 0's sources of rewards, which may take their time
    scores    = annotate(sequences)           actor, reference, critics, reward models: forward only, one stream where
                                              grids agree, side by side where ranks differ
    rewards   = judge(rewards, scores)        when the sources have answered; then every rank has the rewards
    advantages                                every rank, the same numbers
    learn                                     critics and actor, fused where their grids agree
    sync                                      the actor's weights into the engines
"""

from __future__ import annotations

import dataclasses
import sys
import time

from megarl import device
from megarl.experience import build_evidence, collect_answers
from megarl.job import Job
from megarl.keeper import Keeper
from megarl.learn import PipelineWatch, annotate_batch, learn
from megarl.obs.metrics import PhaseTimer
from megarl.report import RunReport, describe_batch
from megarl.trainer.judge import advance, first_coefficients, judge
from megarl.trainer.run_state import finish_step
from megarl.validation import validate


def train(job: Job, report: RunReport, keeper: Keeper) -> None:
    """Runs the whole job on this rank, from where a checkpoint left it."""
    config, timer = job.config, PhaseTimer(device.synchronize)
    watch = PipelineWatch(job, report.run_dir)
    state, sync_metrics = keeper.start()
    coefficients = first_coefficients(config.algorithm, state.controllers)
    if state.step == 0 and config.trainer.val_before_train and job.data.held_out:
        report.validated(0, validate(job))

    for step in range(state.step + 1, job.total_steps + 1):
        started = time.perf_counter()
        epoch = job.data.stream.position.epoch + 1
        answers = collect_answers(job, step, timer)
        batch = answers.batch
        with timer.phase("annotate"):
            scores, annotate_metrics = annotate_batch(job, watch, batch, step, answers.passes)
        experience = answers.judge(scores)
        rewards = experience.rewards
        with timer.phase("adv"):
            evidence = build_evidence(experience, scores)
            limit = config.data.max_response_length
            judged = judge(config.algorithm, batch, evidence, coefficients, job.data.estimate, limit)
        results, update_metrics = learn(job, watch, batch, judged, step, state.updates, timer)
        if "actor" in results or config.rollout.free_cache_engine:
            with timer.phase("sync"):
                sync_metrics = job.sync_weights(version=step)
            state.weights_version = step

        coefficients = advance(config.algorithm, coefficients, judged.metrics, batch.num_sequences, step)
        skipped = sum(result.num_skipped for result in results.values())
        metrics = describe_batch(batch, judged, rewards) | experience.metrics
        metrics |= annotate_metrics | update_metrics | sync_metrics
        for result in results.values():
            metrics |= result.stats
            report.warn(result.sources)
        report.warn(judged.not_finite if skipped else ())
        metrics["training/skipped_updates"] = float(skipped)
        is_last = step == job.total_steps
        if job.data.held_out and (is_last or (config.trainer.test_freq > 0 and step % config.trainer.test_freq == 0)):
            with timer.phase("testing"):
                validation = validate(job)
            metrics |= validation.metrics
            report.validated(step, validation)
        report.step(step, epoch, metrics, timer, time.perf_counter() - started, batch)
        report.dump(step, experience.prompts, experience.rollouts, experience.texts, rewards, batch, judged)
        state.controllers |= dataclasses.asdict(coefficients)
        finish_step(state, skipped, config.trainer.max_skipped_steps)
        if keeper.after_step(state, timer):
            break
    keeper.close()
    report.finish(job.data.held_out, job.data.tokenizer)


if __name__ == "__main__":
    from megarl.cli import run_train

    sys.exit(run_train(sys.argv[1:]))
