"""What each computation of a schedule costs. Pure.

Costs come from a run's own measurements or from ratios; only their proportions decide a schedule. A micro-batch costs
in proportion to its `work` (its tokens, say), so unequal micro-batches are planned as what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.parallel.schedule import Instruction, ModelPlan


@dataclass(frozen=True)
class ModelCosts:
    """Seconds, or any other unit, for a micro-batch of work 1.

    Attributes:
        forward, input_grad, weight_grad: by chunk; a backward that is not split costs both gradients.
        step: one optimizer step, the same on all stages.
        work: by micro-batch; empty = 1 each.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    step: float = 0.0
    work: tuple[float, ...] = ()


@dataclass(frozen=True)
class Costs:
    """By model name; `transfer`: from the end of a computation until its result has arrived on another stage.

    `are_seconds`: measured seconds, so a search may weigh its own time against what it can gain.
    """

    models: Mapping[str, ModelCosts]
    transfer: float = 0.0
    are_seconds: bool = False


def ratio_costs(
    model: ModelPlan, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0, step: float = 0.0
) -> ModelCosts:
    """Costs of equal stages, given per stage: a stage's chunks share them."""
    share, count = 1.0 / model.chunks_per_stage, model.num_chunks
    return ModelCosts(
        (forward * share,) * count, (input_grad * share,) * count, (weight_grad * share,) * count, step=step
    )


def ratio_costs_of(models: Sequence[ModelPlan], weight_grad: float = 1.0) -> Costs:
    """Equal models; `input_grad` is what a backward of twice the forward leaves beside `weight_grad`."""
    return Costs({model.name: ratio_costs(model, 1.0, 2.0 - weight_grad, weight_grad) for model in models})


def cost_of(step: Instruction, model: ModelPlan, costs: Costs) -> float:
    """Duration of one instruction; transfers cost nothing here, they delay."""
    own = costs.models[step.model]
    if step.action == "STEP":
        return own.step
    work = own.work[step.micro_batch] if own.work else 1.0
    if step.action == "FORWARD":
        return own.forward[step.chunk] * work
    if step.action == "BACKWARD":
        whole = own.input_grad[step.chunk] + (0.0 if model.splits else own.weight_grad[step.chunk])
        return whole * work
    return own.weight_grad[step.chunk] * work if step.action == "WGRAD" else 0.0
