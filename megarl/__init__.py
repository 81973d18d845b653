"""megarl: reinforcement-learning post-training of large language models, native to Megatron-Core.

The names below are for programs of your own (`api.py`); they are imported when they are first used.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.api import (
        DPOTrainer,
        GRPOTrainer,
        PPOConfig,
        PPOTrainer,
        ReMaxTrainer,
        RewardModelTrainer,
        RLOOTrainer,
        SafeRLHFTrainer,
        Trainer,
        TrainResult,
    )
    from megarl.reward.remote import RemoteRewardModel

__version__ = "0.1.0"

__all__ = [
    "DPOTrainer",
    "GRPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "RLOOTrainer",
    "ReMaxTrainer",
    "RemoteRewardModel",
    "RewardModelTrainer",
    "SafeRLHFTrainer",
    "TrainResult",
    "Trainer",
    "__version__",
]

# At import Megatron names each optional package that it goes without; what is used is said once in our own log.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    module = "megarl.reward.remote" if name == "RemoteRewardModel" else "megarl.api"
    return getattr(importlib.import_module(module), name)
