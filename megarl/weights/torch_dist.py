"""The files of a Megatron checkpoint (torch_dist): which rectangle of which tensor lies where in which file.

    folder/metadata.json    the format's name, written last
    folder/.metadata        a pickle: shapes and dtypes, and for each rectangle file, offset and length
    folder/__R_N.distcp     rectangles one after the other, each as `torch.save` writes a tensor

`.metadata` is a pickle by the format. It is read with a reader that knows torch's record classes and nothing else, so
a file that would run code is refused. Rectangles are read with `weights_only`.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

FORMAT_FILE, METADATA_FILE, COMMON_FILE = "metadata.json", ".metadata", "common.pt"
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # how a layout is pickled: a look-up by name
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),  # the folder it was written to
    ("builtins", "set"),
    ("builtins", "slice"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),  # empty classes of older checkpoints
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor: `offset` and `shape` in it, and the bytes of `file` that hold it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint; its chunks cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class _RecordReader(pickle.Unpickler):
    """Reads torch's records of tensors and files; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PLAIN:
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return _StorageInfo
        if module in RECORDS:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def is_checkpoint(folder: Path) -> bool:
    """True for a folder that holds a finished Megatron checkpoint of this format, or one that claims to."""
    return (folder / METADATA_FILE).is_file() and (folder / FORMAT_FILE).is_file()


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by key. Only the index is read.

    Raises:
        ValueError: another format, an index that cannot be read, files that are missing or shorter than it says.
    """
    for name in (FORMAT_FILE, METADATA_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no complete Megatron checkpoint: {name} is missing")
    try:
        backend = json.loads((folder / FORMAT_FILE).read_text())["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / FORMAT_FILE} cannot be read: {error!r}") from error
    if backend != FORMAT["sharded_backend"]:
        raise ValueError(f"{folder} is of format {backend!r}; megarl reads torch_dist")
    metadata = read_metadata(folder / METADATA_FILE)
    if metadata.storage_data is None:
        raise ValueError(f"{folder / METADATA_FILE} does not say in which files its tensors are")
    tensors: dict[str, StoredTensor] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            chunks = tuple(_find_chunk(folder, key, chunk, metadata.storage_data) for chunk in stored.chunks)
            tensors[key] = StoredTensor(tuple(stored.size), stored.properties.dtype, chunks)
    _check_files(folder, tensors)
    return tensors


def read_metadata(file: Path) -> Metadata:
    """The index of a checkpoint. Raises ValueError where the pickle is broken or names what does not belong there."""
    try:
        with file.open("rb") as stream:
            metadata = _RecordReader(stream).load()
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, ImportError, IndexError, TypeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{file} cannot be read: it holds a {type(metadata).__name__}, no index of tensors")
    return metadata


def _find_chunk(folder: Path, key: str, chunk: ChunkStorageMetadata, storage: Any) -> Chunk:
    info = storage.get(MetadataIndex(key, chunk.offsets))
    if info is None:
        raise ValueError(f"{folder / METADATA_FILE} does not say where {key} from {tuple(chunk.offsets)} is stored")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(
            f"{folder}: {key} is stored transformed ({info.transform_descriptors}), megarl reads plain files"
        )
    return Chunk(tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length)


def _check_files(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    ends: dict[str, int] = {}
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
    for file, end in ends.items():
        path = folder / file
        if not path.is_file():
            raise ValueError(f"{path} is missing; the checkpoint is not complete")
        if path.stat().st_size < end:
            raise ValueError(f"{path} is cut short: it has {path.stat().st_size} bytes of {end}")


def read_chunk(folder: Path, chunk: Chunk) -> Tensor:
    """One rectangle, of the chunk's shape. Raises ValueError where the file does not hold it."""
    try:
        with (folder / chunk.file).open("rb") as stream:
            view = _create_file_view(stream, chunk.start, chunk.length)
            tensor = torch.load(view, map_location="cpu", weights_only=True)  # pyright: ignore[reportArgumentType]
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{folder / chunk.file} cannot be read at byte {chunk.start}: {error}") from error
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.shape:
        raise ValueError(f"{folder / chunk.file} holds something else at byte {chunk.start} than its index says")
    return tensor


def write_index(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    """Writes `.metadata`, `common.pt` and, last, `metadata.json`: from then on the folder is a checkpoint."""
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for key, tensor in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in tensor.chunks]
        described[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)
        for number, chunk in enumerate(tensor.chunks):
            index = MetadataIndex(key, torch.Size(chunk.offset), number)
            storage[index] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    with (folder / METADATA_FILE).open("wb") as stream:
        pickle.dump(Metadata(state_dict_metadata=described, storage_data=storage), stream)
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / COMMON_FILE)
    (folder / FORMAT_FILE).write_text(json.dumps({**FORMAT, "common_backend_version": 1}))
