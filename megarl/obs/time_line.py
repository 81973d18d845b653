"""Time lines of pipelines: a Chrome trace (chrome://tracing, Perfetto) and a picture, one lane a rank or stage.

In: blocks of time, measured or simulated. Colours say whose work it is; forward is light, the input's gradient full,
the weights' gradient dark, an optimizer step grey.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HUES = ("#2563eb", "#d97706", "#059669", "#7c3aed")  # by model, in order of appearance
_INK, _SOFT = "#1f2933", "#9aa5b1"
_TONES = {"FORWARD": 0.45, "BACKWARD": 0.85, "WGRAD": 1.0}
_LABELLED = 700  # more blocks than this are drawn without numbers


@dataclass(frozen=True, slots=True)
class Block:
    """One computation: seconds `start` to `end` on a lane; `action` as `schedule.Action` names it."""

    lane: int
    start: float
    end: float
    action: str
    model: str
    micro_batch: int
    chunk: int


def write_chrome_trace(path: Path, blocks: Sequence[Block]) -> None:
    """Writes blocks in Chrome's trace format, times in microseconds; written beside and renamed."""
    colours = {"FORWARD": "thread_state_running", "BACKWARD": "rail_response", "WGRAD": "rail_idle", "STEP": "grey"}
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": f"rank {lane}"}}
        for lane in sorted({block.lane for block in blocks})
    ]
    events += [
        {
            "name": f"{block.action} {block.model} {block.micro_batch}",
            "cat": block.model,
            "ph": "X",
            "pid": 0,
            "tid": block.lane,
            "ts": block.start * 1e6,
            "dur": (block.end - block.start) * 1e6,
            "cname": colours.get(block.action, "grey"),
            "args": {"model": block.model, "micro_batch": block.micro_batch, "chunk": block.chunk},
        }
        for block in blocks
    ]
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    beside.replace(path)


def draw_time_line(path: Path, blocks: Sequence[Block], title: str, lane_name: str = "rank") -> None:
    """Draws blocks as a picture; written beside and renamed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = sorted({block.lane for block in blocks})
    models = list(dict.fromkeys(block.model for block in sorted(blocks, key=lambda block: (block.start, block.lane))))
    figure = Figure(figsize=(14, 1.2 + 0.42 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()

    def colour(block: Block) -> tuple[float, float, float]:
        if block.action not in _TONES:
            return to_rgb(_SOFT)
        tone = _TONES[block.action]
        shade = 0.7 if block.action == "WGRAD" else 1.0
        red, green, blue = (
            shade * (1 - tone * (1 - value)) for value in to_rgb(HUES[models.index(block.model) % len(HUES)])
        )
        return red, green, blue

    for lane in lanes:
        own = [block for block in blocks if block.lane == lane]
        row = len(lanes) - 1 - lanes.index(lane)
        spans = [(block.start, block.end - block.start) for block in own]
        axes.broken_barh(
            spans, (row + 0.06, 0.88), facecolors=[colour(b) for b in own], edgecolor="white", linewidth=0.4
        )
        if len(blocks) <= _LABELLED:
            for block in own:
                ink = "white" if block.action in ("BACKWARD", "WGRAD") else _INK
                axes.text((block.start + block.end) / 2, row + 0.5, str(block.micro_batch), ha="center", va="center",
                          fontsize=6, color=ink)  # fmt: skip
    axes.set_yticks([row + 0.5 for row in range(len(lanes))], [f"{lane_name} {lane}" for lane in reversed(lanes)])
    axes.set_xlim(min(block.start for block in blocks), max(block.end for block in blocks))
    axes.set_ylim(0, len(lanes))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=8, left=False)
    axes.set_title(title, loc="left", color=_INK, fontsize=10, fontweight="bold")
    samples = [Block(0, 0, 1, action, model, 0, 0) for model in models for action in _TONES]
    words = {"FORWARD": "forward", "BACKWARD": "backward", "WGRAD": "weight gradient"}
    used = {(block.model, block.action) for block in blocks}
    handles = [
        Patch(color=colour(each), label=f"{each.model}: {words[each.action]}")
        for each in samples
        if (each.model, each.action) in used
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.08 - 0.3 / len(lanes)), ncols=6, frameon=False,
                fontsize=8)  # fmt: skip
    beside = path.with_name(f"{path.stem}.writing.png")
    figure.savefig(beside, dpi=130)
    beside.replace(path)
