"""Writes train.parquet and val.parquet with sums such as `4 - 1 =`, made by reasoning-gym, in verl's row form.

    python examples/data/reasoning_gym_chain_sum.py --out data/chain_sum --train 2000 --val 64 --digits 1 --terms 2

The questions of val.parquet are all different, and none of them is in train.parquet. Small settings have few
questions (one digit, two terms: 200), so train.parquet may hold a question more than once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import reasoning_gym

from megarl.rollout.rows import Row, write_rows

_DRAWS_PER_ROW = 200  # after so many draws for one new row, there is none


def draw_problems(digits: int, terms: int, seed: int) -> Iterator[dict[str, Any]]:
    """Problems without end, always the same for the same arguments."""
    problems = reasoning_gym.create_dataset(
        "chain_sum", size=1 << 40, seed=seed, min_terms=terms, max_terms=terms, min_digits=digits, max_digits=digits
    )
    index = 0
    while True:
        yield problems[index]
        index += 1


def to_row(problem: dict[str, Any], split: str, index: int) -> Row:
    return {
        "data_source": "reasoning_gym/chain_sum",
        "prompt": [{"role": "user", "content": problem["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem["answer"]},
        "extra_info": {"split": split, "index": index, "question": problem["question"]},
    }


def make_splits(num_train: int, num_val: int, digits: int, terms: int, seed: int) -> tuple[list[Row], list[Row]]:
    """The rows of both files.

    Raises:
        ValueError: there are not enough different questions.
    """
    problems = draw_problems(digits, terms, seed)
    val: dict[str, Row] = {}
    for problem in islice(problems, num_val * _DRAWS_PER_ROW):
        if len(val) == num_val:
            break
        val.setdefault(problem["question"], to_row(problem, "val", len(val)))
    train: list[Row] = []
    for problem in islice(problems, num_train * _DRAWS_PER_ROW):
        if len(train) == num_train:
            break
        if problem["question"] not in val:
            train.append(to_row(problem, "train", len(train)))
    if len(val) < num_val or len(train) < num_train:
        raise ValueError(
            f"--digits {digits} --terms {terms} has too few different questions for --val {num_val}: "
            f"{len(val)} for val.parquet and {len(train)} rows outside it; lower --val, or raise --digits or --terms"
        )
    return train, list(val.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for train.parquet and val.parquet")
    parser.add_argument("--train", type=int, default=2000, help="rows of train.parquet")
    parser.add_argument("--val", type=int, default=64, help="rows of val.parquet")
    parser.add_argument("--digits", type=int, default=1)
    parser.add_argument("--terms", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    try:
        train, val = make_splits(args.train, args.val, args.digits, args.terms, args.seed)
    except ValueError as error:
        parser.error(str(error))
    for name, rows in (("train", train), ("val", val)):
        path = Path(args.out) / f"{name}.parquet"
        write_rows(path, rows)
        different = len({row["extra_info"]["question"] for row in rows})
        print(f"{path}: {len(rows)} rows, {different} different questions")


if __name__ == "__main__":
    main()
