"""A model that computes nothing and takes the time it is told to: for running schedules as they are, without a model.

Forward, backward and weight gradient sleep; small tensors travel, and a backward refuses a gradient that is not the
one of its micro-batch. So a schedule of many stages runs as processes on few cores, and what the executor adds to the
simulated time shows.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from megarl.parallel.costs import Costs, cost_of
from megarl.parallel.groups import RoleGroups
from megarl.parallel.pipeline import StageModel
from megarl.parallel.schedule import Action, Instruction, ModelPlan


class _Sleep(torch.autograd.Function):
    """Sleeps in both directions; forward adds 1, so that what arrives tells through how many chunks it went."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, label: float, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.label, ctx.backward_s = label, backward_s
        return x + 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        time.sleep(ctx.backward_s)
        grad = grads[0]
        assert torch.equal(grad, torch.full_like(grad, ctx.label)), f"gradient {grad} for micro-batch {ctx.label}"
        return grad, None, None, None


def build_sleeping_model(plan: ModelPlan, costs: Costs, groups: RoleGroups, size: int = 1) -> StageModel:
    """A `StageModel` whose computations take the seconds that `costs` say.

    Args:
        plan: its part in the schedule.
        costs: in seconds.
        groups: this rank's place.
        size: numbers in a tensor that travels.

    Each chunk adds 1 to the micro-batch's number times 1000; a gradient carries the micro-batch's number.
    """

    def seconds(action: Action, micro_batch: int, chunk: int) -> float:
        return cost_of(Instruction(action, plan.name, micro_batch, chunk), plan, costs)

    last_backward: dict[int, int] = {}

    def forward(chunk: int, micro_batch: int, received: Tensor | None) -> Tensor:
        x = torch.full((size,), 1000.0 * micro_batch, requires_grad=plan.trains) if received is None else received
        expected = 1000.0 * micro_batch + chunk
        assert float(x.detach()[0]) == expected, f"chunk {chunk} got {float(x.detach()[0])}, not {expected}"
        forward_s = seconds("FORWARD", micro_batch, chunk)
        backward_s = seconds("BACKWARD", micro_batch, chunk) if plan.trains else 0.0
        output = _Sleep.apply(x, float(micro_batch), forward_s, backward_s)
        assert isinstance(output, Tensor)
        return (output * micro_batch).sum() if plan.trains and chunk == plan.num_chunks - 1 else output

    def take_weight_gradients(chunk: int) -> Any:
        micro_batch = last_backward[chunk] = last_backward.get(chunk, -1) + 1
        return lambda: time.sleep(seconds("WGRAD", micro_batch, chunk) if plan.splits else 0.0)

    def step(mini_batch: int) -> None:
        time.sleep(costs.models[plan.name].step)
        torch.distributed.barrier(group=groups.everyone)

    shapes = [(size,)] * plan.num_micro_batches
    return StageModel(forward, shapes, torch.float32, groups, take_weight_gradients, None, step)
