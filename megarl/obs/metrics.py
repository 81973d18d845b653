"""Metrics of a run: one console line a step, `metrics.jsonl`, TensorBoard, W&B; and the seconds of each phase.

    PhaseTimer ──> {"timing_s/gen": 9.8, ...} ┐
    the step's numbers, verl's names          ┴─> MetricsLogger.log(step, epoch, metrics) ─> every sink

    Epoch 1 | Step 3 | Actor Loss: -0.0123 | Critic Loss: 0.0456 | KL: 0.0012 | Reward: 0.417 | Len: 11.2 | tok/s: 712

Only rank 0 opens a `MetricsLogger`. A step with a sink that fails is an error of the run, not a lost line.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SINKS = ("console", "jsonl", "tensorboard", "wandb")

# What the console line shows: label, the metrics to take it from (the first one there is), format.
CONSOLE_FIELDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Actor Loss", ("actor/pg_loss",), ".4f"),
    ("Critic Loss", ("critic/vf_loss",), ".4f"),
    ("Loss", ("preference/loss",), ".4f"),
    ("Accuracy", ("preference/accuracy",), ".3f"),
    ("KL", ("actor/reward_kl_penalty", "actor/kl_loss"), ".4f"),
    ("Reward", ("critic/score/mean", "critic/rewards/mean"), ".3f"),
    ("Cost", ("cost/mean",), ".3f"),
    ("λ", ("lagrange/multiplier",), ".3f"),
    ("Len", ("response_length/mean",), ".1f"),
    ("tok/s", ("perf/throughput",), ".0f"),
    ("Held-out loss", ("val/loss",), ".4f"),
    ("accuracy", ("val/accuracy",), ".3f"),
    ("Held-out greedy", ("val/accuracy_greedy",), ".3f"),
    ("sampled", ("val/accuracy_sampled",), ".3f"),
)


def format_step_line(step: int, epoch: int, metrics: Mapping[str, float]) -> str:
    """The console line of one step; a field whose metric is absent is left out."""
    parts = [f"Epoch {epoch}", f"Step {step}"]
    for label, names, spec in CONSOLE_FIELDS:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            parts.append(f"{label}: {value:{spec}}")
    return " | ".join(parts)


class PhaseTimer:
    """Seconds spent in each phase of a step; phases may nest, and the same phase adds up.

    An exception that leaves a phase carries the note `phase: NAME` of the innermost one.

    Args:
        synchronize: called before each clock reading, so that work queued on a GPU is counted where it belongs.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside the `with` to `timing_s/<name>`."""
        start = self._now()
        try:
            yield
        except BaseException as error:
            if not any(note.startswith("phase: ") for note in getattr(error, "__notes__", ())):
                error.add_note(f"phase: {name}")
            raise
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the last `take`."""
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """`{"timing_s/<phase>": seconds}` since the last call, and starts anew."""
        taken = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


class MetricsLogger:
    """Writes the metrics of each step to every sink; a context manager.

    Args:
        run_dir: holds `metrics.jsonl` and `tensorboard/`. A resumed run continues both, a new one starts over.
        sinks: of `SINKS`.
        total_steps: for the progress bar.
        project, experiment: names for W&B.
        config: the resolved configuration, for W&B.
        first_step: steps that a resumed run has behind it; 0 = a new run.
        console: where lines go; unset = standard output.

    Raises:
        ValueError: an unknown sink, or `wandb` without its package.
    """

    def __init__(
        self,
        run_dir: Path,
        sinks: Sequence[str],
        total_steps: int,
        project: str = "megarl",
        experiment: str = "run",
        config: Mapping[str, Any] | None = None,
        first_step: int = 0,
        console: Console | None = None,
    ) -> None:
        unknown = [sink for sink in sinks if sink not in SINKS]
        if unknown:
            raise ValueError(f"trainer.logger={list(sinks)}: {unknown} is unknown; use some of {', '.join(SINKS)}")
        run_dir.mkdir(parents=True, exist_ok=True)
        self.console = console or build_console()
        self._wandb = _open_wandb(run_dir, project, experiment, config, self.console) if "wandb" in sinks else None
        self._tensorboard = _open_tensorboard(run_dir, first_step) if "tensorboard" in sinks else None
        self._jsonl = (run_dir / "metrics.jsonl").open("a" if first_step else "w") if "jsonl" in sinks else None
        self._is_console = "console" in sinks
        self._progress: Progress | None = None
        if self._is_console and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._task = self._progress.add_task("steps", total=total_steps, completed=first_step)
            self._progress.start()

    def log(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Writes one step. `metrics.jsonl` gets one flat line, flushed; a value that is not finite is null there."""
        if self._jsonl is not None:
            row = {"step": step, "epoch": epoch} | {name: _as_json(value) for name, value in metrics.items()}
            self._jsonl.write(json.dumps(row, allow_nan=False) + "\n")
            self._jsonl.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log({"epoch": epoch, **metrics}, step=step)
        if self._is_console:
            self.note(format_step_line(step, epoch, metrics))
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def note(self, text: str) -> None:
        """Prints a line above the progress bar, as it is: no markup, no wrapping."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Takes the bar away and closes every sink; may be called twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._jsonl is not None:
            self._jsonl.close()
            self._jsonl = None
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def build_console() -> Console:
    """Standard output; 120 columns and no colours where it is not a terminal."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, in order; of rows with one step (a resumed run) the later values win.

    Returns:
        One dict a step, sorted by step.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a line of JSON ({error}); was the file cut short?") from None
        by_step.setdefault(row["step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def _as_json(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _open_tensorboard(run_dir: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # What an earlier run wrote for later steps is no longer shown.
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1 if first_step else 0)


def _open_wandb(
    run_dir: Path, project: str, experiment: str, config: Mapping[str, Any] | None, console: Console
) -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError(
            "trainer.logger names wandb, but the package wandb is not installed; "
            "run: pip install wandb, or take wandb out of trainer.logger"
        ) from None
    mode = os.environ.get("WANDB_MODE")
    if mode is None and not os.environ.get("WANDB_API_KEY") and not (Path.home() / ".netrc").exists():
        mode = "offline"
        console.print(f"wandb: no key is set, so the run is kept offline in {run_dir}/wandb (later: wandb sync)")
    return wandb.init(project=project, name=experiment, dir=str(run_dir), config=dict(config or {}), mode=mode)
