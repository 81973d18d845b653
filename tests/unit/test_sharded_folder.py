"""The pickle in a checkpoint's folder is read only when it names nothing but what belongs there."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from megarl.weights.torch_dist import read_metadata


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_a_pickle_that_would_run_a_command_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=Evil())))
    with pytest.raises(ValueError, match=r"it names posix\.system"):
        read_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "pwned").exists()


def test_no_other_name_is_reached_through_a_module_that_belongs_there(tmp_path: Path, monkeypatch) -> None:
    """torch's own module imports `os`; a pickle may name `os.system` in it."""
    monkeypatch.chdir(tmp_path)
    module, name, word = (
        b"\x8c" + bytes([len(text)]) + text
        for text in (b"torch.distributed.checkpoint.filesystem", b"os.system", b"touch pwned")
    )
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + module + name + b"\x93" + word + b"\x85R.")
    with pytest.raises(ValueError, match="which no checkpoint needs"):
        read_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps(Metadata({}))[:-5]])
def test_a_broken_one_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read"):
        read_metadata(tmp_path / ".metadata")


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([2, 3]), [])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"a": tensor})))
    read_metadata(tmp_path / ".metadata")
