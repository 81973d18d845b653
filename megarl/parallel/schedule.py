"""What each pipeline stage does, as a list of instructions. Pure: no tensors, no ranks.

An instruction names a micro-batch and an action; its transfers are implied: a forward receives from the stage before
and sends to the stage after, a backward the other way round. Two stages, three micro-batches, one-forward-one-backward
(Narayanan et al. 2021):

    stage 0:  F0 F1 B0 F2 B1 B2
    stage 1:  F0 B0 F1 B1 F2 B2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Instruction:
    """One action on one micro-batch: `F` forward, `B` backward."""

    action: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.action}{self.micro_batch}"


def plan_forward_only(num_micro_batches: int) -> list[Instruction]:
    """Every stage: all forwards in order."""
    return [Instruction("F", m) for m in range(num_micro_batches)]


def plan_1f1b(num_stages: int, stage: int, num_micro_batches: int) -> list[Instruction]:
    """One stage's part of the one-forward-one-backward schedule.

    A stage holds at most `num_stages - stage` micro-batches' activations at a time.
    """
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    plan = [Instruction("F", m) for m in range(warm_up)]
    for m in range(warm_up, num_micro_batches):
        plan += [Instruction("F", m), Instruction("B", m - warm_up)]
    plan += [Instruction("B", m) for m in range(num_micro_batches - warm_up, num_micro_batches)]
    return plan
