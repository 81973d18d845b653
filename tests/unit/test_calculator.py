"""The calculator of examples/multi_turn: what it works out, what it refuses, and what it pays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.load import load_config, resolve_config
from megarl.records import Prompt
from megarl.rollout.environment import Step, load_environment
from megarl.user_code import load_function

FOLDER = Path(__file__).parents[2] / "examples" / "multi_turn"
SPEC = f"{FOLDER / 'calculator.py'}:Calculator"
calculate = load_function("test", f"{FOLDER / 'calculator.py'}:calculate")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("412+389", 801), (" 2 * (3 - 5) ", -4), ("-7+2", -5), ("1/2", None), ("2**9999999", None), ("a+1", None),
        ("", None), ("__import__('os').getcwd()", None), ("9" * 13, None), ("1+" * 40 + "1", None), ("True+1", None),
        ("(" * 30, None),
    ],
)  # fmt: skip
def test_only_short_sums_are_worked_out(text, value):
    assert calculate(text) == value


def play(*turns: str) -> list[Step]:
    build, roles = load_environment(SPEC, {"call_bonus": 0.2})
    assert roles == ("user",)
    environment = build()
    environment.reset(Prompt(0, (1,), "", ground_truth="801"))
    return [environment.step(turn) for turn in turns]


def test_a_call_a_result_and_an_answer():
    called, answered = play("<calc>412+389</calc> = 800", "The answer is 801")
    assert (called.observation, called.reward, called.is_done) == ("801", 0.2, False)
    assert (answered.reward, answered.is_done) == (1.0, True)


def test_only_the_first_call_that_works_is_paid_for():
    rewards = [
        step.reward for step in play("<calc>x</calc>", "<calc>1+1</calc>", "<calc>1+1</calc>", "The answer is 2")
    ]
    assert rewards == [0.0, 0.2, 0.0, 0.0]


def test_the_data_shows_a_call_and_asks_for_the_sum(tmp_path):
    subprocess.run(
        [sys.executable, FOLDER / "prepare_data.py", "--out", tmp_path, "--train", "3", "--val", "2"], check=True
    )
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and len((tmp_path / "val.jsonl").read_text().splitlines()) == 2
    for row in rows:
        *shown, asked = row["prompt"]
        one, other = (int(word.strip("?")) for word in asked["content"].split() if word.strip("?").isdigit())
        assert int(row["ground_truth"]) == one + other
        assert "<calc>" in shown[1]["content"]


def test_the_configuration_of_the_example_is_one():
    config = load_config(str(FOLDER / "config.yaml"))
    assert config.rollout.multi_turn.max_turns == 3
    (source,) = resolve_config(config).reward.sources
    assert source.environment, "the calculator judges its own episodes"
