"""Log lines: who speaks, how loud, and silence for what does not matter.

By default rank 0 speaks at INFO and every other rank only in warnings. Each line tells its rank, and its place in the
grid when there is more than one: `[rank 1 actor tp0 pp1 dp0] ...`.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

# Read by the libraries when they are first imported; a value that the user set stays.
QUIET_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

# Speak at INFO or WARNING of things nobody can act on here.
_QUIET_LOGGERS = ("megatron", "vllm", "transformers", "datasets", "torch", "urllib3", "matplotlib", "absl", "numexpr")
_QUIET_MODULES = (r"megatron\.", r"vllm\.", r"transformers\.", r"torch\.", r"tensorboard\.")


def quiet_environment() -> None:
    """Sets what libraries read at import, where the user has not. Call it before they are imported."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def setup_logging(rank: int, all_ranks: bool = False, place: str = "") -> None:
    """Directs the log of this process to standard error.

    Args:
        rank: the global rank.
        all_ranks: every rank speaks at INFO, not only rank 0.
        place: where the rank sits, such as `actor tp0 pp1 dp0`; may be told later by a second call.
    """
    who = f"[rank {rank}{' ' + place if place else ''}]"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{who} %(levelname).1s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("megarl").setLevel(logging.INFO if rank == 0 or all_ranks else logging.WARNING)
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in _QUIET_MODULES:
        warnings.filterwarnings("ignore", module=module)
