"""What people see of a run: lines, files, the closing tables and the picture. Only rank 0 writes anything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import device
from megarl.config.load import dump_config
from megarl.config.schema import Config
from megarl.job import Job, uses_critic
from megarl.models.layout import HeadKind
from megarl.obs.dump import write_rollouts
from megarl.obs.metrics import MetricsLogger, PhaseTimer
from megarl.obs.report import PhaseCost, SampleAnswer, print_samples, print_summary
from megarl.records import PackedBatch, Prompt, Rollout
from megarl.reward.score import Rewards
from megarl.trainer.ppo import Judged, describe
from megarl.validation import Validation
from megarl.weights.gather import gather_hf_tensors
from megarl.weights.hf import save_hf_folder


class RunReport:
    """Collects what happened and writes it; every rank has one, and on ranks other than 0 it stays silent.

    `export` is a collective of the world; everything else is local.
    """

    def __init__(self, config: Config, total_steps: int) -> None:
        self._config = config
        self._started = time.perf_counter()
        assert config.trainer.default_local_dir is not None
        self.run_dir = Path(config.trainer.default_local_dir)
        self._before: Validation | None = None
        self._after: Validation | None = None
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._logger: MetricsLogger | None = None
        if dist.get_rank() == 0:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / "metrics.jsonl").unlink(missing_ok=True)  # a run that starts at step 0 is a new run
            (self.run_dir / "config.yaml").write_text(dump_config(config))
            trainer = config.trainer
            self._logger = MetricsLogger(
                self.run_dir, trainer.logger, total_steps, trainer.project_name, trainer.experiment_name
            )

    def validated(self, step: int, validation: Validation) -> None:
        """Notes a validation; the first one is "before", the last one "after"."""
        if step == 0:
            self._before = validation
            if self._logger is not None:
                self._logger.log(0, 1, validation.metrics)
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
            tokens = {"gen": int(batch.response_mask.sum()), "reward": 0, "adv": 0, "sync": 0, "testing": 0}
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

    def export(self, job: Job, step: int, is_last: bool) -> None:
        """Writes the actor (and at the end the critic) as Hugging Face folders, where asked; a collective."""
        trainer = self._config.trainer
        is_due = trainer.save_freq > 0 and step % trainer.save_freq == 0
        if not (is_due or (is_last and trainer.save_hf_at_end)):
            return
        heads: dict[str, HeadKind] = {"actor": "policy", "critic": "value"}
        for name, head in heads.items():
            if name == "critic" and not uses_critic(self._config):
                continue
            if name in job.offloads:
                job.offloads[name].return_params()
            export_role(job, name, head, self.run_dir / "hf" / f"step_{step}" / name)
        if self._logger is not None:
            self._logger.note(f"saved {self.run_dir / 'hf' / f'step_{step}'}")

    def finish(self, job: Job) -> None:
        """Prints the closing tables and draws the picture."""
        if self._logger is None:
            return
        self._logger.close()
        console = self._logger.console
        if self._after is not None:
            before = self._before if self._before is not self._after else None
            if before is not None:
                asked = [prompt.token_ids for prompt in job.data.held_out]
                shown = zip(
                    job.data.tokenizer.batch_decode(asked, skip_special_tokens=True),
                    before.answers,
                    self._after.answers,
                    strict=True,
                )
                samples = [SampleAnswer(prompt.strip(), first, last) for prompt, first, last in shown]
                print_samples(console, samples[: self._config.trainer.num_samples_to_show])
            phases = {name: PhaseCost(spent, self._tokens.get(name, 0)) for name, spent in self._seconds.items()}
            total_s = time.perf_counter() - self._started
            print_summary(
                console, before.accuracy if before else None, self._after.accuracy, phases, total_s, self.run_dir
            )
        if "jsonl" in self._config.trainer.logger:
            from megarl.obs.plot import plot_run  # matplotlib takes a second to import

            title = f"{self._config.trainer.project_name} / {self._config.trainer.experiment_name}"
            plot_run(self.run_dir / "metrics.jsonl", self.run_dir / "progress.png", title)


def export_role(job: Job, name: str, head: HeadKind, out: Path) -> None:
    """Writes one role as a Hugging Face folder; a collective of the world."""
    from megarl.models.registry import read_model_spec

    settings = job.config.critic if name == "critic" else job.config.actor
    role = job.critic if name == "critic" else job.actor
    assert settings.model_path is not None
    family, spec = read_model_spec(settings.model_path)
    dtype = device.pick_dtype(settings.dtype.value)
    weights = None if role is None else role.weights()
    tensors = gather_hf_tensors(family, spec, job.topologies[name], weights, dtype, device.device(), head)
    if dist.get_rank() == 0:
        save_hf_folder(tensors, out, settings.model_path, dtype)
    else:
        for _ in tensors:
            continue


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
    old = judged.scores.old_logprobs
    if old is not None and bool(mask.any()):
        gap = (old - batch.rollout_logprobs)[mask].abs().double()
        metrics["rollout/logprob_gap"] = float(gap.mean())
        metrics["rollout/logprob_gap_max"] = float(gap.max())
    return metrics
