"""What all benchmarks share: times taken in turns, memory taken at its peak, one flat JSON file and one table each.

Times of rivals are taken in turns (a b c, a b c, ...) and the best of each counts: what else the machine does then
hits all of them alike. A peak is what the process (on a GPU: the allocator) held beyond what it held before the call.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megarl import device

OUT = Path(__file__).parent / "out"
MIB = 1 << 20


def time_in_turns(rivals: Mapping[str, Callable[[], object]], rounds: int = 5, warm_ups: int = 1) -> dict[str, float]:
    """Seconds of the fastest call of each."""
    best = dict.fromkeys(rivals, float("inf"))
    for number in range(warm_ups + rounds):
        for name, call in rivals.items():
            device.synchronize()
            begin = time.perf_counter()
            call()
            device.synchronize()
            if number >= warm_ups:
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def measure_peak_bytes(call: Callable[[], object]) -> int:
    """Memory held at the peak of one call beyond what was held before; call it once before, for what stays."""
    gc.collect()
    device.synchronize()
    if device.has_gpu():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        device.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed goes back first, or the call would reuse it unseen
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _read_status("VmRSS")
    call()
    return max(0, _read_status("VmHWM") - before)


def _read_status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def report(name: str, figures: Mapping[str, float | int | str]) -> None:
    """Prints the table of a benchmark and writes benchmarks/out/NAME.json."""
    cpu = next((x.split(":")[1].strip() for x in _read_cpuinfo() if x.startswith("model name")), "unknown CPU")
    full = {**figures, "machine": f"{device.describe()}; {cpu}", "torch": torch.__version__}
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps(full, indent=2) + "\n")
    print(f"\n{name}")
    for key, value in full.items():
        print(f"  {key:<42} {value:.4g}" if isinstance(value, float) else f"  {key:<42} {value}")


def _read_cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def num_threads() -> int:
    """Threads that a benchmark computes with: OMP_NUM_THREADS, or all cores."""
    return int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
