"""PyTorch's older weight files (`pytorch_model.bin`), which are pickles: read only when the user allows it.

torch's restricted reader (`weights_only`) builds tensors and nothing else: a file that asks for other code is refused.
Files of the zip form are mapped into memory, so a slice reads what it needs; older ones are held as a whole.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import KeysView
from pathlib import Path

import torch
from torch import Tensor

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


class PickledTensor:
    """One tensor of such a file, with the calls of a safetensors slice."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return SAFETENSORS_DTYPES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: object) -> Tensor:
        return self._tensor[index]  # pyright: ignore[reportArgumentType, reportCallIssue]


class PickledFile:
    """A pickled state dict, with the calls of an open safetensors file.

    Raises:
        ValueError: not such a file, cut short, or one that asks for more than tensors.
    """

    def __init__(self, path: Path) -> None:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a file of tensors: {str(error).splitlines()[0]}") from error
        tensors = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else None
        if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
            raise ValueError(f"{path} holds no plain mapping of names to tensors")
        self._tensors: dict[str, Tensor] = tensors

    def keys(self) -> KeysView[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> PickledTensor:
        return PickledTensor(self._tensors[name])
