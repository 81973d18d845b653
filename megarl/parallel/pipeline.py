"""Runs one rank's list of pipeline instructions: receive, compute, send.

The shapes that travel between stages are known beforehand to every stage, so there is no handshake. Sends are posted
and left to finish on their own; a receive is posted when its instruction comes up and waited for. Activations and
gradients use a process group each (see `RoleGroups`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import device
from megarl.parallel.groups import RoleGroups
from megarl.parallel.schedule import Instruction


def run_pipeline(
    plan: Sequence[Instruction],
    forward: Callable[[int, Tensor | None], Tensor],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    groups: RoleGroups,
) -> None:
    """Runs `plan` on this rank. Every rank of the role runs its own stage's plan.

    Args:
        plan: this stage's instructions.
        forward: (micro-batch, received hidden states or None on the first stage) -> hidden states to pass on, or on
            the last stage a scalar loss, already divided by the weight of the whole mini-batch. Where the plan holds
            no backward its result on the last stage is not used.
        shapes: shape of the hidden states of each micro-batch.
        dtype: their dtype.
        groups: this rank's place in the role.

    Gradients add up in the parameters (or where hooks put them); nothing is reduced over data-parallel ranks here.
    """
    trains = any(step.action == "B" for step in plan)
    stage = groups.at.pp
    received: dict[int, Tensor | None] = {}
    produced: dict[int, Tensor] = {}
    sends: list[tuple[dist.Work | None, Tensor]] = []

    def receive(m: int, peer_stage: int, group: dist.ProcessGroup) -> Tensor:
        buffer = torch.empty(shapes[m], dtype=dtype, device=device.device())
        dist.recv(buffer, src=groups.peer(peer_stage), group=group)
        return buffer

    def send(tensor: Tensor, peer_stage: int, group: dist.ProcessGroup) -> None:
        sends[:] = [(work, kept) for work, kept in sends if work is not None and not work.is_completed()]
        tensor = tensor.detach().contiguous()
        sends.append((dist.isend(tensor, dst=groups.peer(peer_stage), group=group), tensor))

    for step in plan:
        m = step.micro_batch
        if step.action == "F":
            hidden = None if groups.is_first_stage else receive(m, stage - 1, groups.forward_pp)
            if hidden is not None and trains:
                hidden.requires_grad_()
            output = forward(m, hidden)
            if not groups.is_last_stage:
                assert tuple(output.shape) == tuple(shapes[m]), f"stage {stage} made {output.shape}, not {shapes[m]}"
                send(output, stage + 1, groups.forward_pp)
            if trains:
                received[m], produced[m] = hidden, output
        else:
            grad = None if groups.is_last_stage else receive(m, stage + 1, groups.backward_pp)
            torch.autograd.backward(produced.pop(m), grad)
            hidden = received.pop(m)
            if hidden is not None:
                assert hidden.grad is not None, f"stage {stage}: micro-batch {m} gave its input no gradient"
                send(hidden.grad, stage - 1, groups.backward_pp)
    for work, _ in sends:
        if work is not None:
            work.wait()
