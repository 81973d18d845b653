"""A Hugging Face folder written while training goes on: tensors are handed to a thread, which writes them.

The caller runs the collective that gathers the tensors; the thread has none. An export that fails is told and leaves
nothing behind, and the run goes on.
"""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megarl.weights.hf import save_hf_folder

STAGED_BYTES = 64 << 30  # tensors that may wait on the host for the disk


class BackgroundExport:
    """One export at a time; `run` waits for the one before."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._told: list[str] = []

    def run(
        self, tensors: Iterable[tuple[str, Tensor]], out: Path, config_from: str | Path, dtype: torch.dtype
    ) -> None:
        """Takes all tensors in and lets a thread write them.

        Args:
            tensors: name and whole tensor, run to its end here (it may be a collective).
            out, config_from, dtype: see `save_hf_folder`.
        """
        self.wait()
        for stale in out.parent.glob(f".{out.name}.writing-*"):  # of a run that was killed
            shutil.rmtree(stale, ignore_errors=True)
        feed = _Feed(STAGED_BYTES)
        self._thread = threading.Thread(
            target=self._write, args=(feed, out, config_from, dtype), name="megarl-export", daemon=True
        )
        self._thread.start()
        is_whole = False
        try:
            for name, tensor in tensors:
                feed.put(name, tensor.detach().to("cpu", dtype))
            is_whole = True
        finally:  # whatever ended the gathering, the thread must not wait for more
            feed.close(is_broken=not is_whole)

    def take_messages(self) -> list[str]:
        """What became of exports since the last call, one line each."""
        told, self._told = self._told, []
        return told

    def wait(self) -> None:
        """Waits for the export that is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, feed: _Feed, out: Path, config_from: str | Path, dtype: torch.dtype) -> None:
        try:
            save_hf_folder(feed.take(), out, config_from, dtype)
            self._told.append(f"saved {out}")
        except Exception as error:  # noqa: BLE001 (an export must not end the run; it is told)
            for stale in out.parent.glob(f".{out.name}.writing-*"):
                shutil.rmtree(stale, ignore_errors=True)
            self._told.append(f"{out} could not be saved, the run goes on: {type(error).__name__}: {error}")
        finally:
            feed.drop()


class _Feed:
    """Tensors from one thread to another, at most `limit` bytes of them (and one more) at a time."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._waiting: deque[tuple[str, Tensor]] = deque()
        self._changed = threading.Condition()
        self._is_closed = self._is_broken = self._is_dropped = False

    def put(self, name: str, tensor: Tensor) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._held < self._limit or self._is_dropped)
            if not self._is_dropped:
                self._waiting.append((name, tensor))
                self._held += tensor.nbytes
            self._changed.notify_all()

    def close(self, is_broken: bool = False) -> None:
        with self._changed:
            self._is_closed, self._is_broken = True, is_broken
            self._changed.notify_all()

    def drop(self) -> None:
        """Nobody takes any more: what comes is let go."""
        with self._changed:
            self._is_dropped = True
            self._waiting.clear()
            self._changed.notify_all()

    def take(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if self._is_broken:
                    raise RuntimeError("the tensors did not come to their end")
                if not self._waiting:
                    return
                name, tensor = self._waiting.popleft()
            yield name, tensor
            with self._changed:
                self._held -= tensor.nbytes
                self._changed.notify_all()
