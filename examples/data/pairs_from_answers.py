"""Writes pairs of answers from rows with a number as ground truth: the right number is chosen, a wrong one rejected.

    python examples/data/pairs_from_answers.py --data .cache/quickstart/data --out .cache/quickstart/pairs

Every row of train.parquet and val.parquet becomes {"prompt": ..., "chosen": "7", "rejected": "9"}; the wrong number is
near the right one, always the same for the same seed.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from megarl.rollout.rows import Row, load_rows, write_rows

SENTENCES = ("{}", "The answer is {}.", "It is {}.")  # both answers of a pair are worded alike


def to_pair(row: Row, draw: random.Random) -> Row:
    """One pair from a row in verl's form, whose ground truth is a whole number."""
    right = int(row["reward_model"]["ground_truth"])
    wrong = right + draw.choice([-3, -2, -1, 1, 2, 3])
    sentence = draw.choice(SENTENCES)
    return {"prompt": row["prompt"], "chosen": sentence.format(right), "rejected": sentence.format(wrong)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train.parquet and val.parquet")
    parser.add_argument("--out", required=True, help="folder to write the same files to")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for name in ("train", "val"):
        draw = random.Random(f"{args.seed} {name}")
        pairs = [to_pair(row, draw) for row in load_rows([str(Path(args.data) / f"{name}.parquet")])]
        path = Path(args.out) / f"{name}.parquet"
        write_rows(path, pairs)
        print(f"{path}: {len(pairs)} pairs")


if __name__ == "__main__":
    main()
