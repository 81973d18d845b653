"""Time lines on disk: what Chrome reads, and the picture."""

from __future__ import annotations

import json

from megarl.obs.time_line import Block, draw_time_line, write_chrome_trace

BLOCKS = [
    Block(0, 0.0, 0.5, "FORWARD", "actor", 0, 0),
    Block(1, 0.5, 1.0, "FORWARD", "critic", 0, 1),
    Block(1, 1.0, 2.0, "BACKWARD", "actor", 0, 1),
    Block(0, 2.0, 2.5, "WGRAD", "critic", 0, 0),
    Block(0, 2.5, 3.0, "STEP", "actor", 0, 1),
]


def test_a_chrome_trace_has_a_lane_a_rank_and_microseconds(tmp_path) -> None:
    write_chrome_trace(tmp_path / "trace.json", BLOCKS)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(span["tid"], span["ts"], span["dur"]) for span in spans[:3]] == [(0, 0, 5e5), (1, 5e5, 5e5), (1, 1e6, 1e6)]
    assert spans[2]["name"] == "BACKWARD actor 0" and spans[2]["args"]["chunk"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_the_picture_is_written(tmp_path) -> None:
    draw_time_line(tmp_path / "line.png", BLOCKS, "two ranks")
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")
