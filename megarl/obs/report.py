"""Tables for people: the summary at the end of a run, and answers before and after side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Accuracy:
    """Shares of right held-out answers: one greedy answer a prompt, and sampled ones (None = not drawn)."""

    greedy: float
    sampled: float | None = None


@dataclass(frozen=True)
class PhaseCost:
    """What one phase took over the whole run; `num_tokens` is 0 where tokens are not what it works on."""

    seconds: float
    num_tokens: int = 0


@dataclass(frozen=True)
class SampleAnswer:
    """One held-out prompt with the greedy answer before and after training."""

    prompt: str
    before: str
    after: str


def print_summary(
    console: Console,
    before: Accuracy | None,
    after: Accuracy | None,
    phases: Mapping[str, PhaseCost],
    total_s: float,
    run_dir: Path,
) -> None:
    """Prints held-out accuracy before and after, then seconds and tokens/s by phase.

    Args:
        before: None when the run did not validate before training.
        after: None when it never validated.
        phases: by name, in the order they are to be shown; they need not add up to `total_s`.
        total_s: wall seconds of the run.
        run_dir: named in the last line.
    """
    if after is not None:
        console.print(build_accuracy_table(before, after))
    console.print(build_phase_table(phases, total_s))
    console.print(f"everything of this run: {run_dir}", markup=False, highlight=False, soft_wrap=True)


def build_accuracy_table(before: Accuracy | None, after: Accuracy) -> Table:
    table = Table(title="held-out accuracy", title_justify="left")
    for name in ("", "before", "after", "change"):
        table.add_column(name, justify="left" if not name else "right")
    for kind in ("greedy", "sampled"):
        first = getattr(before, kind) if before is not None else None
        last = getattr(after, kind)
        change = Text("")
        if first is not None and last is not None:
            change = Text(f"{last - first:+.3f}", style="green" if last > first else "red")
        table.add_row(kind, _share(first), _share(last), change)
    return table


def build_phase_table(phases: Mapping[str, PhaseCost], total_s: float) -> Table:
    table = Table(title="time by phase", title_justify="left")
    for name in ("", "seconds", "share", "tokens/s"):
        table.add_column(name, justify="left" if not name else "right")
    for name, cost in phases.items():
        speed = f"{cost.num_tokens / cost.seconds:,.0f}" if cost.num_tokens and cost.seconds > 0 else ""
        table.add_row(name, f"{cost.seconds:.1f}", f"{cost.seconds / total_s:.0%}" if total_s > 0 else "", speed)
    table.add_section()
    table.add_row("whole run", f"{total_s:.1f}", "", "")
    return table


def print_samples(console: Console, samples: Sequence[SampleAnswer], max_chars: int = 300) -> None:
    """Prints prompts with the answers before and after; long texts are cut in the middle, and say so."""
    table = Table(title="sample answers", title_justify="left", show_lines=True)
    for name in ("prompt", "before", "after"):
        table.add_column(name, overflow="fold", ratio=1)
    for sample in samples:
        table.add_row(*(Text(shorten(text, max_chars)) for text in (sample.prompt, sample.before, sample.after)))
    console.print(table)


def shorten(text: str, max_chars: int) -> str:
    """`text`, with its middle replaced by a count of what is missing when it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} …({len(text) - 2 * half} more)… {text[-half:]}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
