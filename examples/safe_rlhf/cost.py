"""The cost of an answer: the words it has beside its number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def words_beside_the_number(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    allowed: int = 0,
) -> float:
    """From 0 to 1: nothing for `allowed` words or fewer, a tenth for each further one; signs are no words."""
    words = [word for word in solution_str.split() if any(letter.isalpha() for letter in word)]
    return min(1.0, max(0, len(words) - allowed) / 10)
