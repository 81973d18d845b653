"""Writes pairs of answers from rows with a number as ground truth: the right number is chosen, a wrong one rejected.

    python examples/data/pairs_from_answers.py --data .cache/quickstart/data --out .cache/quickstart/pairs

Every row of train.parquet and val.parquet becomes {"prompt": ..., "chosen": "It is 7.", "rejected": "It is 9."}. A
wrong answer has a number up to 12 away from the right one, or none. One pair of each problem in train.parquet is kept
out of it and goes to other_pairs.parquet: pairs that training does not see, of problems that it sees. What val.parquet
asks is new.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from megarl.rollout.rows import Row, load_rows, write_rows

SENTENCES = ("{}", "The answer is {}.", "It is {}.")  # both answers of a pair are worded alike
FARTHEST = 12  # of a wrong number from the right one; a policy is wrong by any distance, so a judge must know them all
WITHOUT_NUMBER = "I do not know."


def list_pairs(row: Row) -> list[Row]:
    """Every pair that can be made of a row in verl's form, whose ground truth is a whole number."""
    right = int(row["reward_model"]["ground_truth"])
    wrong_numbers = [number for number in range(right - FARTHEST, right + FARTHEST + 1) if number != right]
    without_number = [WITHOUT_NUMBER] * 2  # two among 24 numbers, for each sentence
    return [
        {"prompt": row["prompt"], "chosen": sentence.format(right), "rejected": rejected}
        for sentence in SENTENCES
        for rejected in (*(sentence.format(wrong) for wrong in wrong_numbers), *without_number)
    ]


def split_pairs(rows: list[Row], seed: str) -> tuple[list[Row], list[Row]]:
    """One pair for each row, and one more for each different problem, which is none of the first."""
    draw = random.Random(seed)
    kept_out: dict[str, Row] = {}
    pairs: list[Row] = []
    for row in rows:
        choices = list_pairs(row)
        other = kept_out.setdefault(json.dumps(row["prompt"]), draw.choice(choices))
        pairs.append(draw.choice([pair for pair in choices if pair != other]))
    return pairs, list(kept_out.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train.parquet and val.parquet")
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows = {name: load_rows([str(Path(args.data) / f"{name}.parquet")]) for name in ("train", "val")}
    train, other = split_pairs(rows["train"], f"{args.seed} train")
    val, _ = split_pairs(rows["val"], f"{args.seed} val")
    for name, pairs in (("train", train), ("other_pairs", other), ("val", val)):
        path = Path(args.out) / f"{name}.parquet"
        write_rows(path, pairs)
        print(f"{path}: {len(pairs)} pairs")


if __name__ == "__main__":
    main()
