"""`RUN/exit.json`: how a run ended, for those who cannot see its exit code (torchrun makes 1 of every code but 0).

    a start joins its ranks    what the start before it left is removed
    all steps are done         {"code": 0, "why": "all 40 steps are done"}
    saved, to be started again {"code": 75, "why": "SIGTERM: saved after step 16"}

A run that failed leaves none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

EXIT_FILE = "exit.json"


@dataclass(frozen=True)
class Ending:
    """The exit code of a run that did not fail, and why it ended."""

    code: int
    why: str


def forget_ending(run_dir: Path) -> None:
    """Removes what an earlier start left."""
    (run_dir / EXIT_FILE).unlink(missing_ok=True)


def write_ending(run_dir: Path, ending: Ending) -> None:
    """Writes the file in one move: whoever sees it sees all of it."""
    beside = run_dir / f".{EXIT_FILE}.writing"
    beside.write_text(json.dumps(asdict(ending)) + "\n")
    beside.replace(run_dir / EXIT_FILE)
