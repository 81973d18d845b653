"""Parks a role's tensors in host memory while others need the device, and brings them back.

    parked = park_(tensors, keeps_contents=True)     # their memory on the device is free now
    bring_back_(parked)                              # the same tensors with the same values

Works on storages, so that views stay views: Megatron's parameters and gradients are views of contiguous buffers. On a
GPU the host copies are pinned. Gradients are zeroed before every update, so their contents are not kept and their
memory is simply given back: that is worth it on a CPU too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl import device
from megarl.trainer.roles import Role


@dataclass(frozen=True)
class Parked:
    """One storage whose memory was given back: its size, and its contents on the host where they are kept."""

    storage: torch.UntypedStorage
    num_bytes: int
    contents: Tensor | None


@dataclass(frozen=True)
class OffloadOptions:
    """What of a role leaves the device between its phases."""

    params: bool = False
    grads: bool = False
    optimizer: bool = False


def park_(tensors: Iterable[Tensor], keeps_contents: bool) -> list[Parked]:
    """Gives the memory of the tensors' storages back; the tensors must not be used until `bring_back_`.

    Args:
        tensors: of any shapes; those that share a storage are parked once. Storages that are empty stay as they are.
        keeps_contents: False: the values are lost, zeros come back.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    parked: list[Parked] = []
    for storage in storages.values():
        num_bytes = storage.nbytes()
        if not num_bytes:
            continue
        contents = None
        if keeps_contents:
            contents = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.has_gpu())
            contents.copy_(_view(storage), non_blocking=True)
        parked.append(Parked(storage, num_bytes, contents))
    device.synchronize()
    for each in parked:
        each.storage.resize_(0)
    return parked


def bring_back_(parked: Iterable[Parked]) -> None:
    """Undoes `park_`: memory of the same size, with the contents that were kept or zeros."""
    for each in parked:
        each.storage.resize_(each.num_bytes)
        if each.contents is None:
            _view(each.storage).zero_()
        else:
            _view(each.storage).copy_(each.contents, non_blocking=True)


def _view(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def list_gradients(role: Role) -> list[Tensor]:
    """The gradient buffers of a trained role."""
    assert role.training is not None, f"role {role.name} has no gradients"
    buffers = [buffer for chunk in role.training.chunks for buffer in vars(chunk)["buffers"]]
    return [buffer.grad_data for buffer in buffers]


def list_parameters(role: Role) -> list[Tensor]:
    """The weights of a role, trained or not."""
    return [parameter for chunk in role.chunks for parameter in chunk.parameters()]


def list_optimizer_state(role: Role) -> list[Tensor]:
    """Masters and moments of a trained role; a master that is the parameter itself is not listed."""
    assert role.training is not None, f"role {role.name} has no optimizer"
    own = {parameter.untyped_storage().data_ptr() for parameter in list_parameters(role)}
    found: list[Tensor] = []
    for part in role.training.optimizer.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        found += [parameter for group in inner.param_groups for parameter in group["params"]]
        found += [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor for tensor in found if tensor.dim() and tensor.untyped_storage().data_ptr() not in own]


class Offload:
    """Holds what of one role is parked at the moment."""

    def __init__(self, role: Role, options: OffloadOptions) -> None:
        self._role = role
        self._options = options
        self._parked: dict[str, list[Parked]] = {}

    def leave(self, keeps_params: bool = False) -> None:
        """Parks what the options name; what is parked already stays so.

        Args:
            keeps_params: the weights stay although the options name them, for a phase that reads them.
        """
        if self._options.grads and "grads" not in self._parked:
            self._parked["grads"] = park_(list_gradients(self._role), keeps_contents=False)
        if self._options.optimizer and "optimizer" not in self._parked:
            self._parked["optimizer"] = park_(list_optimizer_state(self._role), keeps_contents=True)
        if self._options.params and not keeps_params and "params" not in self._parked:
            self._parked["params"] = park_(list_parameters(self._role), keeps_contents=True)
        device.release_cached_memory()

    def return_params(self) -> None:
        """Brings the weights back: needed by every forward pass and by the weight transfer."""
        bring_back_(self._parked.pop("params", []))

    def return_all(self) -> None:
        """Brings everything back: needed by an update."""
        for name in ("params", "grads", "optimizer"):
            bring_back_(self._parked.pop(name, []))

    @property
    def parked_bytes(self) -> int:
        """Memory that is free because of this role."""
        return sum(each.num_bytes for parked in self._parked.values() for each in parked)
