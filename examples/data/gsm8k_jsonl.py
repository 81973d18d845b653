"""Turns a local GSM8K jsonl ({"question", "answer"}, answers end with `#### 42`) into parquet in verl's row form.

python examples/data/gsm8k_jsonl.py --in train.jsonl --out data/gsm8k --val 200
python examples/data/gsm8k_jsonl.py --in test.jsonl --out data/gsm8k --split test
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megarl.reward.rules import read_number
from megarl.rollout.rows import Row, load_rows, write_rows

INSTRUCTION = 'Think step by step, and write the final number on the last line after "####".'


def to_row(source: Row, split: str, index: int) -> Row:
    """One row. Raises ValueError when the answer has no number after `####`."""
    question, answer = source.get("question"), source.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ValueError(f"row {index} must have a question and an answer; it has {', '.join(source) or 'nothing'}")
    _, mark, number = answer.rpartition("####")
    if not mark or read_number(number) is None:
        raise ValueError(f"row {index}: the answer has no number after ####: ...{answer[-40:]!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in", dest="source", required=True, help="the jsonl file")
    parser.add_argument("--out", required=True, help="folder for SPLIT.parquet, and val.parquet with --val")
    parser.add_argument("--split", default="train")
    parser.add_argument("--val", type=int, default=0, help="rows at the end that go to val.parquet instead")
    args = parser.parse_args()
    try:
        sources = load_rows([args.source])
        if not 0 <= args.val < max(len(sources), 1):
            raise ValueError(f"--val {args.val} must be less than the {len(sources)} rows of {args.source}")
        if args.val and args.split == "val":
            raise ValueError("--split val and --val both write val.parquet; choose one")
        rows = [to_row(source, args.split, index) for index, source in enumerate(sources)]
    except ValueError as error:
        parser.error(str(error))
    kept = len(rows) - args.val
    splits = {args.split: rows[:kept]}
    if args.val:
        splits["val"] = [{**row, "extra_info": {**row["extra_info"], "split": "val"}} for row in rows[kept:]]
    for name, some in splits.items():
        path = Path(args.out) / f"{name}.parquet"
        write_rows(path, some)
        print(f"{path}: {len(some)} rows")


if __name__ == "__main__":
    main()
