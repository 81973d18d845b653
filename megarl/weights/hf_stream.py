"""Writes safetensors files of a Hugging Face folder tensor by tensor: one is in memory at a time.

Shapes and dtypes are known before any value is, so each file's header is written first and the values after it, in
the order in which they are read. The format (all of it): 8 bytes with the header's length, little-endian; the header,
JSON, name -> dtype, shape, begin and end of its bytes; then the bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.weights.partial import list_done, note_done, write_atomically
from megarl.weights.pickled import SAFETENSORS_DTYPES

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorEntry:
    """What a header says of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


def plan_files(entries: list[TensorEntry], max_bytes: int) -> dict[str, list[TensorEntry]]:
    """Shares tensors out over files of at most `max_bytes` in their order; one that is larger gets its own file.

    Returns:
        File name -> its tensors; `model.safetensors` alone where one file is enough.
    """
    groups: list[list[TensorEntry]] = [[]]
    held = 0
    for entry in entries:
        if groups[-1] and held + entry.num_bytes > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(entry)
        held += entry.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def write_files(
    files: Mapping[str, list[TensorEntry]],
    read: Callable[[str], Tensor],
    partial: Path,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Writes every file that is not done yet, then the index where there are several.

    Args:
        read: gives a whole tensor by name, in any float dtype.
        partial: the folder to write into, see `partial.py`.
        advance: told the bytes of each tensor written, and of each file found done.

    Raises:
        ValueError: a value that the wanted dtype cannot hold.
    """
    done = list_done(partial)
    for name, entries in files.items():
        if name in done:
            advance(sum(entry.num_bytes for entry in entries))
        else:
            _write_file(partial / name, entries, read, advance)
            note_done(partial, name, len(entries))
    if len(files) > 1:
        weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
        total = sum(entry.num_bytes for entries in files.values() for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomically(partial / INDEX, json.dumps(index, indent=2) + "\n")


def _write_file(
    path: Path, entries: list[TensorEntry], read: Callable[[str], Tensor], advance: Callable[[int], None]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        offsets = [end, end + entry.num_bytes]
        header[entry.name] = {
            "dtype": SAFETENSORS_DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets
        }  # fmt: skip
        end += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            values = cast(read(entry.name), entry.dtype, entry.name).contiguous()
            assert tuple(values.shape) == entry.shape, f"{entry.name}: {tuple(values.shape)} against {entry.shape}"
            stream.write(values.view(torch.uint8).numpy().data)
            advance(entry.num_bytes)
        stream.flush()
        os.fsync(stream.fileno())


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`tensor` in `dtype`. Raises ValueError where a finite value would become infinite."""
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        if bool((converted.isinf() & ~tensor.isinf()).any()):
            largest = tensor.abs().max().item()
            raise ValueError(f"{name} holds {largest:.3g}, more than {dtype} can hold; choose another --dtype")
    return converted
