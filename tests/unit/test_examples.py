"""The examples and the table of algorithms say what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.algo.algorithms import ADVANTAGES, ALGORITHMS, PREFERENCES
from megarl.config.load import load_config, resolve_config
from megarl.config.validate import find_problems
from tests.unit.test_config_validate import SMOLLM2

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "examples").glob("*/config.yaml"))
NEEDS = {
    "values": "critic",
    "siblings": "n ≥ 2 answers a prompt",
    "greedy": "one greedy answer a prompt",
    "costs": "a cost, cost critic",
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_an_example_is_a_valid_configuration(path: Path, monkeypatch) -> None:
    """But for the model and the data, which `make quickstart` makes."""
    monkeypatch.chdir(ROOT)
    config = resolve_config(load_config(str(path)))
    problems = find_problems(config, config.trainer.n_gpus_per_node, SMOLLM2)
    assert [line for line in problems if ".cache/" not in line] == []
    assert (path.parent / "README.md").is_file()
    run = path.parent / "run.sh"
    assert f"--config {path.relative_to(ROOT)}" in run.read_text() and run.stat().st_mode & 0o100


def describe(name: str) -> str:
    """The first columns of a row of the table."""
    algorithm = ALGORITHMS[name]
    if algorithm.advantage is None:
        facts = PREFERENCES[algorithm.loss]
        advantage, needs = "–", ["pairs" if facts.is_pairwise else "labelled answers"]
        needs += ["reference"] if facts.needs_reference else []
    else:
        advantage, needs = f"`{algorithm.advantage}`", [NEEDS[need] for need in ADVANTAGES[algorithm.advantage].needs]
        with_kl = ("actor.use_kl_loss", "algorithm.use_kl_in_reward")
        needs += ["reference"] if any(algorithm.options.get(key) for key in with_kl) else []
    told = ", ".join(needs) or "–"
    return f"| `{name}` | {advantage} | `{algorithm.loss}` | {algorithm.reduction} | {told} | {algorithm.paper} |"


def test_the_table_of_algorithms_is_the_data() -> None:
    rows = [line for line in (ROOT / "docs" / "algorithms.md").read_text().splitlines() if line.startswith("| `")]
    shown = [row for row in rows if row.split("`")[1] in ALGORITHMS]
    assert len(shown) == len(ALGORITHMS)
    for row, name in zip(shown, ALGORITHMS, strict=True):
        assert row.startswith(describe(name)), name


def test_files_linked_from_the_table_and_the_results_exist() -> None:
    for name in ("algorithms.md", "results.md"):
        text = (ROOT / "docs" / name).read_text()
        linked = [part.split(")")[0].partition("#")[0] for part in text.split("](")[1:]]
        files = [link for link in linked if link and not link.startswith("https://")]
        assert files and [link for link in files if not (ROOT / "docs" / link).exists()] == [], name


def test_every_paper_of_the_table_is_listed() -> None:
    listed = (ROOT / "docs" / "algorithms.md").read_text().partition("## Papers")[2]
    named = {paper for facts in (*ALGORITHMS.values(), *ADVANTAGES.values()) for paper in facts.paper.split("; ")}
    assert [paper for paper in sorted(named) if f"| {paper} |" not in listed] == []
