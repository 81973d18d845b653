"""What people see of a run: lines, files, the closing tables and the picture. Only rank 0 writes anything."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import device
from megarl.config.load import dump_config
from megarl.config.schema import ActorConfig, Config, CriticConfig
from megarl.job import Job
from megarl.models.layout import HeadKind
from megarl.models.registry import read_model_spec
from megarl.obs.dump import write_rollouts
from megarl.obs.metrics import MetricsLogger, PhaseTimer
from megarl.obs.report import Accuracy, PhaseCost, SampleAnswer, print_samples, print_summary
from megarl.parallel.topology import Topology
from megarl.records import PackedBatch, Prompt, Rollout
from megarl.reward.score import Rewards
from megarl.trainer.judge import Judged, describe
from megarl.trainer.offload import Offload
from megarl.trainer.roles import Role
from megarl.validation import Validation
from megarl.weights.gather import gather_hf_tensors
from megarl.weights.hf_export import BackgroundExport

log = logging.getLogger(__name__)


class RunReport:
    """Collects what happened and writes it; every rank has one, and on ranks other than 0 it stays silent.

    `export` is a collective of the world; everything else is local.
    """

    def __init__(
        self,
        config: Config,
        total_steps: int,
        first_step: int = 0,
        kept: Mapping[str, Any] | None = None,
        history: str = "",
    ) -> None:
        """Args:
        first_step: steps that a resumed run has behind it; `kept` (see `to_plain`) and `history`, the metrics file up
            to there, are then what its checkpoint holds.
        """
        self._config = config
        self._started, self._earlier_s = time.perf_counter(), 0.0
        assert config.trainer.default_local_dir is not None
        self.run_dir = Path(config.trainer.default_local_dir)
        self._before: Validation | None = None
        self._after: Validation | None = None
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._logger: MetricsLogger | None = None
        self._export = BackgroundExport()
        if kept is not None:
            self._seconds, self._tokens = dict(kept["seconds"]), dict(kept["tokens"])
            self._earlier_s = kept["whole_s"]
            if kept["before"] is not None:
                self._before = Validation(Accuracy(**kept["before"]), {}, kept["answers"], 0)
        if dist.get_rank() == 0:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            metrics = self.run_dir / "metrics.jsonl"
            metrics.unlink(
                missing_ok=True
            )  # a run that starts at step 0 is a new run; a resumed one forgets later steps
            if history:
                metrics.write_text(history)
            (self.run_dir / "config.yaml").write_text(dump_config(config))
            trainer = config.trainer
            self._logger = MetricsLogger(
                self.run_dir,
                trainer.logger,
                total_steps,
                trainer.project_name,
                trainer.experiment_name,
                first_step=first_step,
            )

    def to_plain(self) -> dict[str, Any]:
        """What the closing tables need of the steps so far, for a checkpoint."""
        shown = self._config.trainer.num_samples_to_show
        before = self._before
        return {
            "seconds": self._seconds,
            "tokens": self._tokens,
            "whole_s": self._whole_s(),
            "before": None if before is None else asdict(before.accuracy),
            "answers": [] if before is None else before.answers[:shown],
        }

    def _whole_s(self) -> float:
        """Seconds of this start, and of those before it up to their checkpoint."""
        return self._earlier_s + time.perf_counter() - self._started

    def metrics_text(self) -> str:
        """The metrics file so far; empty where there is none."""
        file = self.run_dir / "metrics.jsonl"
        return file.read_text() if dist.get_rank() == 0 and file.is_file() else ""

    def warn(self, sources: Sequence[str]) -> None:
        """Tells of updates that were left out, on rank 0."""
        for source in sources if self._logger is not None else ():
            log.warning("an update was left out, no weight has changed: %s", source)

    def note(self, text: str) -> None:
        """Tells a line, on rank 0."""
        if self._logger is not None:
            self._logger.note(text)

    def log(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Writes metrics that are not a step's: those before the first."""
        if self._logger is not None:
            self._logger.log(step, epoch, metrics)

    def validated(self, step: int, validation: Validation) -> None:
        """Notes a validation; the first one is "before", the last one "after"."""
        if step == 0:
            self._before = validation
            self.log(0, 1, validation.metrics)
        self._after = validation

    def step(
        self,
        step: int,
        epoch: int,
        metrics: dict[str, float],
        timer: PhaseTimer,
        seconds: float,
        batch: PackedBatch,
    ) -> None:
        """Writes one step's metrics."""
        timing = timer.take()
        num_tokens = batch.num_tokens
        for name, spent in timing.items():
            phase = name.removeprefix("timing_s/")
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent
            tokens = {"gen": int(batch.response_mask.sum()), "reward": 0, "adv": 0, "sync": 0, "testing": 0, "save": 0}
            self._tokens[phase] = self._tokens.get(phase, 0) + tokens.get(phase, num_tokens)
        metrics |= timing | {
            "timing_s/step": seconds,
            "perf/total_num_tokens": float(num_tokens),
            "perf/time_per_step": seconds,
            "perf/throughput": num_tokens / (seconds - timing.get("timing_s/testing", 0.0)),
            "perf/peak_memory_gib": device.peak_memory_bytes() / 2**30,
            "training/global_step": float(step),
            "training/epoch": float(epoch),
        }
        if self._logger is not None:
            self._logger.log(step, epoch, metrics)

    def dump(
        self,
        step: int,
        prompts: Sequence[Prompt],
        rollouts: Sequence[Rollout],
        texts: Sequence[str],
        rewards: Rewards,
        batch: PackedBatch,
        judged: Judged,
    ) -> None:
        """Writes the step's answers as jsonl, where the configuration asks for it."""
        every = self._config.trainer.rollout_dump_freq
        if self._logger is None or not every or step % every:
            return
        bounds = batch.cu_seqlens.tolist()
        assert judged.scores.advantages is not None
        rows = []
        for b, (rollout, text) in enumerate(zip(rollouts, texts, strict=True)):
            span = slice(bounds[b + 1] - len(rollout.token_ids), bounds[b + 1])
            prompt = prompts[rollout.prompt_index]
            rows.append(
                {
                    "row": prompt.row,
                    "sample": rollout.sample,
                    "prompt": prompt.text,
                    "response": text,
                    "ground_truth": prompt.ground_truth,
                    "reward": None if bool(rewards.is_failed_mask[b]) else float(rewards.scores[b]),
                    "is_finished": rollout.is_finished,
                    "weights_version": rollout.weights_version,
                    "token_ids": rollout.token_ids,
                    "rollout_logprobs": rollout.logprobs,
                    "advantages": judged.scores.advantages[span],
                }
            )
        write_rollouts(self.run_dir, step, rows)

    def export(
        self, roles: Sequence[Exported], offloads: Mapping[str, Offload], step: int, is_last: bool, is_due: bool
    ) -> None:
        """Writes roles as Hugging Face folders, where asked; a collective.

        Only the gathering holds the run up: the files are written on a thread, and one that fails is told.
        """
        self._tell_of_exports()
        trainer = self._config.trainer
        if not (trainer.save_hf and (is_due or is_last)) and not (is_last and trainer.save_hf_at_end):
            return
        for offload in offloads.values():
            offload.return_params()
        for each in roles:
            export_role(each, self.run_dir / "hf" / f"step_{step}" / each.name, self._export)

    def wait_for_export(self) -> None:
        """Returns when nothing is being written any more."""
        self._export.wait()
        self._tell_of_exports()

    def _tell_of_exports(self) -> None:
        for line in self._export.take_messages():
            self.note(line)

    def finish(self, held_out: Sequence[Prompt] = (), tokenizer: Any = None) -> None:
        """Prints the closing tables and draws the picture.

        Args:
            held_out: the validated prompts, some of which are shown with their answers; `tokenizer` decodes them.
        """
        if self._logger is None:
            return
        self._logger.close()
        console = self._logger.console
        after = self._after
        before = self._before if self._before is not after else None
        if before is not None and after is not None:
            count = self._config.trainer.num_samples_to_show
            asked = [prompt.token_ids for prompt in held_out[:count]]
            shown = zip(
                tokenizer.batch_decode(asked, skip_special_tokens=True),
                before.answers[:count],
                after.answers[:count],
                strict=False,  # a checkpoint holds as many answers as were shown when it was made
            )
            print_samples(console, [SampleAnswer(prompt.strip(), first, last) for prompt, first, last in shown])
        phases = {name: PhaseCost(spent, self._tokens.get(name, 0)) for name, spent in self._seconds.items()}
        accuracies = (before and before.accuracy, after and after.accuracy)
        print_summary(console, *accuracies, phases, self._whole_s(), self.run_dir)
        if "jsonl" in self._config.trainer.logger:
            from megarl.obs.plot import plot_run  # matplotlib takes a second to import

            title = f"{self._config.trainer.project_name} / {self._config.trainer.experiment_name}"
            plot_run(self.run_dir / "metrics.jsonl", self.run_dir / "progress.png", title)


@dataclass(frozen=True)
class Exported:
    """A role that is written as a Hugging Face folder `name`; `role` is None on ranks outside `topology`."""

    name: str
    role: Role | None
    topology: Topology
    settings: ActorConfig | CriticConfig
    head: HeadKind


def list_exports(job: Job, is_last: bool) -> list[Exported]:
    """The actor; after the last step the critics too."""
    heads: dict[str, HeadKind] = {"actor": "policy"}
    if is_last:
        heads |= dict.fromkeys(job.critics, "value")
    return [
        Exported(name, job.role(name), job.topologies[name], job.settings(name), head) for name, head in heads.items()
    ]


def export_role(exported: Exported, out: Path, export: BackgroundExport) -> None:
    """Hands one role to `export` on rank 0, to be written as a Hugging Face folder; a collective of the world."""
    source = exported.settings.model_path
    assert source is not None
    tensors, dtype = gather_role(exported)
    if dist.get_rank() == 0:
        export.run(tensors, out, source, dtype)
    else:
        for _ in tensors:
            continue


def gather_role(exported: Exported) -> tuple[Iterator[tuple[str, Tensor]], torch.dtype]:
    """One role's tensors by their Hugging Face names, whole on rank 0, and the dtype it computes in.

    To run through the tensors is a collective of the world.
    """
    settings = exported.settings
    assert settings.model_path is not None
    family, spec = read_model_spec(settings.model_path)
    dtype = device.pick_dtype(settings.dtype.value)
    weights = None if exported.role is None else exported.role.weights()
    return gather_hf_tensors(family, spec, exported.topology, weights, dtype, device.device(), exported.head), dtype


def describe_batch(batch: PackedBatch, judged: Judged, rewards: Rewards) -> dict[str, float]:
    """The numbers of a step that need no model: lengths, rewards, and the gap between sampler and trainer."""
    mask = batch.response_mask
    counts = torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(
        0, torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths), mask.double()
    )
    metrics = dict(judged.metrics)
    metrics |= describe("response_length", counts)
    metrics |= describe("prompt_length", batch.lengths.double() - counts)
    metrics["response_length/clip_ratio"] = float((~batch.is_finished).double().mean())
    metrics["reward/failed_share"] = float(rewards.is_failed_mask.double().mean())
    metrics |= {f"reward/{name}": value for name, value in rewards.metrics.items()}
    return metrics
