"""What a role's Adam holds on this rank: for each parameter the fp32 master, its moments, and which stretch they are.

With data-parallel ranks each holds a stretch of the flattened parameter (Megatron's distributed optimizer), else one
rank holds all of it. Weights in fp32 are their own masters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.models.build import named_parameters
from megarl.trainer.optim import shards_optimizer
from megarl.trainer.roles import Role

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Master:
    """The elements `start` up to `stop` of parameter `name`, flattened, as the optimizer steps them.

    `values` is fp32, the live master (or the weights themselves); `optimizer` and `key` lead to its state.
    """

    name: str
    start: int
    stop: int
    values: Tensor
    optimizer: Any
    key: Tensor

    def moments(self) -> dict[str, Tensor]:
        """The live first and second moment, flattened; empty before the first step."""
        state = self.optimizer.state.get(self.key, {})
        return {name: state[name].view(-1) for name in MOMENTS if name in state}


def list_masters(role: Role) -> Iterator[Master]:
    """Every stretch that this rank steps."""
    assert role.training is not None, f"{role.name} does not learn"
    names = {parameter: name for name, parameter in named_parameters(role.chunks).items()}
    if not shards_optimizer(role.groups.topology):
        for part in role.training.optimizer.chained_optimizers:
            inner: Any = getattr(part, "optimizer", None)
            for group in inner.param_groups if inner is not None else ():
                by_key = {id(getattr(each, "main_param", each)): each for each in names}
                for key in group["params"]:
                    parameter = by_key[id(key)]
                    yield Master(names[parameter], 0, key.numel(), key.detach().view(-1), inner, key)
        return
    for part in role.training.optimizer.chained_optimizers:
        sharded: Any = part
        for parameter, (group, order) in getattr(sharded, "model_param_group_index_map", {}).items():
            stretch = sharded._get_model_param_range_map(parameter)["param"]
            key = sharded.optimizer.param_groups[group]["params"][order]
            values = key.detach().view(-1)
            assert values.numel() == stretch.end - stretch.start, f"{names[parameter]}: {values.numel()} of {stretch}"
            yield Master(names[parameter], stretch.start, stretch.end, values, sharded.optimizer, key)


def read_adam_step(role: Role) -> int:
    """How many steps this rank's Adam has taken; 0 where it holds nothing."""
    steps = [0]
    for master in list_masters(role):
        if master.moments():
            state = master.optimizer.state[master.key]
            own = [group["step"] for group in master.optimizer.param_groups if "step" in group]
            steps.append(int(state["step"] if "step" in state else own[0]))
    return max(steps)


def prepare_moments(role: Role, step: int) -> None:
    """Makes room for moments and sets the number of steps taken, as after `step` steps; the moments are zero."""
    if step == 0:
        return
    for master in list_masters(role):
        state = master.optimizer.state[master.key]
        for name in MOMENTS:
            state[name] = torch.zeros_like(master.key, dtype=torch.float32)
        if isinstance(master.optimizer, torch.optim.Adam):  # and its child AdamW; fused Adams count in the group
            state["step"] = torch.tensor(float(step))
        else:
            for group in master.optimizer.param_groups:
                group["step"] = step
