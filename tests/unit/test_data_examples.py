"""The scripts of examples/data write rows that training reads."""

import importlib.util
import sys
from pathlib import Path

import pytest

from megarl.reward.rules import numeric
from megarl.rollout.rows import load_rows, write_rows

FOLDER = Path(__file__).parents[2] / "examples" / "data"


@pytest.fixture
def run_script(monkeypatch):
    """Runs a script of examples/data with the arguments given."""

    def run(name: str, *args: str) -> None:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [name, *args])
        module.main()

    return run


def questions(rows: list[dict]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def test_chain_sum_keeps_validation_questions_out_of_training(run_script, tmp_path):
    run_script("reasoning_gym_chain_sum", "--out", str(tmp_path), "--train", "300", "--val", "40")
    train, val = (load_rows([str(tmp_path / f"{name}.parquet")]) for name in ("train", "val"))
    assert (len(train), len(val), len(set(questions(val)))) == (300, 40, 40)
    assert not set(questions(train)) & set(questions(val))


def test_chain_sum_ground_truth_is_the_sum(run_script, tmp_path):
    run_script("reasoning_gym_chain_sum", "--out", str(tmp_path), "--train", "20", "--val", "4", "--terms", "3")
    for row in load_rows([str(tmp_path / "train.parquet")]):
        expression = row["prompt"][0]["content"].split(":")[1].rstrip(" =")
        assert int(row["reward_model"]["ground_truth"]) == eval(expression)


def test_chain_sum_seeds_differ_and_repeat(run_script, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        run_script(
            "reasoning_gym_chain_sum", "--out", str(tmp_path / name), "--train", "9", "--val", "2", "--seed", seed
        )
    a, b, c = (load_rows([str(tmp_path / name / "train.parquet")]) for name in "abc")
    assert a == b and a != c


def test_chain_sum_refuses_more_questions_than_there_are(run_script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_script("reasoning_gym_chain_sum", "--out", str(tmp_path), "--train", "5", "--val", "250")
    assert "too few different questions" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_gsm8k_rows(run_script, tmp_path):
    source = tmp_path / "s.jsonl"
    source.write_text('{"question": "q1", "answer": "so\\n#### 1,042"}\n{"question": "q2", "answer": "#### 7"}\n')
    run_script("gsm8k_jsonl", "--in", str(source), "--out", str(tmp_path), "--val", "1")
    (train,), (val,) = (load_rows([str(tmp_path / f"{name}.parquet")]) for name in ("train", "val"))
    assert train["reward_model"]["ground_truth"] == "1042" and questions([train])[0].startswith("q1 ")
    assert val["reward_model"]["ground_truth"] == "7" and val["extra_info"]["split"] == "val"


def test_gsm8k_answer_without_mark_is_named(run_script, tmp_path, capsys):
    source = tmp_path / "s.jsonl"
    source.write_text('{"question": "q1", "answer": "42"}\n')
    with pytest.raises(SystemExit):
        run_script("gsm8k_jsonl", "--in", str(source), "--out", str(tmp_path))
    assert "row 0" in capsys.readouterr().err


def test_pairs_prefer_the_right_number_and_those_kept_out_are_new_pairs_to_known_problems(run_script, tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"{a} + 1 ="}], "reward_model": {"ground_truth": str(a + 1)}}
        for a in (3, 4, 5) * 40
    ]
    write_rows(tmp_path / "train.parquet", rows)
    write_rows(tmp_path / "val.parquet", rows[:3])
    run_script("pairs_from_answers", "--data", str(tmp_path), "--out", str(tmp_path / "pairs"))
    train, other = (load_rows([str(tmp_path / "pairs" / f"{name}.parquet")]) for name in ("train", "other_pairs"))
    assert (len(train), len(other)) == (120, 3)
    assert set(questions(other)) == set(questions(train))
    assert not [pair for pair in other if pair in train]
    for pair in train + other:
        right = int(questions([pair])[0][0]) + 1
        assert numeric("", pair["chosen"], right)["accuracy"] == 1
        assert numeric("", pair["rejected"], right)["accuracy"] == 0
