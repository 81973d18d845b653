"""Data sets from files: parquet, jsonl, json, csv and folders that `datasets.save_to_disk` wrote.

    paths  ->  load_rows  ->  one list of dictionaries, in the order of the paths and of the rows inside each

A row is not interpreted here (see prompts.py). Errors name the file and the line, row group or column.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def load_rows(paths: Sequence[str]) -> list[Row]:
    """Reads all rows of all `paths` into memory.

    Raises:
        ValueError: a path that does not exist, is of an unknown kind, or cannot be read.
    """
    rows: list[Row] = []
    for path in paths:
        rows += _load_one(path)
    return rows


def write_rows(path: str | Path, rows: Sequence[Row]) -> None:
    """Writes rows as parquet: beside the target first, then renamed, so that a half-written file never has its name."""
    columns = set(rows[0]) if rows else set()
    odd = next((number for number, row in enumerate(rows) if set(row) != columns), None)
    if odd is not None:
        raise ValueError(f"{path}: row {odd} has the columns {sorted(rows[odd])}, row 0 has {sorted(columns)}")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows)), beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _load_one(path: str) -> list[Row]:
    if os.path.isdir(path):
        return _load_saved_data_set(path)
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such file")
    readers = {".parquet": _load_parquet, ".jsonl": _load_jsonl, ".json": _load_json, ".csv": _load_csv}
    reader = readers.get(Path(path).suffix)
    if reader is None:
        raise ValueError(f"{path}: unknown kind of file; use {', '.join(readers)} or a folder of `save_to_disk`")
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from error


def _load_parquet(path: str) -> list[Row]:
    """Row group by row group: arrow cannot join the groups of some nested columns."""
    rows: list[Row] = []
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from error
    with file:
        for group in range(file.num_row_groups):
            try:
                rows += file.read_row_group(group).to_pylist()
            except (pa.ArrowException, OSError) as error:
                column = _find_bad_column(file, group)
                raise ValueError(f"{path}: row group {group}, column {column} cannot be read: {error}") from error
    return rows


def _find_bad_column(file: pq.ParquetFile, group: int) -> str:
    for name in file.schema_arrow.names:
        try:
            file.read_row_group(group, columns=[name]).to_pylist()
        except (pa.ArrowException, OSError):
            return repr(name)
    return "unknown"


def _load_jsonl(path: str) -> list[Row]:
    rows: list[Row] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}: line {number} is not JSON: {error.msg} at column {error.colno}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}: line {number} holds {type(row).__name__}, not an object with named columns")
            rows.append(row)
    return rows


def _load_json(path: str) -> list[Row]:
    with open(path, encoding="utf-8") as file:
        try:
            rows = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}: line {error.lineno} is not JSON: {error.msg}; one object a line is .jsonl"
            ) from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: must hold a list of objects, not {type(rows).__name__}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: entry {number} holds {type(row).__name__}, not an object with named columns")
    return rows


def _load_csv(path: str) -> list[Row]:
    rows: list[Row] = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    names = len(reader.fieldnames or ())
                    raise ValueError(
                        f"{path}: line {reader.line_num} does not have the {names} columns of the first line"
                    )
                rows.append(dict(row))
        except csv.Error as error:
            raise ValueError(f"{path}: line {reader.line_num} is not CSV: {error}") from error
    return rows


def _load_saved_data_set(path: str) -> list[Row]:
    import datasets  # takes a second to import, and only these folders need it

    try:
        data_set = datasets.load_from_disk(path)
    except (FileNotFoundError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path}: not a folder that `datasets.save_to_disk` wrote: {error}") from error
    if isinstance(data_set, datasets.DatasetDict):
        splits = ", ".join(f"{path.rstrip('/')}/{name}" for name in data_set)
        raise ValueError(f"{path}: holds several splits; name one of {splits}")
    return data_set.to_list()
