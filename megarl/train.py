"""The training program: `python -m megarl.train --config FILE key=value ...`, the same on every rank.

One step, and who waits for whom:

    sequences = generate(prompts)             engines; then every rank has the answers
    rewards   = judge(sequences)              rank 0; then every rank has the scores
    scores    = annotate(sequences)           actor, reference, critic: forward only, one stream where grids agree
    advantages                                every rank, the same numbers
    learn                                     critic and actor, fused where their grids agree
    sync                                      the actor's weights into the engines
"""

from __future__ import annotations

import sys
import time

from megarl import device
from megarl.job import Job, derive_seed
from megarl.keeper import Keeper
from megarl.learn import PipelineWatch, annotate_batch, learn
from megarl.obs.metrics import PhaseTimer
from megarl.records import Sampling, pack_rollouts
from megarl.report import RunReport, describe_batch
from megarl.trainer.ppo import advance_kl_coef, judge
from megarl.trainer.run_state import finish_step
from megarl.validation import judge_rollouts, validate


def train(job: Job, report: RunReport, keeper: Keeper) -> None:
    """Runs the whole job on this rank, from where a checkpoint left it."""
    config, timer = job.config, PhaseTimer(device.synchronize)
    watch = PipelineWatch(job, report.run_dir)
    state, sync_metrics = keeper.start()
    kl_coef = state.controllers.get("kl_coef", config.algorithm.kl_ctrl.kl_coef)
    if state.step == 0 and config.trainer.val_before_train and job.data.held_out:
        report.validated(0, validate(job))

    for step in range(state.step + 1, job.total_steps + 1):
        started = time.perf_counter()
        epoch = job.data.stream.position.epoch + 1
        prompts = job.data.stream.next_batch()
        with timer.phase("gen"):
            rollouts = job.generate(prompts, training_sampling(job, step))
            job.rest_engine()
        batch = pack_rollouts(prompts, rollouts)
        with timer.phase("reward"):
            rewards, texts = judge_rollouts(job, prompts, rollouts)
        with timer.phase("annotate"):
            scores, annotate_metrics = annotate_batch(job, watch, batch, step)
        with timer.phase("adv"):
            judged = judge(
                config.algorithm,
                batch,
                rewards.scores,
                rewards.is_failed_mask,
                old_logprobs=scores["old_log_prob"],
                ref_logprobs=scores.get("ref"),
                values=scores.get("values"),
                kl_coef=kl_coef,
            )
        results, update_metrics = learn(job, watch, batch, judged, step, state.updates, timer)
        if "actor" in results or config.rollout.free_cache_engine:
            with timer.phase("sync"):
                sync_metrics = job.sync_weights(version=step)
            state.weights_version = step

        kl_coef = advance_kl_coef(config.algorithm, kl_coef, judged.metrics, batch.num_sequences)
        skipped = sum(result.num_skipped for result in results.values())
        metrics = describe_batch(batch, judged, rewards) | annotate_metrics | update_metrics | sync_metrics
        for result in results.values():
            metrics |= result.stats
            report.warn(result.sources)
        metrics["training/skipped_updates"] = float(skipped)
        is_last = step == job.total_steps
        if job.data.held_out and (is_last or (config.trainer.test_freq > 0 and step % config.trainer.test_freq == 0)):
            with timer.phase("testing"):
                validation = validate(job)
            metrics |= validation.metrics
            report.validated(step, validation)
        report.step(step, epoch, metrics, timer, time.perf_counter() - started, batch)
        report.dump(step, prompts, rollouts, texts, rewards, batch, judged)
        state.controllers["kl_coef"] = kl_coef
        finish_step(state, skipped, config.trainer.max_skipped_steps)
        if keeper.after_step(state, timer):
            break
    keeper.close()
    report.finish(job)


def training_sampling(job: Job, step: int) -> Sampling:
    """How the answers of this step are drawn."""
    rollout = job.config.rollout
    seed = derive_seed(job.config.trainer.seed, "rollout", step)
    return Sampling(rollout.n, rollout.temperature, job.config.data.max_response_length, job.data.stop_ids, seed)


if __name__ == "__main__":
    from megarl.cli import run_train

    sys.exit(run_train(sys.argv[1:]))
