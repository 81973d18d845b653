"""When a run must end early: SIGTERM, SIGUSR1 (a batch system's warning), or the time that it was given is over.

    first signal   ─> noted; the main loop saves after the step and leaves with REQUEUE_EXIT (75): start me again
    second signal  ─> the process leaves at once, wherever it is

Python runs signal handlers only between its own instructions, and a rank may wait in a collective for minutes. So the
signals are read from a pipe by a thread of their own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

REQUEUE_EXIT = 75
"""The exit code of a run that saved and wants to be started again with the same command (EX_TEMPFAIL of sysexits.h)."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_STARTED = time.monotonic()


class StopRequest:
    """What has asked this process to stop. `install` is for the main thread of a rank.

    Args:
        wall_time_s: the time that the run was given, counted from the start of the process; None = no limit.
    """

    def __init__(self, wall_time_s: float | None = None) -> None:
        self._wall_time_s = wall_time_s
        self._number = 0
        self._longest_step_s = 0.0
        self._pipe: tuple[int, int] | None = None
        self._is_over = False

    @property
    def signal_number(self) -> int:
        """The first signal that came; 0 = none."""
        return self._number

    def install(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        """Takes the signals over."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, self._note)
            signal.siginterrupt(number, False)  # system calls of libraries go on
        threading.Thread(target=self._watch, args=(self._pipe[0], frozenset(signals)), daemon=True).start()

    def close(self) -> None:
        """From here on signals change nothing: all is saved, and the exit code is to say so.

        Under srun the first rank that leaves makes the others get SIGTERM, which would be their second signal.
        """
        self._is_over = True

    def is_time_over(self, last_step_s: float, save_s: float) -> bool:
        """Whether another step like the longest one so far, and a save, would not fit any more."""
        if self._wall_time_s is None:
            return False
        self._longest_step_s = max(self._longest_step_s, last_step_s)
        return time.monotonic() - _STARTED + self._longest_step_s + save_s > self._wall_time_s

    def _note(self, number: int, _frame: object) -> None:
        self._number = self._number or number

    def _watch(self, source: int, signals: frozenset[int]) -> None:
        seen = 0
        while data := os.read(source, 1):
            if data[0] not in signals or self._is_over:
                continue
            seen += 1
            self._number = self._number or data[0]
            if seen == 2:
                sys.stderr.write(f"megarl: a second {signal.Signals(data[0]).name}: leaving at once, without saving\n")
                sys.stderr.flush()
                os._exit(128 + data[0])
