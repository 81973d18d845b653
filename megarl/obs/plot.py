"""One picture of a run: what it learned from, what it learned, and what it paid for that, over steps.

    rewards        reward | KL to the reference, or length of the answers | held-out accuracy
    with a cost    ... | cost and its limit | multiplier
    preferences    loss | accuracy | margin, each of the step's pairs and of those held out

In: `metrics.jsonl`. Out: a PNG. A panel without data says so instead of being left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.obs.metrics import read_metrics

_INK, _SOFT = "#1f2933", "#9aa5b1"
_PANELS_IN_A_ROW = 3


@dataclass(frozen=True)
class Curve:
    """One line of a panel; `metrics`: it comes from the first there is.

    `is_sparse`: not every step has a value. `is_bound`: not measured but given, a dashed line without marks.
    """

    metrics: tuple[str, ...]
    label: str
    colour: str
    is_sparse: bool = False
    is_bound: bool = False


@dataclass(frozen=True)
class Panel:
    """`is_share`: its values are between 0 and 1, and so is its axis."""

    name: str
    curves: tuple[Curve, ...]
    is_share: bool = False


_OF_STEP, _HELD_OUT = "mean of the step's answers", "held out"

REWARD = Panel("Reward", (Curve(("critic/score/mean", "critic/rewards/mean"), _OF_STEP, "#2563eb"),))
KL = Panel("KL to the reference", (Curve(("actor/reward_kl_penalty", "actor/kl_loss"), "KL", "#d97706"),))
LENGTH = Panel("Length of the answers", (Curve(("response_length/mean",), "tokens", "#d97706"),))
ACCURACY = Panel(
    "Held-out accuracy",
    (
        Curve(("val/accuracy_greedy",), "greedy", "#059669", is_sparse=True),
        Curve(("val/accuracy_sampled",), "sampled", "#7c3aed", is_sparse=True),
    ),
    is_share=True,
)
COST = Panel(
    "Cost",
    (
        Curve(("cost/mean",), _OF_STEP, "#dc2626"),
        Curve(("lagrange/cost_limit",), "limit", _INK, is_bound=True),
    ),
)
MULTIPLIER = Panel("Multiplier of the cost", (Curve(("lagrange/multiplier",), "λ", "#0f766e"),))


def _compare(name: str, metric: str, is_share: bool = False) -> Panel:
    """The step's pairs and the held-out ones in one panel."""
    step = Curve((f"preference/{metric}",), "the step's", "#2563eb")
    return Panel(name, (step, Curve((f"val/{metric}",), _HELD_OUT, "#059669", is_sparse=True)), is_share)


PREFERENCES = (_compare("Loss", "loss"), _compare("Accuracy", "accuracy", is_share=True), _compare("Margin", "margin"))


def choose_panels(rows: list[dict[str, Any]]) -> tuple[Panel, ...]:
    """The panels that fit what a run has measured.

    Args:
        rows: as `read_metrics` returns them.
    """
    if any("preference/loss" in row for row in rows):
        return PREFERENCES
    with_kl = any(name in row for row in rows for name in KL.curves[0].metrics)
    panels = (REWARD, KL if with_kl else LENGTH, ACCURACY)
    return (*panels, COST, MULTIPLIER) if any("cost/mean" in row for row in rows) else panels


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
    panels = choose_panels(rows)
    num_rows = -(-len(panels) // _PANELS_IN_A_ROW)
    figure = Figure(figsize=(4.3 * _PANELS_IN_A_ROW, 3.6 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(num_rows, _PANELS_IN_A_ROW, squeeze=False).flatten()
    for axes, panel in zip(places, panels, strict=False):
        draw_panel(axes, panel, rows)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
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


def draw_panel(axes: Any, panel: Panel, rows: list[dict[str, Any]]) -> None:
    """Draws one panel on matplotlib's `axes`.

    Args:
        rows: as `read_metrics` returns them.
    """
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.name, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    drawn = [_draw_curve(axes, curve, is_lower=number > 0, rows=rows) for number, curve in enumerate(panel.curves)]
    if not any(drawn):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_SOFT)
        return
    if panel.is_share:
        axes.set_ylim(0, 1.05)
    if len(panel.curves) > 1:
        axes.legend(frameon=False, fontsize=9, loc="lower right" if panel.is_share else "best")


def _draw_curve(axes: Any, curve: Curve, is_lower: bool, rows: list[dict[str, Any]]) -> bool:
    """Whether there was anything to draw. `is_lower`: figures are written below the line."""
    steps, values = read_curve(rows, curve.metrics)
    if not steps:
        return False
    if curve.is_bound:
        axes.plot(steps, values, color=curve.colour, linewidth=1.2, linestyle="--", label=curve.label)
        return True
    many = len(steps) > 40 and not curve.is_sparse
    axes.plot(steps, values, color=curve.colour, linewidth=2, marker=None if many else "o", markersize=5,
              markeredgecolor="white", label=curve.label)  # fmt: skip
    for place in {0, len(steps) - 1} if curve.is_sparse else ():
        axes.annotate(f"{values[place]:.2f}", (steps[place], values[place]), textcoords="offset points",
                      xytext=(0, -15 if is_lower else 7), ha="center", color=curve.colour, fontsize=9)  # fmt: skip
    return True
