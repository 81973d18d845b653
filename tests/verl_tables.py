"""The tables of docs/verl.md, from the rows of megarl/config/verl_names.py.

python -m tests.verl_tables        writes them into docs/verl.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from megarl.config.verl_names import FOREIGN, REFUSED_VALUES, ROWS, SYNONYMS

PAGE = Path(__file__).parents[1] / "docs" / "verl.md"
MARK = "<!-- the tables below are written by: python -m tests.verl_tables -->"
_OUTER = "actor_rollout_ref."
_SECTIONS = (
    f"{_OUTER}actor.", f"{_OUTER}ref.", f"{_OUTER}model.", "critic.model.", "reward_model.model.", "critic.",
    "reward_model.",
)  # fmt: skip


def render_tables() -> str:
    """Everything below `MARK`."""
    return "\n".join(["", *_list_aliases(), *_list_values(), *_list_foreign()])


def read_page() -> tuple[str, str]:
    """What is written by hand, and the tables as they are in the file."""
    above, _, below = PAGE.read_text(encoding="utf-8").partition(MARK)
    return above, below


def shorten(names: Sequence[str]) -> str:
    """Names as the tables show them: `ROLE.x` for an x that three sections or more have."""
    found: dict[str, list[str]] = {}
    for name in names:
        section = next((each for each in _SECTIONS if name.startswith(each)), "")
        found.setdefault(name.removeprefix(section), []).append(name)
    shown = [[f"ROLE.{end}"] if len(same) > 2 else same for end, same in found.items()]
    return ", ".join(f"`{name.replace(_OUTER, '…')}`" for same in shown for name in same)


def _list_aliases() -> Iterable[str]:
    yield from ("## Names that mean an option of ours", "", "| verl | megarl | |", "|---|---|---|")
    by_meaning: dict[tuple[str, str], list[str]] = {}
    for row in ROWS:
        by_meaning.setdefault((row.key, row.note), []).append(row.name)
    for (key, note), names in by_meaning.items():
        yield f"| {shorten(names)} | `{key}` | {note} |"
    yield "| `custom_reward_function.path`, `.name` | `reward.function` | `path:name`; the name is `compute_score` |"
    yield ""


def _list_values() -> Iterable[str]:
    yield from ("## Values", "", "| verl | megarl |", "|---|---|")
    for choices in SYNONYMS.values():
        for word, choice in choices.items():
            if not word.startswith("AdvantageEstimator."):
                yield f"| `{word}` | `{choice}` |"
    for key, reasons in REFUSED_VALUES.items():
        for value, reason in reasons.items():
            yield f"| `{key}={value}` | refused: {reason} |"
    yield ""


def _list_foreign() -> Iterable[str]:
    yield from ("## Names without an option", "", "| verl | accepted | why |", "|---|---|---|")
    by_meaning: dict[tuple[tuple[str, ...] | None, str], list[str]] = {}
    for name, row in FOREIGN.items():
        accepts = None if row.accepts is None else tuple(map(str, row.accepts))
        by_meaning.setdefault((accepts, row.reason), []).append(name)
    for (accepts, reason), names in by_meaning.items():
        shown = "any value, with a warning" if accepts is None else ", ".join(f"`{each}`" for each in accepts) or "none"
        yield f"| {shorten(names)} | {shown} | {reason} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(read_page()[0] + MARK + "\n" + render_tables(), encoding="utf-8")
