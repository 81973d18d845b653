"""Every stream of random numbers of this process, taken down and put back.

What decides a run's results is drawn from seeds derived from (seed, purpose, step), so these states matter only to
code that draws from a global generator: a user's reward function, dropout, a library.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megarl import device

RngState = dict[str, Any]


def capture_rng() -> RngState:
    """The states, as tensors and plain values."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "device": device.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "python": [version, list(numbers), gauss],
        "megatron": {name: state.cpu() for name, state in _tracker().get_states().items()},
    }


def restore_rng(state: RngState) -> None:
    """Puts back what `capture_rng` took down; Megatron's streams as far as this grid has them too."""
    torch.set_rng_state(state["torch"])
    device.set_rng_state(state["device"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    tracker = _tracker()
    own = tracker.get_states()
    tracker.set_states({name: state["megatron"].get(name, values) for name, values in own.items()})


def _tracker() -> Any:
    """Megatron's named streams of random numbers."""
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "Megatron has no random streams yet: they are made with the first model"
    return tracker
