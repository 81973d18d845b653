"""One process of a scorer pool: `python -m megarl.reward.worker REQUESTS REPLIES PARENT` (two inherited pipes, a pid).

    first request   (spec, kwargs)                                       reply  {"ready": true} or {"error": text}
    every other     (data_source, solution_str, ground_truth, extra_info)  reply  {"score": x, "metrics": {...}}
                                                                              or  {"error": text}

Requests are pickled, since a ground truth can be any value of the data; replies are JSON, since the code that runs here
is not megarl's. A frame is eight bytes of length and the payload. The process leaves when its parent does, even from a
loop that never comes back to Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import struct
import sys
from typing import Any, BinaryIO

from megarl.reward.function import load_reward_function, read_result

LENGTH = struct.Struct("<q")


def write_frame(pipe: BinaryIO, payload: bytes) -> None:
    """Sends one frame."""
    pipe.write(LENGTH.pack(len(payload)) + payload)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> bytes | None:
    """The next frame; None when the other side is gone."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    payload = pipe.read(length)
    return payload if len(payload) == length else None


def main(requests_fd: int, replies_fd: int, parent: int) -> None:
    """Loads the function, then answers requests until the pipe closes.

    A batch system sends its signals to every process of a job. They are meant for the ranks, which save then; what they
    still need judged must not be lost.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)  # not SIG_IGN, which programs started here would inherit
    _die_with(parent)
    with open(requests_fd, "rb") as requests, open(replies_fd, "wb") as replies:
        first = read_frame(requests)
        if first is None:
            return
        try:
            function = load_reward_function(*pickle.loads(first))
        except ValueError as error:
            write_frame(replies, json.dumps({"error": str(error)}).encode())
            return
        write_frame(replies, json.dumps({"ready": True}).encode())
        while (request := read_frame(requests)) is not None:
            write_frame(replies, json.dumps(_judge(function, request)).encode())


def _judge(function: Any, request: bytes) -> dict[str, Any]:
    try:
        score, metrics = read_result(function(*pickle.loads(request)))
    except Exception as error:  # noqa: BLE001 - a user's function: the answer is marked, the pool caps the share
        return {"error": f"{type(error).__name__}: {error}"}
    return {"score": score, "metrics": metrics}


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that started it is gone (Linux)."""
    if sys.platform.startswith("linux"):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before the line above


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
