"""What the main loop asks of the models: scores of a batch, and what it teaches them; and how their pipelines ran.

annotate_batch   old log-probs, reference log-probs, values: one stream where the grids allow it
learn            critic and actor, fused in one schedule where the grids allow it, else one after the other
PipelineWatch    costs measured so far, the schedules chosen, idle shares, traces
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.job import Job, can_update_together, derive_seed
from megarl.obs.metrics import PhaseTimer
from megarl.obs.time_line import Block, draw_time_line, write_chrome_trace
from megarl.parallel.partition import plan_mini_batches
from megarl.records import PackedBatch
from megarl.residents import bring_weights
from megarl.trainer.annotate import annotate, logprob_pass, value_pass
from megarl.trainer.measured_costs import PipelineRun, Profile, merge_profile
from megarl.trainer.ppo import Judged, build_actor_objective, build_critic_objective
from megarl.trainer.roles import Role
from megarl.trainer.update import Objective, PipelineOptions, Task, UpdateResult, update_roles

log = logging.getLogger(__name__)


class PipelineWatch:
    """Follows the pipelines of a run; its methods are collectives of the world."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        self._job, self._run_dir = job, run_dir
        self._told: dict[tuple[str, ...], tuple[str, str]] = {}
        self.profile = Profile()
        chunks = {name: topology.num_chunks for name, topology in job.topologies.items() if name != "rollout"}
        passes = {"old_log_prob": "actor", "ref": "ref", "values": "critic"}
        self._num_chunks = {name: chunks[name] for name in ("actor", "critic") if name in chunks}
        self._num_chunks |= {name: chunks[role] for name, role in passes.items() if role in chunks}
        self._has_stages = any(topology.pp_size > 1 for topology in job.topologies.values())

    def follow(self, runs: Sequence[PipelineRun], kind: str, step: int) -> dict[str, float]:
        """Measures what has run since the last call and returns the metrics of it.

        Args:
            kind: "update" or "annotate".
        """
        if not self._has_stages:
            return {}
        known = self.profile.chunks.keys()
        self.profile, idle = merge_profile(self.profile, runs, self._num_chunks)
        if kind == "update":
            for run in runs:
                self._tell(run, "measured" if known >= run.work.keys() else "equal")
            if self._job.config.trainer.trace:
                self._trace(runs, step)
        name = "pipeline/idle_share" if kind == "update" else "pipeline/annotate_idle_share"
        return {} if idle is None else {name: idle}

    def _tell(self, run: PipelineRun, costs: str) -> None:
        """Says which schedule was chosen when it is another than before, or the first with measured costs."""
        models = tuple(model.name for model in run.picked.schedule.models)
        told = (run.picked.schedule.name, costs)
        if run.picked.schedule.num_stages > 1 and self._told.get(models) != told:
            self._told[models] = told
            log.info("update of %s, %s costs: schedule %s", " and ".join(models), costs, run.picked)

    def _trace(self, runs: Sequence[PipelineRun], step: int) -> None:
        """Writes the updates of all ranks as one time line, each run from its own begin."""
        blocks: list[Block] = []
        begin = 0.0
        for run in runs:
            for span in run.spans:
                each = span.step
                blocks.append(
                    Block(dist.get_rank(), begin + span.start, begin + span.end, each.action, each.model,
                          each.micro_batch, each.chunk)
                )  # fmt: skip
            begin += run.seconds
        gathered: list[list[Block]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, blocks)
        if dist.get_rank() == 0:
            folder = self._run_dir / "trace"
            folder.mkdir(exist_ok=True)
            everything = [block for blocks in gathered for block in blocks]
            write_chrome_trace(folder / f"update_{step:06d}.json", everything)
            draw_time_line(folder / f"update_{step:06d}.png", everything, f"update of step {step}, seconds")


def annotate_batch(
    job: Job, watch: PipelineWatch, batch: PackedBatch, step: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """[T] scores `old_log_prob`, and `ref` and `values` where the algorithm needs them, on every rank; and metrics."""
    bring_weights(job.offloads)
    temperature = job.config.rollout.temperature
    passes = [logprob_pass("old_log_prob", job.actor, temperature)]
    if "ref" in job.topologies:
        passes.append(logprob_pass("ref", job.ref, temperature))
    if "critic" in job.topologies:
        passes.append(value_pass("values", job.critic))
    scores, runs = annotate(passes, batch, watch.profile)
    return scores, watch.follow(runs, "annotate", step)


def learn(
    job: Job,
    watch: PipelineWatch,
    batch: PackedBatch,
    judged: Judged,
    step: int,
    updates: dict[str, int],
    timer: PhaseTimer,
) -> tuple[dict[str, UpdateResult], dict[str, float]]:
    """Trains the critic, and after its warm-up the actor; every rank of the job gets their statistics.

    Args:
        updates: optimizer steps taken so far, by role; counted on.
    """
    names = [name for name in ("critic", "actor") if name in job.topologies]
    if step <= job.config.critic.warmup_steps:
        names.remove("actor")
    together = len(names) == 2 and can_update_together(job.config, job.topologies)
    results: dict[str, UpdateResult] = {}
    runs: list[PipelineRun] = []
    for group in [["actor", "critic"]] if together else [[name] for name in names]:
        with timer.phase("update_" + "_".join(group)):
            results |= _update(job, watch, group, batch, judged, step, updates, runs)
    metrics = share_time(runs[0]) if together and runs else {}
    return results, metrics | watch.follow(runs, "update", step)


def share_time(run: PipelineRun) -> dict[str, float]:
    """The time of a fused update in verl's names, by what each model computed on this rank."""
    busy = {name: 0.0 for name in run.work}
    for span in run.spans:
        busy[span.step.model] += span.end - span.start
    total = max(sum(busy.values()), 1e-9)
    return {f"timing_s/update_{name}": run.seconds * own / total for name, own in busy.items()}


def _update(
    job: Job,
    watch: PipelineWatch,
    names: Sequence[str],
    batch: PackedBatch,
    judged: Judged,
    step: int,
    updates: dict[str, int],
    runs: list[PipelineRun],
) -> dict[str, UpdateResult]:
    """Trains roles in one schedule; adds how it ran on this rank to `runs`."""
    config = job.config
    tasks: list[Task] = []
    for name in names:
        settings = config.critic if name == "critic" else config.actor
        role = job.critic if name == "critic" else job.actor
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
        if role is not None:
            objective = build_objective(job, role, judged)
            tasks.append(Task(role, mini_batches, objective, settings.loss_agg_mode.value, updates[name]))
        updates[name] += len(mini_batches)
    done: dict[str, UpdateResult] = {}
    offloads = [job.offloads[task.role.name] for task in tasks if task.role.name in job.offloads]
    if tasks:
        for offload in offloads:
            offload.return_all()
        choice = config.pipeline.schedule.value
        options = PipelineOptions("auto" if len(tasks) == 1 and choice == "fused" else choice,
                                  config.pipeline.max_live_micro_batches)  # fmt: skip
        done, run = update_roles(tasks, batch, judged.mask, options, watch.profile)
        runs.append(run)
        for offload in offloads:
            offload.leave(keeps_params=True)
    box = [done]
    dist.broadcast_object_list(box, src=job.topologies[names[0]].ranks[0], device=torch.device("cpu"))
    return box[0]


def build_objective(job: Job, role: Role, judged: Judged) -> Objective:
    if role is job.critic:
        return build_critic_objective(role, job.config.critic, judged.scores)
    temperature, fused = job.config.rollout.temperature, job.config.algorithm.fused_logprob
    return build_actor_objective(role, job.config.actor, temperature, judged.scores, fused)
