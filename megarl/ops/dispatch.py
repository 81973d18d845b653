"""The door to the extension `megarl._C`: loads it once and says which implementation computes.

    choose_implementation(require_extension=True)      # once, at the start of a job
    has_extension()                                    # afterwards, in the ops

The ops live under `torch.ops.megarl`; csrc/registration.cpp holds their schemas. Each op's own file gives it its fake
kernel when `has_extension()`. Without the extension plain torch computes the same (`reference.py`).
"""

from __future__ import annotations

import functools
import importlib
import logging

import torch

from megarl import device

OPS_VERSION = 1  # raise it with every change of a schema, together with csrc/version.h
REBUILD = "build it with `python setup.py build_ext --inplace` (`make setup` does)"

logger = logging.getLogger(__name__)


@functools.cache
def _load() -> str:
    """Loads the extension; the reason why it is not used, or an empty text."""
    try:
        importlib.import_module("megarl._C")
    except ImportError as error:
        return f"the extension megarl._C cannot be loaded ({error})"
    version = torch.ops.megarl.version()
    if version != OPS_VERSION:
        return f"the extension megarl._C is of edition {version}, this megarl needs {OPS_VERSION}"
    if device.has_gpu() and not _has_cuda_kernels():
        return "the extension megarl._C was built without CUDA kernels, and this process computes on a GPU"
    return ""


def _has_cuda_kernels() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("megarl::logprob_stats", "CUDA")


@functools.cache
def has_extension() -> bool:
    """True when the kernels of `megarl._C` are used. The answer never changes; a no is said once, loudly."""
    reason = _load()
    if reason:
        logger.warning("megarl computes with plain torch, several times slower: %s; %s", reason, REBUILD)
    return not reason


def choose_implementation(require_extension: bool) -> str:
    """Settles which implementation computes, for the log of a job.

    Returns:
        One line that names it.

    Raises:
        ValueError: the extension is required and cannot be used.
    """
    if require_extension and _load():
        raise ValueError(
            f"ops.require_extension=true, but {_load()}; {REBUILD}, or set ops.require_extension=false to compute "
            "with plain torch, several times slower"
        )
    if not has_extension():
        return "plain torch"
    return f"megarl._C, edition {OPS_VERSION}, {'CUDA' if device.has_gpu() else 'CPU'} kernels"
