"""Rows to try a run with where there is no data yet: sums of two one-digit numbers, made in code."""

from __future__ import annotations

import random

from megarl.rollout.rows import Row


def build_sums(count: int, seed: int) -> list[Row]:
    """`count` rows, the same for the same seed: `What is 3 + 4? Answer with the number only.`, ground truth `7`."""
    dice = random.Random(seed)
    pairs = [(dice.randint(0, 9), dice.randint(0, 9)) for _ in range(count)]
    return [
        {
            "prompt": f"What is {a} + {b}? Answer with the number only.",
            "ground_truth": str(a + b),
            "data_source": "sums",
        }
        for a, b in pairs
    ]
