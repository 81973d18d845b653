"""What every folder of weights can be asked, whatever its format: the tensors by their Hugging Face names.

`hf.HFFolder` reads safetensors (or, when asked to, pickles), `megatron_folder.MegatronFolder` a Megatron checkpoint.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """Tensors that are read by slices; nothing is held beyond what a call returns."""

    folder: Path

    @property
    def names(self) -> Set[str]:
        """Hugging Face names of the tensors that are there, prefix taken off."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """dtype that it is stored in."""
        ...

    def read(self, name: str, axis: int, start: int, length: int) -> Tensor:
        """`length` rows (axis 0) or columns (axis 1) from `start` on."""
        ...


def read_whole(source: TensorSource, name: str) -> Tensor:
    """The whole tensor."""
    return source.read(name, 0, 0, source.shape(name)[0])
