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

from megarl.config.needs import critic_roles
from megarl.job import Job, can_update_together, derive_seed
from megarl.obs.metrics import PhaseTimer
from megarl.obs.time_line import Block, draw_time_line, write_chrome_trace
from megarl.parallel.partition import plan_mini_batches
from megarl.records import PackedBatch
from megarl.residents import bring_weights
from megarl.trainer.annotate import Pass, annotate, logprob_pass, value_pass
from megarl.trainer.judge import Judged
from megarl.trainer.measured_costs import PipelineRun, Profile, merge_profile
from megarl.trainer.ppo import build_actor_objective, build_critic_objective
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
        passes = {"old_log_prob": "actor", "ref": "ref", "values": "critic", "cost_values": "cost_critic"}
        passes |= {name: name for name in job.scoring}
        self._num_chunks = {name: chunks[name] for name in ("actor", *job.critics)}
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
    job: Job, watch: PipelineWatch, batch: PackedBatch, step: int, beside: Sequence[Pass] = ()
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """[T] scores `old_log_prob`, and `ref`, `values`, `cost_values` where the algorithm needs them, on every rank; and
    metrics.

    Args:
        beside: further passes that are due (reward models), in one stream with the others where the grids agree.
    """
    bring_weights(job.offloads)
    temperature = job.config.rollout.temperature
    passes = [logprob_pass("old_log_prob", job.actor, temperature)]
    if "ref" in job.topologies:
        passes.append(logprob_pass("ref", job.ref, temperature))
    names = {"critic": "values", "cost_critic": "cost_values"}
    passes += [value_pass(names[name], critic) for name, critic in job.critics.items()]
    scores, runs = annotate([*passes, *beside], batch, watch.profile)
    metrics: dict[str, float] = {}
    for run in runs:
        metrics |= share_time(run, "timing_s/")
    return scores, metrics | watch.follow(runs, "annotate", step)


def learn(
    job: Job,
    watch: PipelineWatch,
    batch: PackedBatch,
    judged: Judged,
    step: int,
    updates: dict[str, int],
    timer: PhaseTimer,
) -> tuple[dict[str, UpdateResult], dict[str, float]]:
    """Trains the critics, and after their warm-up the actor; every rank of the job gets their statistics.

    Args:
        updates: optimizer steps taken so far, by role; counted on.
    """
    critics = critic_roles(job.config)
    names = [*critics, "actor"]
    if step <= max((settings.warmup_steps for settings in critics.values()), default=0):
        names.remove("actor")
    together = {"actor", "critic"} <= set(names) and can_update_together(job.config, job.topologies)
    groups = [[name] for name in names if not (together and name in ("actor", "critic"))]
    results: dict[str, UpdateResult] = {}
    runs: list[PipelineRun] = []
    for group in [*groups, ["actor", "critic"]] if together else groups:
        with timer.phase("update_" + "_".join(group)):
            results |= _update(job, watch, group, batch, judged, step, updates, runs)
    fused = [run for run in runs if len(run.work) > 1]
    metrics = share_time(fused[0], "timing_s/update_") if fused else {}
    return results, metrics | watch.follow(runs, "update", step)


def share_time(run: PipelineRun, prefix: str) -> dict[str, float]:
    """The time of models that ran in one schedule, in verl's names, by what each of them computed on this rank."""
    busy = {name: 0.0 for name in run.work}
    for span in run.spans:
        busy[span.step.model] += span.end - span.start
    total = max(sum(busy.values()), 1e-9)
    return {f"{prefix}{name}": run.seconds * own / total for name, own in busy.items()}


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
        settings, role = job.settings(name), job.role(name)
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
            objective, mode = build_objective(job, role, batch, judged), settings.loss_agg_mode.value
            horizon = config.data.max_response_length
            tasks.append(Task(role, mini_batches, objective, mode, updates[name], horizon))
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


def build_objective(job: Job, role: Role, batch: PackedBatch, judged: Judged) -> Objective:
    """What `role` learns from this batch."""
    config, scores = job.config, judged.scores
    if role is job.actor:
        temperature, fused = config.rollout.temperature, config.algorithm.fused_logprob
        return build_actor_objective(role, config.actor, temperature, batch, scores, job.data.policy_loss, fused)
    values, returns = {
        "critic": (scores.values, scores.returns),
        "cost_critic": (scores.cost_values, scores.cost_returns),
    }[role.name]
    assert values is not None and returns is not None, f"the advantage left the {role.name} nothing to learn"
    return build_critic_objective(role, critic_roles(config)[role.name], values, returns)
