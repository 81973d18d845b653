"""The first error on any rank ends every rank within seconds, the first cause on top, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK_MODULE = "tests.dist.failing_rank"
START_S = 120  # to import torch and meet, on a machine that may have other work
LIMIT_S = 30  # from then on


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_stays_when_a_test_fails(tmp_path: Path) -> Iterator[None]:
    """Ends by pid what this test started and its ranks told of; a pid that is another program now is left alone."""
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()
            process.communicate()
    STARTED.clear()
    for pid in [int(pid) for path in tmp_path.glob("*.pids") for pid in path.read_text().split()]:
        with suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if str(tmp_path) in command or command[:2] == ["sleep", "1000"]:
                os.kill(pid, signal.SIGKILL)


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    clean = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    process = subprocess.Popen(
        [sys.executable, *command], env=clean, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    STARTED.append(process)
    return process


def start_local(how: str, folder: Path) -> subprocess.Popen[str]:
    code = (
        "from megarl.launch.local import launch_local\n"
        f"raise SystemExit(launch_local(2, [{how!r}, {str(folder)!r}], module={RANK_MODULE!r}))"
    )
    return start(["-c", code])


def is_alive(pid: int) -> bool:
    """False for a process that is gone, or dead and only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_pids(folder: Path, num_ranks: int = 2) -> list[int]:
    """Every process that the ranks told of, once all ranks have met."""
    deadline = time.monotonic() + START_S
    while len(list(folder.glob("*.pids"))) < num_ranks:
        assert time.monotonic() < deadline, f"only {sorted(folder.glob('*.pids'))} came up"
        time.sleep(0.05)
    return [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]


def assert_all_gone(folder: Path, within_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + within_s
    pids = wait_for_pids(folder)
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} outlived the run"
        time.sleep(0.1)


def test_ranks_that_return_give_exit_code_zero(tmp_path: Path) -> None:
    process = start_local("fine", tmp_path)
    wait_for_pids(tmp_path)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert_all_gone(tmp_path)


@pytest.mark.parametrize(
    ("how", "exit_code", "cause"),
    [
        ("raise", 1, "| update] RuntimeError: the sky fell"),
        ("exit", 3, "| update] SystemExit: 3"),
        ("killed", 137, "was killed by SIGKILL"),
    ],
)
def test_failure_of_one_rank_ends_all_with_its_cause_on_top(
    tmp_path: Path, how: str, exit_code: int, cause: str
) -> None:
    process = start_local(how, tmp_path)
    wait_for_pids(tmp_path)
    _, errors = process.communicate(timeout=LIMIT_S)
    first_line = errors.splitlines()[0]
    assert first_line.startswith("[rank 1") and cause in first_line, errors
    assert process.returncode == exit_code
    assert_all_gone(tmp_path, within_s=1)


def test_a_rank_that_leaves_before_the_others_is_named(tmp_path: Path) -> None:
    process = start_local("leave", tmp_path)
    wait_for_pids(tmp_path)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "rank 1 left before that, with exit code 0" in errors, errors
    assert_all_gone(tmp_path, within_s=1)


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    process = start_local("child", tmp_path)
    wait_for_pids(tmp_path)
    process.communicate(timeout=LIMIT_S)
    assert len(wait_for_pids(tmp_path)) == 4  # two ranks, a child each
    assert_all_gone(tmp_path, within_s=1)


def test_a_users_mistake_is_told_once_and_without_traceback(tmp_path: Path) -> None:
    process = start_local("mistake", tmp_path)
    wait_for_pids(tmp_path)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert errors == "configuration: 1 problem\n  - critic.pp=4 is wrong\n"
    assert process.returncode == 2


def test_interrupt_ends_all_with_a_short_message(tmp_path: Path) -> None:
    process = start_local("wait", tmp_path)
    wait_for_pids(tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert errors.strip() == "megarl: SIGINT: all 2 ranks are ended"
    assert process.returncode == 130
    assert_all_gone(tmp_path, within_s=1)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = start_local("wait", tmp_path)
    wait_for_pids(tmp_path)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert_all_gone(tmp_path, within_s=5)


def test_under_torchrun_the_cause_is_told_first_and_all_end(tmp_path: Path) -> None:
    process = start(
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", RANK_MODULE, "raise", str(tmp_path)]
    )
    wait_for_pids(tmp_path)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    ours = [line for line in errors.splitlines() if line.startswith("[rank ") and " | " in line]
    assert "the sky fell" in ours[0] and ours[0].startswith("[rank 1 | "), errors
    assert_all_gone(tmp_path, within_s=1)


def test_without_any_launcher_a_peer_ends_by_itself(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        start(
            ["-m", RANK_MODULE, "raise", str(tmp_path)],
            RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank in range(2)
    ]  # fmt: skip
    wait_for_pids(tmp_path)
    errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "ended because another rank was gone" in errors[0]
    assert "RuntimeError: the sky fell" in errors[1]
