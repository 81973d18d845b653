"""One picture of a run: reward, KL to the reference, and held-out accuracy over steps; cost and multiplier with a cost.

In: `metrics.jsonl`. Out: a PNG. A panel without data says so instead of being left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.obs.metrics import read_metrics

_INK, _SOFT = "#1f2933", "#9aa5b1"


@dataclass(frozen=True)
class Curve:
    """One line of a panel; `metrics`: it comes from the first there is. `is_sparse`: not every step has a value."""

    metrics: tuple[str, ...]
    label: str
    colour: str
    is_sparse: bool = False


PANELS: tuple[tuple[str, tuple[Curve, ...]], ...] = (
    ("Reward", (Curve(("critic/score/mean", "critic/rewards/mean"), "mean of the step's answers", "#2563eb"),)),
    ("KL to the reference", (Curve(("actor/reward_kl_penalty", "actor/kl_loss"), "KL", "#d97706"),)),
    (
        "Held-out accuracy",
        (
            Curve(("val/accuracy_greedy",), "greedy", "#059669", is_sparse=True),
            Curve(("val/accuracy_sampled",), "sampled", "#7c3aed", is_sparse=True),
        ),
    ),
)

COST_PANELS: tuple[tuple[str, tuple[Curve, ...]], ...] = (
    ("Cost", (Curve(("cost/mean",), "mean of the step's answers", "#dc2626"),)),
    ("Multiplier of the cost", (Curve(("lagrange/multiplier",), "λ", "#0f766e"),)),
)


def plot_run(metrics_jsonl: Path, out_png: Path, title: str = "") -> None:
    """Draws the panels; the picture is written beside and renamed.

    Args:
        metrics_jsonl: as `MetricsLogger` writes it.
        out_png: the picture.
        title: above the panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    panels = PANELS + (COST_PANELS if any("cost/mean" in row for row in rows) else ())
    figure = Figure(figsize=(13 * len(panels) / len(PANELS), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, curves) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        _draw_panel(axes, name, curves, rows)
    if title:
        figure.suptitle(title, color=_INK, fontsize=12, x=0.01, ha="left")
    beside = out_png.with_name(f"{out_png.stem}.writing.png")
    figure.savefig(beside, dpi=140)
    beside.replace(out_png)


def read_curve(rows: list[dict[str, Any]], metrics: tuple[str, ...]) -> tuple[list[int], list[float]]:
    """Steps and values of the first of `metrics` that any row has; null values are left out."""
    for metric in metrics:
        points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
        if points:
            return [step for step, _ in points], [value for _, value in points]
    return [], []


def _draw_panel(axes: Any, name: str, curves: tuple[Curve, ...], rows: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(name, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    is_empty = True
    for number, curve in enumerate(curves):
        steps, values = read_curve(rows, curve.metrics)
        if not steps:
            continue
        is_empty = False
        many = len(steps) > 40 and not curve.is_sparse
        axes.plot(steps, values, color=curve.colour, linewidth=2, marker=None if many else "o", markersize=5,
                  markeredgecolor="white", label=curve.label)  # fmt: skip
        if curve.is_sparse:
            for place in {0, len(steps) - 1}:
                axes.annotate(f"{values[place]:.2f}", (steps[place], values[place]), textcoords="offset points",
                              xytext=(0, -15 if number else 7),
                              ha="center", color=curve.colour, fontsize=9)  # fmt: skip
    if is_empty:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_SOFT)
    elif name == "Held-out accuracy":
        axes.set_ylim(0, 1.05)
    if len(curves) > 1 and not is_empty:
        axes.legend(frameon=False, fontsize=9, loc="lower right")
