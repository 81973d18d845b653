"""Scorers in processes that can be killed: a function that never returns costs one answer, not the run.

    answers ─> idle worker ─> verdict                 a worker past its time limit is killed, its answer is marked as
               busy worker ─ deadline ─> SIGKILL      failed, and a new worker takes its place while the others go on

Python cannot interrupt a loop inside C (a regular expression that backtracks for ever, a solver); the kernel can.
Whoever builds a pool and scores with it must be a thread that lives as long as the pool: the kernel ends the workers
with the thread that started them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.reward.verdict import Answer, Verdict, failed
from megarl.reward.worker import read_frame, write_frame

START_LIMIT_S = 120.0  # to import the user's file
EXIT_LIMIT_S = 1.0  # between closing its pipes and being gone


class ScorerPool:
    """`num_workers` processes that hold one reward function each.

    Args:
        spec: `path/to/file.py:function`, or the name of a rule.
        kwargs: further keyword arguments of the function.
        num_workers: processes.
        time_limit_s: seconds that one answer may take.

    Raises:
        ValueError: the function cannot be found or loaded.
    """

    waits_elsewhere = True

    def __init__(self, spec: str, kwargs: Mapping[str, Any], num_workers: int, time_limit_s: float) -> None:
        assert num_workers >= 1 and time_limit_s > 0, f"{num_workers} workers, time limit {time_limit_s} s"
        self._function = (spec, dict(kwargs))
        self._time_limit_s = time_limit_s
        self._workers = [_Worker(self._function) for _ in range(num_workers)]
        try:
            while not all(worker.is_ready for worker in self._workers):
                for position, reply in self._wait():
                    self._note_start(position, reply)
        except ValueError:
            self.close()
            raise

    @property
    def num_alive(self) -> int:
        """Workers whose process runs."""
        return sum(worker.is_alive for worker in self._workers)

    def score(self, answers: Sequence[Answer], max_failures: int) -> list[Verdict]:
        """See `Scorer.score`. An answer is failed too when its process dies."""
        waiting = deque(range(len(answers)))
        verdicts: dict[int, Verdict] = {}
        num_failures = 0
        while len(verdicts) < len(answers) and num_failures <= max_failures:
            for worker in self._workers:
                if waiting and worker.is_idle:
                    index = waiting.popleft()
                    worker.begin(index, answers[index], self._time_limit_s)
            for position, reply in self._wait():
                index = self._workers[position].job
                if index is None:
                    self._note_start(position, reply)
                    continue
                verdicts[index] = _read_verdict(reply)
                num_failures += verdicts[index].failure is not None
                self._workers[position].job = None
                if reply.get("is_lost"):
                    self._replace(position)
        for position, worker in enumerate(self._workers):
            if worker.job is not None:  # too many failures: what this one says later must not be taken for a reply
                self._replace(position)
        unasked = failed(f"not judged: {num_failures} others had failed")
        return [verdicts.get(index, unasked) for index in range(len(answers))]

    def close(self) -> None:
        """See `Scorer.close`."""
        for worker in self._workers:
            worker.kill()

    def _wait(self) -> list[tuple[int, dict[str, Any]]]:
        """(position, reply) of every worker that answered, died or ran out of time; blocks until there is one."""
        active = {
            worker.replies.fileno(): position for position, worker in enumerate(self._workers) if worker.is_active
        }
        nearest = min(self._workers[position].deadline for position in active.values())
        with selectors.DefaultSelector() as selector:
            for fd in active:
                selector.register(fd, selectors.EVENT_READ)
            ready = {active[key.fd] for key, _ in selector.select(max(0.0, nearest - time.monotonic()))}
        now = time.monotonic()
        late = {position for position in active.values() if self._workers[position].deadline <= now} - ready
        return [(position, self._workers[position].read_reply()) for position in sorted(ready)] + [
            (position, {"error": f"took longer than {self._limit(position):g} s and was killed", "is_lost": True})
            for position in sorted(late)
        ]

    def _limit(self, position: int) -> float:
        return self._time_limit_s if self._workers[position].is_ready else START_LIMIT_S

    def _note_start(self, position: int, reply: Mapping[str, Any]) -> None:
        if "ready" not in reply:
            raise ValueError(f"reward.function={self._function[0]} cannot be loaded: {reply['error']}")
        self._workers[position].is_ready = True

    def _replace(self, position: int) -> None:
        self._workers[position].kill()
        self._workers[position] = _Worker(self._function)


class _Worker:
    """One process and the two pipes to it. `job` is the answer it is at; `deadline` when it is killed."""

    def __init__(self, function: tuple[str, dict[str, Any]]) -> None:
        requests_fd, requests = os.pipe()
        replies, replies_fd = os.pipe()
        self.requests, self.replies = open(requests, "wb"), open(replies, "rb")
        arguments = [str(requests_fd), str(replies_fd), str(os.getpid())]
        command = [sys.executable, "-P", "-m", "megarl.reward.worker", *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(requests_fd, replies_fd),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,  # killing it reaches what it started
        )
        os.close(requests_fd)
        os.close(replies_fd)
        self.job: int | None = None
        self.is_ready = False
        self.deadline = time.monotonic() + START_LIMIT_S
        self._send(function)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._has_ended(0.0)

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.job is None

    @property
    def is_active(self) -> bool:
        return not self.is_idle

    def begin(self, index: int, answer: Answer, time_limit_s: float) -> None:
        """Hands it an answer. A process that is gone is noticed when its reply is read."""
        prompt = answer.prompt
        self.job = index
        self.deadline = time.monotonic() + time_limit_s
        self._send((prompt.data_source, answer.text, prompt.ground_truth, dict(prompt.extra_info)))

    def read_reply(self) -> dict[str, Any]:
        """What it said; `is_lost` when the process is gone."""
        payload = read_frame(self.replies)
        if payload is not None:
            return json.loads(payload)
        self._has_ended(EXIT_LIMIT_S)
        self.kill()
        return {"error": f"its process died with exit code {self._process.returncode}", "is_lost": True}

    def kill(self) -> None:
        """Ends the process and everything it started; nothing the second time."""
        if self._process.returncode is None:  # not collected yet: its number cannot have gone to another
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.requests.close()
        self.replies.close()

    def _has_ended(self, wait_s: float) -> bool:
        """Whether the process is over, without collecting it: its number, and its group's, stay its own."""
        deadline = time.monotonic() + wait_s
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def _send(self, request: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            write_frame(self.requests, pickle.dumps(request))


def _read_verdict(reply: Mapping[str, Any]) -> Verdict:
    if "error" in reply:
        return failed(str(reply["error"]))
    return Verdict(float(reply["score"]), {str(name): float(value) for name, value in reply["metrics"].items()})
