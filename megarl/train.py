"""The training program: `python -m megarl.train --config FILE key=value ...`, the same on every rank.

One step, and who waits for whom:

    sequences = generate(prompts)             engines; then every rank has the answers
    rewards   = judge(sequences)              rank 0; then every rank has the scores
    scores    = annotate(sequences)           actor, reference, critic: forward only, each on its own grid
    advantages                                every rank, the same numbers
    critic.update, actor.update               each on its own grid
    sync                                      the actor's weights into the engines
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from megarl import device
from megarl.job import Job, derive_seed
from megarl.obs.metrics import PhaseTimer
from megarl.parallel.partition import plan_mini_batches
from megarl.records import PackedBatch, Sampling, pack_rollouts
from megarl.report import RunReport, describe_batch
from megarl.rollout.collect import generate_everywhere
from megarl.trainer.annotate import annotate_logprobs, annotate_values
from megarl.trainer.ppo import Judged, advance_kl_coef, build_actor_objective, build_critic_objective, judge
from megarl.trainer.roles import Role
from megarl.trainer.update import Objective, UpdateResult, update_role
from megarl.validation import judge_rollouts, validate


def train(job: Job, report: RunReport) -> None:
    """Runs the whole job on this rank."""
    config, timer = job.config, PhaseTimer(device.synchronize)
    kl_coef = config.algorithm.kl_ctrl.kl_coef
    updates = {"actor": 0, "critic": 0}
    skipped_in_a_row = 0
    sync_metrics = job.sync_weights(version=0)
    if config.trainer.val_before_train and job.data.held_out:
        report.validated(0, validate(job))

    for step in range(1, job.total_steps + 1):
        started = time.perf_counter()
        epoch = job.data.stream.position.epoch + 1
        prompts = job.data.stream.next_batch()
        with timer.phase("gen"):
            rollouts = generate_everywhere(job.engine, job.topologies["rollout"], prompts, training_sampling(job, step))
        batch = pack_rollouts(prompts, rollouts)
        with timer.phase("reward"):
            rewards, texts = judge_rollouts(job, prompts, rollouts)
        with timer.phase("old_log_prob"):
            old_logprobs = annotate_logprobs(job.actor, batch, config.rollout.temperature)
        ref_logprobs = values = None
        if "ref" in job.topologies:
            with timer.phase("ref"):
                ref_logprobs = annotate_logprobs(job.ref, batch, config.rollout.temperature)
        if "critic" in job.topologies:
            with timer.phase("values"):
                values = annotate_values(job.critic, batch)
        with timer.phase("adv"):
            judged = judge(
                config.algorithm,
                batch,
                rewards.scores,
                rewards.is_failed_mask,
                old_logprobs=old_logprobs,
                ref_logprobs=ref_logprobs,
                values=values,
                kl_coef=kl_coef,
            )
        results: dict[str, UpdateResult] = {}
        if "critic" in job.topologies:
            with timer.phase("update_critic"):
                results["critic"] = update(job, "critic", batch, judged, step, updates)
        if step > config.critic.warmup_steps:
            with timer.phase("update_actor"):
                results["actor"] = update(job, "actor", batch, judged, step, updates)
            with timer.phase("sync"):
                sync_metrics = job.sync_weights(version=step)

        kl_coef = advance_kl_coef(config.algorithm, kl_coef, judged.metrics, batch.num_sequences)
        skipped = sum(result.num_skipped for result in results.values())
        skipped_in_a_row = skipped_in_a_row + 1 if skipped else 0
        if skipped_in_a_row > config.trainer.max_skipped_steps:
            raise RuntimeError(
                f"{skipped_in_a_row} steps in a row had gradients that are not finite (trainer.max_skipped_steps="
                f"{config.trainer.max_skipped_steps}); the weights are those of step {step - skipped_in_a_row}"
            )
        metrics = describe_batch(batch, judged, rewards) | sync_metrics
        for result in results.values():
            metrics |= result.stats
        metrics["training/skipped_updates"] = float(skipped)
        is_last = step == job.total_steps
        if job.data.held_out and (is_last or (config.trainer.test_freq > 0 and step % config.trainer.test_freq == 0)):
            with timer.phase("testing"):
                validation = validate(job)
            metrics |= validation.metrics
            report.validated(step, validation)
        report.step(step, epoch, metrics, timer, time.perf_counter() - started, batch)
        report.dump(step, prompts, rollouts, texts, rewards, batch, judged)
        report.export(job, step, is_last)
    report.finish(job)


def update(job: Job, name: str, batch: PackedBatch, judged: Judged, step: int, updates: dict[str, int]) -> UpdateResult:
    """Trains one role on the batch; every rank of the job gets its statistics."""
    config = job.config
    settings = config.critic if name == "critic" else config.actor
    assert settings.ppo_mini_batch_size is not None and settings.ppo_epochs is not None
    mini_batches = plan_mini_batches(
        batch.num_sequences,
        config.rollout.n,
        settings.ppo_mini_batch_size,
        settings.ppo_epochs,
        derive_seed(config.trainer.seed, name, 0),
        config.actor.shuffle,
        step,
    )
    role = job.critic if name == "critic" else job.actor
    done = None
    if role is not None:
        objective = build_objective(job, role, judged)
        mode = settings.loss_agg_mode.value
        done = update_role(role, batch, judged.mask, mini_batches, objective, mode, updates[name])
    updates[name] += len(mini_batches)
    box = [done]
    dist.broadcast_object_list(box, src=job.topologies[name].ranks[0], device=torch.device("cpu"))
    assert box[0] is not None
    return box[0]


def build_objective(job: Job, role: Role, judged: Judged) -> Objective:
    if role is job.critic:
        return build_critic_objective(role, job.config.critic, judged.scores)
    temperature, fused = job.config.rollout.temperature, job.config.algorithm.fused_logprob
    return build_actor_objective(role, job.config.actor, temperature, judged.scores, fused)


def training_sampling(job: Job, step: int) -> Sampling:
    """How the answers of this step are drawn."""
    rollout = job.config.rollout
    seed = derive_seed(job.config.trainer.seed, "rollout", step)
    return Sampling(rollout.n, rollout.temperature, job.config.data.max_response_length, job.data.stop_ids, seed)


if __name__ == "__main__":
    from megarl.cli import run_train

    sys.exit(run_train(sys.argv[1:]))
