"""What asks a run to stop: a first signal is noted, a second ends the process wherever it is, and the time runs out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.launch import stop
from megarl.launch.stop import StopRequest

ROOT = Path(__file__).parents[2]
CHILD = """
import ctypes, sys, time
from megarl.launch.stop import StopRequest
request = StopRequest()
request.install()
print("ready", flush=True)
if sys.argv[1] == "loop":
    while not request.signal_number:
        time.sleep(0.01)
    print("noted", request.signal_number, flush=True)
    time.sleep(30)
mutex = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)  # waits for itself, and no signal interrupts that
"""


def start(how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, how], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_noted_and_the_second_ends_at_once(number: signal.Signals) -> None:
    process = start("loop")
    process.send_signal(number)
    assert process.stdout is not None and process.stdout.readline() == f"noted {int(number)}\n"
    assert process.poll() is None
    process.send_signal(number)
    started = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert process.returncode == 128 + number
    assert f"a second {number.name}: leaving at once" in errors


def test_a_second_signal_ends_a_process_that_waits_outside_of_python() -> None:
    process = start("wait")
    for _ in range(2):
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_step_that_would_not_fit_any_more_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stop, "_STARTED", 0.0)
    request = StopRequest(wall_time_s=100)
    now[0] = 50.0
    assert not request.is_time_over(last_step_s=20, save_s=10)
    now[0] = 69.0
    assert not request.is_time_over(last_step_s=5, save_s=10)
    now[0] = 71.0
    assert request.is_time_over(last_step_s=5, save_s=10), "the longest step so far took 20 s and a save takes 10"
    assert not StopRequest(None).is_time_over(10**9, 0)
