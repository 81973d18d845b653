"""Writes sums of two three-digit numbers, with a chat that shows how the calculator is called.

python examples/multi_turn/prepare_data.py --out .cache/calculator --train 512 --val 64
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

SHOWN = [
    {"role": "user", "content": "What is 215 + 460? Use the calculator."},
    {"role": "assistant", "content": "<calc>215+460</calc>"},
    {"role": "user", "content": "675"},
    {"role": "assistant", "content": "The answer is 675"},
]


def build_rows(count: int, seed: str) -> list[dict[str, object]]:
    """`count` questions, each behind the example that shows a call and its result."""
    numbers = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        one, other = numbers.randint(100, 999), numbers.randint(100, 999)
        question = {"role": "user", "content": f"What is {one} + {other}? Use the calculator."}
        rows.append({"prompt": [*SHOWN, question], "ground_truth": str(one + other), "data_source": "calculator"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=512)
    parser.add_argument("--val", type=int, default=64)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", options.train), ("val", options.val)):
        text = "".join(json.dumps(row) + "\n" for row in build_rows(count, name))
        (options.out / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
