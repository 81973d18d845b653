"""Linear layers whose weight gradient can wait: backward gives the input's gradient, the weight's is computed later.

    with gradients put aside:   backward of a micro-batch ──> input gradients, and a list of what is left to compute
                                the list, when a stage would idle ──> weight gradients, added to `main_grad`

The numbers are those of Megatron's own layers to the last bit: the same products of the same tensors, added in the
order of the micro-batches. With Transformer Engine its own layers do this (`backward_dw`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


@dataclass
class PutAside:
    """Weight gradients that the backward of a chunk has left for later.

    `is_open`: layers leave theirs here; else they compute them at once. `tasks`: what was left, in order.
    `run_delayed`: layers of Transformer Engine keep their own list, and this computes one micro-batch of it.
    """

    is_open: bool = False
    tasks: list[Callable[[], None]] = field(default_factory=list)
    run_delayed: Callable[[], None] | None = None

    def take(self) -> Callable[[], None]:
        """A function that computes what the last backward left."""
        if self.run_delayed is not None:
            return self.run_delayed
        taken, self.tasks = self.tasks, []

        @torch.no_grad()
        def run() -> None:
            while taken:
                taken.pop(0)()  # frees what it held before the next

        return run


def put_gradients_aside(model: torch.nn.Module) -> PutAside:
    """One `PutAside` for all layers of a chunk."""
    aside = PutAside()
    config: Any = vars(model)["config"]
    if config.delay_wgrad_compute:
        layers = list(vars(model)["_modules"]["decoder"].layers)

        def run_delayed() -> None:
            for layer in reversed(layers):
                layer.mlp.backward_dw()
                layer.self_attention.backward_dw()

        aside.run_delayed = run_delayed
    for module in model.modules():
        if isinstance(module, DeferredColumnParallelLinear | DeferredRowParallelLinear):
            module.aside = aside
    return aside


class DeferredColumnParallelLinear(ColumnParallelLinear):
    """Megatron's, able to leave its weight gradient in `aside`."""

    aside: PutAside | None = None

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.aside is None or not self.aside.is_open or not weight.requires_grad:
            return super()._forward_impl(input, weight, *args, **kwargs)
        group = kwargs["tp_group"] if kwargs["sequence_parallel"] or kwargs["allreduce_dgrad"] else None
        return _apply(input, weight, kwargs["bias"], self.aside, group, kwargs["sequence_parallel"])


class DeferredRowParallelLinear(RowParallelLinear):
    """Megatron's, able to leave its weight gradient in `aside`."""

    aside: PutAside | None = None

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.aside is None or not self.aside.is_open or not weight.requires_grad:
            return super()._forward_impl(input, weight, *args, **kwargs)
        assert not kwargs["allreduce_dgrad"], "a row-parallel layer's input gradient is its own"
        return _apply(input, weight, kwargs["bias"], self.aside, None, False)


def _apply(
    input: Tensor, weight: Tensor, bias: Tensor | None, aside: PutAside, group: Any, is_sequence_parallel: bool
) -> Tensor:
    output = _DeferredMatmul.apply(input, weight, bias, aside, group, is_sequence_parallel)
    assert isinstance(output, Tensor)
    return output


def _gather_tokens(part: Tensor, group: Any) -> Tensor:
    """[T / tp, ...] of each rank -> [T, ...] on all."""
    whole = part.new_empty((part.shape[0] * dist.get_world_size(group), *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


class _DeferredMatmul(torch.autograd.Function):
    """input [T or T / tp, 1, I] @ weight [O, I].t() + bias -> [T, 1, O].

    `group`: None, or the tensor-parallel ranks whose parts of the input's gradient are added up. The weight's gradient
    goes to `weight.main_grad` (Megatron's DDP made it), or to `weight.grad` where there is none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        aside: PutAside,
        group: Any,
        is_sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.aside, ctx.group, ctx.has_bias = aside, group, bias is not None
        ctx.is_sequence_parallel = is_sequence_parallel
        whole = _gather_tokens(input, group) if is_sequence_parallel else input
        output = torch.matmul(whole, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad, group, is_sequence_parallel = grads[0], ctx.group, ctx.is_sequence_parallel
        grad_input = grad.matmul(weight)
        if is_sequence_parallel:
            part = torch.empty_like(input)
            dist.reduce_scatter_tensor(part, grad_input.contiguous(), group=group)
            grad_input = part
        elif group is not None:
            dist.all_reduce(grad_input, group=group)

        def add_weight_gradient() -> None:
            whole = _gather_tokens(input, group) if is_sequence_parallel else input
            rows = grad.reshape(-1, grad.shape[-1])
            accumulate_gradient(weight, rows.t().matmul(whole.reshape(-1, whole.shape[-1])))

        ctx.aside.tasks.append(add_weight_gradient)
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(dim=0) if ctx.has_bias else None
        return grad_input, None, grad_bias, None, None, None


def accumulate_gradient(weight: Tensor, gradient: Tensor) -> None:
    """Adds to the fp32 buffer that Megatron's DDP gave this parameter, or to its `grad`."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)
