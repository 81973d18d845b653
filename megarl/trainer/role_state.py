"""A role as shards of a checkpoint: weights, fp32 masters and Adam's moments, for saving and for loading in place.

    actor/  embedding.word_embeddings.weight, decoder.layers.mlp.linear_fc1.weight, ...    the weights in their dtype
            optimizer.state.fp32_param.<name>      masters, where the weights are not fp32
            optimizer.state.exp_avg.<name>, optimizer.state.exp_avg_sq.<name>              moments, after a first step

Each element of each tensor is written by one rank: of weights every data-parallel replica writes its part, of masters
and moments each rank writes what it holds. So nothing is gathered, and any other grid can read it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from megarl.trainer.masters import MOMENTS, list_masters, prepare_moments, read_adam_step
from megarl.trainer.roles import Role
from megarl.trainer.sharded_folder import list_tensors, load_folder, shard
from megarl.weights.patches import Patch, cut_patches, plan_patches, plan_whole_model

MASTER = "fp32_param"


def state_prefix(what: str) -> str:
    """What goes before a parameter's name for its master or moments, as Megatron names them."""
    return f"optimizer.state.{what}."


def list_role_shards(role: Role, is_snapshot: bool = False) -> list[ShardedTensor]:
    """What this rank writes of a role that learns.

    Args:
        is_snapshot: copies of the tensors on the host, so that training may go on while they are written.
    """
    patches, shapes, writers = _plan_patches(role)
    dp_size, dp_rank = role.groups.topology.dp_size, role.groups.at.dp
    shards: list[ShardedTensor] = []

    def add(patch: Patch, values: torch.Tensor, prefix: str = "") -> None:
        values = values.detach()
        shards.append(shard(patch, values.to("cpu", copy=True) if is_snapshot else values.contiguous(), prefix))

    weights = role.weights()
    for name in writers:
        numel = weights[name].numel()
        share = -(-numel // dp_size)
        start, stop = min(share * dp_rank, numel), min(share * (dp_rank + 1), numel)
        for patch in cut_patches(patches[name], shapes[name], start, stop) if start < stop else ():
            add(patch, _rectangle(weights[name], patch))
    for master in list_masters(role):
        if master.name not in writers:
            continue
        tensors = master.moments()
        if role.dtype != torch.float32:
            tensors[MASTER] = master.values
        for patch in cut_patches(patches[master.name], shapes[master.name], master.start, master.stop):
            for what, values in tensors.items():
                add(patch, _stretch(values, patch, shapes[master.name], master.start), state_prefix(what))
    return shards


def count_adam_steps(role: Role) -> int:
    """Adam's steps so far, the same on every rank of the role; a collective of the role."""
    steps = torch.tensor(read_adam_step(role))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=role.groups.everyone)
    return int(steps)


def load_role(role: Role | None, path: Path, adam_step: int) -> None:
    """Fills weights, masters and moments from a folder that any grid wrote; a collective of the world.

    Args:
        role: None on ranks outside the role.
        adam_step: steps that Adam had taken.
    """
    shards: list[ShardedTensor] = []
    if role is not None:
        patches, shapes, _ = _plan_patches(role)
        prepare_moments(role, adam_step)
        weights = role.weights()
        for name, own in patches.items():
            for patch in own:
                shards.append(shard(patch, _rectangle(weights[name], patch)))
        for master in list_masters(role):
            tensors = master.moments() if adam_step else {}
            if role.dtype != torch.float32:
                tensors[MASTER] = master.values
            for patch in cut_patches(patches[master.name], shapes[master.name], master.start, master.stop):
                for what, values in tensors.items():
                    part = _stretch(values, patch, shapes[master.name], master.start)
                    shards.append(shard(patch, part, state_prefix(what)))
    load_folder(shards, path)


def find_mismatches(role: Role, path: Path, adam_step: int) -> list[str]:
    """Why a folder does not hold this role, in words; empty when it does."""
    stored = list_tensors(path)
    problems: list[str] = []
    whole = plan_whole_model(role.family, role.spec, role.head)
    needed = {
        home.key: (*(extent for _, extent in home.leading), *home.shape) for each in whole.values() for home in each
    }
    for key, shape in needed.items():
        if key not in stored:
            problems.append(f"it lacks the tensor {key}")
        elif stored[key][0] != shape:
            problems.append(f"its tensor {key} has shape {list(stored[key][0])}, the model {list(shape)}")
    kinds = [*(MOMENTS if adam_step else ()), *((MASTER,) if role.dtype != torch.float32 else ())]
    problems += [f"it lacks {state_prefix(kind)}*" for kind in kinds if state_prefix(kind) + min(needed) not in stored]
    dtypes = {str(stored[key][1]).removeprefix("torch.") for key in needed if key in stored}
    if dtypes and dtypes != {str(role.dtype).removeprefix("torch.")}:
        problems.append(f"its weights are {' and '.join(sorted(dtypes))}, here {role.name}.dtype is {role.dtype}")
    return problems


def _plan_patches(role: Role) -> tuple[dict[str, list[Patch]], dict[str, tuple[int, ...]], set[str]]:
    """Patches and shapes of this rank's parameters, and which of them it writes: a tied copy and what all
    tensor-parallel ranks hold alike is written by one."""
    whole = plan_whole_model(role.family, role.spec, role.head)
    patches = {layout.name: plan_patches(layout, whole) for layout in role.layouts}
    shapes = {layout.name: layout.shape for layout in role.layouts}
    writers = {
        layout.name
        for layout in role.layouts
        if not layout.is_tied_copy and not (layout.is_replicated and role.groups.at.tp > 0)
    }
    return patches, shapes, writers


def _rectangle(values: torch.Tensor, patch: Patch) -> torch.Tensor:
    """A view of the patch's part of a parameter."""
    return values[tuple(slice(a, a + n) for a, n in zip(patch.offset, patch.shape, strict=True))]


def _stretch(values: torch.Tensor, patch: Patch, shape: tuple[int, ...], start: int) -> torch.Tensor:
    """A view of the patch's elements in the flattened `values`, which begin at element `start` of the parameter."""
    first = 0
    for offset, extent in zip(patch.offset, shape, strict=True):
        first = first * extent + offset
    return values[first - start : first - start + patch.numel]
