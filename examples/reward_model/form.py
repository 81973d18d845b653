"""The form of an answer: it ends with a number. Whether the number is right is for the reward model to say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.reward.rules import numeric


def ends_with_number(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 for an answer that ends with a number, right or wrong; else 0."""
    return numeric(data_source, solution_str, ground_truth)["format"]
