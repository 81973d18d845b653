"""Keeps a run: takes it up where a checkpoint left it, saves it when it is due, and ends it early when asked to.

    choose_checkpoint (before anything is built)  ->  Keeper.start: state for the loop  ->  Keeper.after_step, each step
                                                                                        ->  Keeper.close

After every step the ranks agree in one small all-reduce on what each of them may have seen alone: a signal, the end of
the time, a checkpoint that is still being written. So all of them save and stop after the same step.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import platform
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megarl import __version__
from megarl.config.load import ConfigError, dump_config
from megarl.config.needs import trained_roles
from megarl.config.schema import Config, ResumeMode
from megarl.job import Job, open_job
from megarl.launch.ending import Ending
from megarl.launch.stop import REQUEUE_EXIT, StopRequest
from megarl.obs.metrics import PhaseTimer
from megarl.report import Exported, RunReport, list_exports
from megarl.reward.verdict import Scorer
from megarl.rollout.prompts import PromptStream, StreamPosition
from megarl.trainer import checkpoint_files as files
from megarl.trainer.checkpoint import CheckpointWriter, load_roles, read_rng, read_state
from megarl.trainer.offload import Offload
from megarl.trainer.rng import restore_rng
from megarl.trainer.role_state import find_mismatches
from megarl.trainer.roles import Role
from megarl.trainer.run_state import RunState, run_state_from
from megarl.trainer.sharded_folder import CheckpointFailed

log = logging.getLogger(__name__)

PACKAGES = ("torch", "megatron-core", "vllm", "transformers", "numpy")


@dataclass(frozen=True)
class Resume:
    """The checkpoint that a run goes on from, and its `state.json`; the same on every rank."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def check_data(self, stream: PromptStream) -> None:
        """Raises ConfigError when the run would go on with other data: its place in them would mean nothing."""
        was, now = self.state["data"], describe_data(stream)
        if was != now:
            raise ConfigError([
                f"{self.path} was made with other training data ({was['prompts']} prompts, {was['steps_per_epoch']} "
                f"steps an epoch; now {now['prompts']} and {now['steps_per_epoch']}) or another order of them; keep "
                "data.train_files, data.train_batch_size, data.seed, data.shuffle and what makes prompts of rows, or "
                "start anew with trainer.resume_mode=disable"
            ])  # fmt: skip


def open_run(
    config: Config, stop: StopRequest, given: Mapping[str, Scorer] = MappingProxyType({})
) -> tuple[Job, RunReport, Keeper]:
    """Sets a run up, from the checkpoint that `trainer.resume_mode` leads to if there is one; a collective.

    Args:
        stop: what may ask this rank to stop.
        given: see `open_job`.

    Raises:
        ConfigError: something about the user's files or options that only shows when they are read.
    """
    resume = choose_checkpoint(config)
    job = open_job(config, None if resume is None else resume.check_data, given)
    report = open_report(config, job.total_steps, resume)
    return job, report, Keeper(keep_job(job), report, resume, stop)


def checkpoint_root(config: Config) -> Path:
    """Where the checkpoints of this run are."""
    assert config.trainer.default_local_dir is not None
    return Path(config.trainer.default_local_dir) / "checkpoints"


def choose_checkpoint(config: Config) -> Resume | None:
    """What `trainer.resume_mode` leads to; rank 0 looks, all ranks get the same. A collective of the world.

    Raises:
        ConfigError: on every rank: `path` names no complete checkpoint, or one of other roles.
    """
    box: list[Any] = [None, []]
    if dist.get_rank() == 0:
        try:
            box[0] = _look_for_checkpoint(config)
        except ValueError as error:
            box[1] = [str(error)]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if box[1]:
        raise ConfigError(box[1])
    return box[0]


def _look_for_checkpoint(config: Config) -> Resume | None:
    trainer, root = config.trainer, checkpoint_root(config)
    if trainer.resume_mode is ResumeMode.disable:
        found = None
    elif trainer.resume_mode is ResumeMode.path:
        assert trainer.resume_from_path is not None
        found = Path(trainer.resume_from_path)
        if not (found / files.COMPLETE).exists():  # perhaps the folder of a run, or of its checkpoints
            inner = [files.find_newest(path).path for path in (found, found / "checkpoints")]
            found = next((path for path in inner if path is not None), found)
        why = files.why_incomplete(found)
        if why:
            raise ValueError(f"trainer.resume_from_path={trainer.resume_from_path}: {why}; name a complete checkpoint")
    else:
        newest = files.find_newest(root)
        for line in newest.skipped:
            log.warning("passed over %s", line)
        found = newest.path
    if found is None:
        return None
    resume = Resume(found, read_state(found))
    has, needs = set(resume.state["roles"]), set(trained_roles(config))
    if has != needs:
        raise ValueError(
            f"{found} holds {' and '.join(sorted(has))}, this configuration trains {' and '.join(sorted(needs))}; "
            "keep algorithm.adv_estimator, or start anew with trainer.resume_mode=disable"
        )
    now = describe_versions()
    for name, was in resume.state["versions"].items():
        if was != now.get(name, was):
            log.warning(
                "%s was made with %s %s, here is %s: results may differ in the last digits", found, name, was, now[name]
            )
    for line in _list_changes(found, config):
        log.warning("resumed with %s", line)
    return resume


def _list_changes(path: Path, config: Config) -> list[str]:
    """Options that are not what they were, one line each."""
    was = dict(_flat_lines((path / "config.yaml").read_text()))
    now = dict(_flat_lines(dump_config(config)))
    names = [name for name in now if not name.startswith(("trainer.resume", "trainer.max_wall"))]
    return [f"{name}={now[name]} (was {was.get(name, 'not there')})" for name in names if was.get(name) != now[name]]


def _flat_lines(text: str) -> list[tuple[str, str]]:
    """("section.key", value as YAML) of a dumped configuration."""
    import yaml

    flat: list[tuple[str, str]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat.append((prefix, str(value)))

    walk("", yaml.safe_load(text))
    return flat


def open_report(config: Config, total_steps: int, resume: Resume | None) -> RunReport:
    """The report of a run, with its past where it has one: steps, the report's own state, the metrics file."""
    if resume is None:
        return RunReport(config, total_steps)
    metrics = resume.path / "metrics.jsonl"
    history = metrics.read_text() if metrics.is_file() else ""
    return RunReport(config, total_steps, resume.step, resume.state["report"], history)


def describe_data(stream: PromptStream) -> dict[str, Any]:
    """What must be the same for a position in the training data to mean the same prompts."""
    return {
        "prompts": stream.num_prompts,
        "steps_per_epoch": stream.steps_per_epoch,
        "fingerprint": stream.fingerprint(),
    }


def describe_versions() -> dict[str, str]:
    """Versions of megarl and what it computes with."""
    versions = {"megarl": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@dataclass(frozen=True)
class Kept:
    """What a job gives into keeping.

    roles: those that learn, by name, in the same order on all ranks; None where this rank is outside.
    sync_weights: hands the engines the actor's weights of a version; its metrics.
    list_exports: the roles to write as Hugging Face folders, after the last step (True) or before.
    """

    config: Config
    roles: dict[str, Role | None]
    stream: PromptStream
    total_steps: int
    offloads: dict[str, Offload]
    sync_weights: Callable[[int], dict[str, float]]
    list_exports: Callable[[bool], list[Exported]]


def keep_job(job: Job) -> Kept:
    """What training on rewards gives into keeping."""
    return Kept(
        config=job.config,
        roles={name: job.role(name) for name in trained_roles(job.config)},
        stream=job.data.stream,
        total_steps=job.total_steps,
        offloads=job.offloads,
        sync_weights=job.sync_weights,
        list_exports=lambda is_last: list_exports(job, is_last),
    )


class Keeper:
    """One rank's part in keeping a run; every method is a collective of the world.

    Args:
        job: what is kept.
        resume: what `choose_checkpoint` gave.
        stop: what may ask this rank to stop.
    """

    def __init__(self, job: Kept, report: RunReport, resume: Resume | None, stop: StopRequest) -> None:
        trainer = job.config.trainer
        self._job, self._report, self._resume, self._stop = job, report, resume, stop
        self._root = checkpoint_root(job.config)
        self._data = describe_data(job.stream)
        self._writer = CheckpointWriter(
            self._root, job.roles, trainer.max_ckpt_to_keep, trainer.async_save, job.offloads
        )
        self._failed_in_a_row = 0
        self._save_s = self._step_started = 0.0
        self.ending = Ending(0, f"all {job.total_steps} steps are done")

    def start(self) -> tuple[RunState, dict[str, float]]:
        """Restores everything from the checkpoint, or begins anew; then the engines get the actor's weights.

        Returns:
            The state for the loop, and the metrics of that first transfer.
        """
        state = RunState(updates=dict.fromkeys(self._job.roles, 0))
        resume = self._resume
        if resume is not None:
            started = time.perf_counter()
            adam_steps = {name: facts["adam_step"] for name, facts in resume.state["roles"].items()}
            for name, role in self._job.roles.items():
                problems = [] if role is None else find_mismatches(role, resume.path / name, adam_steps[name])
                if problems:
                    raise ConfigError([f"{resume.path / name}: {problem}" for problem in problems])
            load_roles(resume.path, self._job.roles)
            state = run_state_from(resume.state["run"])
            self._job.stream.seek(StreamPosition(**resume.state["stream"]))
            log.info("resumed from %s in %.1f s", resume.path, time.perf_counter() - started)
            self._warn_of_schedules(resume)
            if state.step >= self._job.total_steps:
                log.warning("all %d steps are done already", self._job.total_steps)
        if dist.get_rank() == 0:
            aside = files.set_aside(self._root, state.step) if self._root.is_dir() else None
            if aside is not None:
                log.warning("checkpoints beyond step %d are of an earlier run; they are now in %s", state.step, aside)
        sync_metrics = self._job.sync_weights(state.weights_version)
        if resume is not None:
            rng = read_rng(resume.path, dist.get_rank())
            if rng is None:
                log.warning("%s is of fewer ranks: this one's random numbers begin anew", resume.path)
            else:
                restore_rng(rng)
        self._step_started = time.perf_counter()
        return state, sync_metrics

    def after_step(self, state: RunState, timer: PhaseTimer) -> bool:
        """Saves what is due after `state.step` steps.

        Returns:
            True when the run is to end now, saved, as `ending` says.
        """
        with timer.phase("save"):
            return self._after_step(state)

    def _after_step(self, state: RunState) -> bool:
        trainer, is_last = self._job.config.trainer, state.step == self._job.total_steps
        seconds, self._step_started = time.perf_counter() - self._step_started, time.perf_counter()
        number, is_time_over, is_writing = self._agree(seconds)
        is_asked = bool(number or is_time_over) and not is_last
        is_due = trainer.save_freq > 0 and (is_last or state.step % trainer.save_freq == 0)
        if self._writer.is_pending and (is_due or is_asked or is_last or not is_writing):
            self._finish(must_succeed=False)
        if is_due or is_asked:
            self._save(state, must_succeed=is_asked or is_last)
        self._report.export(self._job.list_exports(is_last), self._job.offloads, state.step, is_last, is_due)
        if is_asked:
            why = signal.Signals(number).name if number else f"trainer.max_wall_time_s={trainer.max_wall_time_s}"
            self.ending = Ending(REQUEUE_EXIT, f"{why}: saved after step {state.step}")
            self._report.note(f"{self.ending.why}; the same command goes on from here")
        self._step_started = time.perf_counter()
        return is_asked

    def close(self) -> None:
        """Waits for a checkpoint and an export that are still being written."""
        if self._writer.is_pending:
            self._finish(must_succeed=True)
        self._report.wait_for_export()

    def _agree(self, step_s: float) -> tuple[int, bool, bool]:
        """What any rank has seen: the largest signal number, the time is over, somebody still writes."""
        seen = torch.tensor([
            self._stop.signal_number,
            int(self._stop.is_time_over(step_s, self._save_s)),
            int(self._writer.is_writing),
        ])  # fmt: skip
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return int(seen[0]), bool(seen[1]), bool(seen[2])

    def _save(self, state: RunState, must_succeed: bool) -> None:
        started = time.perf_counter()
        job = self._job
        small = {
            "run": state.to_plain(),
            "stream": dataclasses.asdict(job.stream.position),
            "data": self._data,
            "world_size": dist.get_world_size(),
            "versions": describe_versions(),
            "report": self._report.to_plain(),
        }
        texts = {"config.yaml": dump_config(job.config), "metrics.jsonl": self._report.metrics_text()}
        try:
            self._writer.begin(state.step, small, texts)
        except CheckpointFailed as error:
            self._note_failure(error, must_succeed)
            return
        if must_succeed or not job.config.trainer.async_save:
            self._finish(must_succeed)
        self._save_s = max(self._save_s, time.perf_counter() - started)

    def _finish(self, must_succeed: bool) -> None:
        try:
            path = self._writer.finish()
        except CheckpointFailed as error:
            self._note_failure(error, must_succeed)
            return
        self._failed_in_a_row = 0
        self._report.note(f"saved {path}")

    def _note_failure(self, error: CheckpointFailed, must_succeed: bool) -> None:
        """Goes on without this checkpoint, unless it was the last chance or too many failed."""
        self._failed_in_a_row += 1
        limit = self._job.config.trainer.max_failed_saves
        if must_succeed or self._failed_in_a_row > limit:
            raise error
        if dist.get_rank() == 0:
            log.error("not saved (%d in a row, trainer.max_failed_saves=%d): %s", self._failed_in_a_row, limit, error)

    def _warn_of_schedules(self, resume: Resume) -> None:
        for name, role in self._job.roles.items():
            was = resume.state["roles"][name]["schedule"]
            if role is not None and role.training is not None and vars(role.training.schedule) != was:
                log.warning("%s: the learning rate follows %s, before it was %s", name, role.training.schedule, was)
