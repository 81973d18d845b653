"""Scorers in processes: killed at their time limit, and the pool is whole again (case H1)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megarl.records import Prompt, Rollout
from megarl.reward.pool import ScorerPool
from megarl.reward.verdict import Answer

FUNCTION = """
import os, re, subprocess, sys, time

def judge(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "loop":
        re.match(r"(a+)+$", "a" * 60 + "b")  # never comes back to Python: no signal handler runs
    if solution_str == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(extra_info["file"], "w").write(str(child.pid))
        time.sleep(60)
    if solution_str == "die":
        os._exit(7)
    if solution_str == "exit":
        sys.exit("enough")
    if solution_str == "raise":
        raise KeyError("no such label")
    if solution_str == "print":
        print("a scorer may print", flush=True)
    return {"score": float(solution_str) if solution_str.isdigit() else 0.5 + bonus, "pid": os.getpid()}
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTION)
    return f"{tmp_path / 'mine.py'}:judge"


def answers(*texts: str, **extra: object) -> list[Answer]:
    prompt = Prompt(row=0, token_ids=(1,), text="", ground_truth="x", extra_info=extra)
    return [Answer(prompt, Rollout(0, i, (), (), True, 0), text) for i, text in enumerate(texts)]


def is_running(pid: int) -> bool:
    """A process that is there and not just waiting to be collected."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


def test_a_loop_in_c_costs_three_answers_and_no_more(spec):
    pool = ScorerPool(spec, {}, num_workers=2, time_limit_s=0.5)
    started = time.monotonic()
    verdicts = pool.score(answers("1", "loop", "2", "loop", "loop", "3", "4"), 7)
    assert time.monotonic() - started < 10
    assert [verdict.failure is None for verdict in verdicts] == [True, False, True, False, False, True, True]
    assert [verdict.score for verdict in verdicts if verdict.failure is None] == [1, 2, 3, 4]
    assert verdicts[1].failure == "took longer than 0.5 s and was killed"
    again = pool.score(answers(*"56789"), 0)
    assert [verdict.score for verdict in again] == [5, 6, 7, 8, 9]
    assert pool.num_alive == 2
    pool.close()


def test_nothing_that_a_killed_scorer_started_is_left(spec, tmp_path):
    pool = ScorerPool(spec, {}, num_workers=1, time_limit_s=2.0)
    (verdict,) = pool.score(answers("child", file=str(tmp_path / "pid")), 1)
    assert verdict.failure is not None
    wait_until_gone({int((tmp_path / "pid").read_text())})
    pool.close()


@pytest.mark.parametrize(("how", "words"), [("die", "exit code 7"), ("exit", "exit code 1"), ("raise", "KeyError")])
def test_a_scorer_that_dies_or_raises_costs_its_own_answer(spec, how, words):
    pool = ScorerPool(spec, {}, num_workers=2, time_limit_s=5.0)
    verdicts = pool.score(answers("1", how, "2", "3"), 4)
    assert [verdict.failure is None for verdict in verdicts] == [True, False, True, True]
    assert words in str(verdicts[1].failure)
    assert [verdict.score for verdict in pool.score(answers("4", "5", "6"), 0)] == [4, 5, 6]
    pool.close()


def test_answers_are_spread_over_the_processes_and_come_back_in_order(spec):
    pool = ScorerPool(spec, {"bonus": 0.25}, num_workers=2, time_limit_s=5.0)
    verdicts = pool.score(answers(*map(str, range(100)), "print", "a" * 1_000_000), 0)
    assert [verdict.score for verdict in verdicts[:100]] == list(range(100))
    assert verdicts[100].score == verdicts[101].score == 0.75
    pids = {int(verdict.metrics["pid"]) for verdict in verdicts}
    assert len(pids) == 2 and os.getpid() not in pids
    pool.close()
    wait_until_gone(pids)


def test_signals_that_are_meant_for_the_ranks_cost_no_answer(spec):
    """Slurm sends its warning to every process of the job."""
    pool = ScorerPool(spec, {}, num_workers=1, time_limit_s=5.0)
    (before,) = pool.score(answers("1"), 0)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(int(before.metrics["pid"]), number)
    (after,) = pool.score(answers("2"), 0)
    assert after.failure is None and after.metrics["pid"] == before.metrics["pid"]
    pool.close()


def test_too_many_failures_end_the_scoring(spec):
    pool = ScorerPool(spec, {}, num_workers=1, time_limit_s=0.3)
    started = time.monotonic()
    verdicts = pool.score(answers(*["loop"] * 50), 1)
    assert time.monotonic() - started < 5, "50 answers of 0.3 s each were not all waited for"
    assert all(verdict.failure is not None for verdict in verdicts)
    assert [verdict.score for verdict in pool.score(answers("1"), 0)] == [1]
    pool.close()


def test_no_stale_reply_is_taken_for_another_answer(spec):
    """The scoring ended while an answer was under way: its verdict must not be given to the next one."""
    pool = ScorerPool(spec, {}, num_workers=2, time_limit_s=5.0)
    pool.score(answers("raise", "loop", "1"), 0)
    assert [verdict.score for verdict in pool.score(answers("8", "9"), 0)] == [8, 9]
    pool.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [("def judge(solution_str): ...", "lacks"), ("import nowhere_at_all", "ModuleNotFoundError"), ("x = 1", "judge")],
)
def test_a_file_that_cannot_be_used_is_told_at_once(tmp_path, text, words):  # case H4
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=words):
        ScorerPool(f"{tmp_path / 'bad.py'}:judge", {}, num_workers=2, time_limit_s=5.0)


def test_a_worker_does_not_import_torch(spec):
    """A pool must start in a blink, and a worker must not hold a gigabyte."""
    import subprocess
    import sys

    code = "import sys, megarl.reward.worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
