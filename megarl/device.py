"""The one place that knows whether this process computes on a GPU or on the CPU.

Everything else asks here: which device, which collective backend, how much memory, which dtype is fast. On a machine
without a GPU, Megatron-Core still calls into `torch.cuda`; `megatron_scope` stands in for those calls while Megatron
code runs, and only then: vLLM, living in the same process, must never see it.

    with megatron_scope():              # forward and backward
        loss = model(...)
    with megatron_build_scope():        # building models and optimizers, optimizer steps
        optimizer.step()

On a GPU both scopes do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@functools.cache
def has_gpu() -> bool:
    """True when this process computes on an NVIDIA GPU. Chosen once, for the whole run."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this process's models."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def backend() -> str:
    """The `torch.distributed` backend: device tensors over NCCL and host tensors over gloo, or gloo alone."""
    return "cpu:gloo,cuda:nccl" if has_gpu() else "gloo"


def bind_local_device(local_rank: int) -> None:
    """Makes this process use the GPU of its local rank; nothing to do on a CPU."""
    if has_gpu():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


@functools.cache
def has_fast_bf16() -> bool:
    """True where bf16 matrix products are faster than fp32: any GPU, and CPUs with AVX512-BF16 or AMX."""
    if has_gpu():
        return True
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except FileNotFoundError:  # not Linux: nothing is known of the CPU
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def pick_dtype(requested: str) -> torch.dtype:
    """The dtype that `auto`, `bf16` or `fp32` means on this machine."""
    if requested == "auto":
        return torch.bfloat16 if has_fast_bf16() else torch.float32
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[requested]


def peak_memory_bytes() -> int:
    """The most memory this process has held so far: device memory on a GPU, resident memory on a CPU."""
    if has_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def release_cached_memory() -> None:
    """Gives memory that torch holds in reserve back to the device, so that another role can have it."""
    if has_gpu():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Waits until the device has done everything asked of it; for timing."""
    if has_gpu():
        torch.cuda.synchronize()


class Stopwatch:
    """Marks points in time on the device's own clock without waiting for it; `read` waits once, at the end."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def mark(self) -> int:
        """The number of this point in time: when the device gets here."""
        if has_gpu():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        return len(self._marks) - 1

    def read(self) -> list[float]:
        """Seconds from the first mark to each."""
        if not self._marks:
            return []
        first = self._marks[0]
        if has_gpu():
            self._marks[-1].synchronize()
            return [first.elapsed_time(mark) / 1e3 for mark in self._marks]
        return [mark - first for mark in self._marks]


def get_rng_state() -> torch.Tensor:
    """The state of the device's random numbers; empty on a CPU, whose state is torch's own."""
    return torch.cuda.get_rng_state() if has_gpu() else torch.zeros(0, dtype=torch.uint8)


def set_rng_state(state: torch.Tensor) -> None:
    """Puts back what `get_rng_state` gave; a state of another kind of device is left alone."""
    if has_gpu() and state.numel():
        torch.cuda.set_rng_state(state)


def describe() -> str:
    """One line about the machine for the log."""
    if has_gpu():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, NCCL"
    fast = "bf16 is fast here" if has_fast_bf16() else "fp32 is faster than bf16 here"
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads a rank, gloo; {fast}"


class _NoStream:
    """What Megatron gets on a CPU when it asks for a CUDA stream or event: work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _host_rng_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_host_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


_STAND_INS: dict[tuple[Any, str], Any] = {}


def _stand_ins() -> dict[tuple[Any, str], Any]:
    """(module, name) -> what Megatron finds there on a CPU. Built at first use."""
    if not _STAND_INS:
        cuda = torch.cuda
        nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
        stream: Callable[..., _NoStream] = lambda *args, **kwargs: _NoStream()  # noqa: E731
        for module in (cuda, cuda.random):
            _STAND_INS[module, "get_rng_state"] = _host_rng_state
            _STAND_INS[module, "set_rng_state"] = _set_host_rng_state
            _STAND_INS[module, "manual_seed"] = torch.manual_seed
        _STAND_INS[cuda, "current_device"] = lambda: torch.device("cpu")
        _STAND_INS[cuda, "default_generators"] = {torch.device("cpu"): torch.default_generator}
        _STAND_INS[cuda, "is_initialized"] = lambda: True
        _STAND_INS[cuda, "synchronize"] = nothing
        _STAND_INS[cuda, "empty_cache"] = nothing
        for name in ("current_stream", "default_stream", "stream", "Stream", "Event"):
            _STAND_INS[cuda, name] = stream
        for name in ("range_push", "range_pop"):
            _STAND_INS[cuda.nvtx, name] = nothing
    return _STAND_INS


class _CudaMeansCpu(TorchFunctionMode):
    """Reads `device="cuda"` as cpu, makes `.cuda()` the identity, and lets `.type()` name the CUDA type of a tensor:
    Megatron's optimizers look at that name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


_scope_depth = 0


@contextlib.contextmanager
def megatron_scope() -> Iterator[None]:
    """While open, `torch.cuda` answers Megatron's questions on a CPU. May be nested; does nothing on a GPU."""
    global _scope_depth
    if has_gpu() or _scope_depth:
        _scope_depth += 1
        try:
            yield
        finally:
            _scope_depth -= 1
        return
    kept = {(module, name): getattr(module, name) for module, name in _stand_ins()}
    _scope_depth = 1
    try:
        for (module, name), value in _stand_ins().items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in kept.items():
            setattr(module, name, value)
        _scope_depth = 0


@contextlib.contextmanager
def megatron_build_scope() -> Iterator[None]:
    """`megatron_scope`, and tensors asked for on "cuda" are made on the CPU. Slower: not for the hot path."""
    if has_gpu():
        yield
        return
    with megatron_scope(), _CudaMeansCpu():
        yield


def is_megatron_scope_open() -> bool:
    """True while the stand-in is in place; the rollout engine refuses to run then."""
    return _scope_depth > 0 and not has_gpu()
