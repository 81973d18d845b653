"""Plain torch for the ops on packed sequences and on lists of segments: what they mean, written to be read.

It is the oracle of the tests and computes where the extension is absent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: Tensor,
    lam: Tensor,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE as a loop over positions, last first, all sequences side by side.

    Args:
        rewards, values: [T] of one dtype, in which everything is computed.
        mask: [T] bool.
        cu_seqlens: [B+1] int64.
        gamma, lam, bootstrap: [B].

    Returns:
        advantages [T], returns [T].
    """
    lengths = cu_seqlens.diff()
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    if not values.numel():
        return advantages, returns
    gamma, lam = gamma.to(values.dtype), lam.to(values.dtype)
    next_value = torch.zeros_like(gamma) if bootstrap is None else bootstrap.to(values.dtype).clone()
    running, carried = torch.zeros_like(gamma), torch.zeros_like(gamma)
    for back in range(int(lengths.max())):
        inside = lengths > back
        at = (cu_seqlens[1:] - 1 - back).clamp(min=0)
        reward, value, is_policy = rewards[at], values[at], mask[at] & inside
        advantage = reward + carried + gamma * next_value - value + gamma * lam * running
        running = torch.where(is_policy, advantage, running)
        next_value = torch.where(is_policy, value, next_value)
        moved = torch.where(inside & reward.isfinite(), reward, 0.0)
        carried = torch.where(is_policy, 0.0, carried + moved)
        where = at[is_policy]
        advantages[where] = advantage[is_policy]
        returns[where] = (advantage + value)[is_policy]
    return advantages, returns


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """[3] fp64: count, mean and sum of squared distances from the mean of the elements under the mask."""
    chosen = x[mask].double()
    if not chosen.numel():
        return torch.zeros(3, dtype=torch.float64, device=x.device)
    mean = chosen.mean()
    return torch.stack([chosen.new_tensor(float(chosen.numel())), mean, (chosen - mean).square().sum()])


def whiten(x: Tensor, mask: Tensor, moments: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(unbiased variance + eps) under the mask; 0 outside, and all 0 for a count below 2."""
    count, mean, m2 = moments
    scale = torch.where(count < 2, 0.0, (m2 / (count - 1).clamp(min=1) + eps).rsqrt())
    return torch.where(mask, (x.double() - mean) * scale, 0.0).to(x.dtype)


def copy_segments(srcs: Sequence[Tensor], dsts: Sequence[Tensor], plan: Tensor) -> None:
    """One segment after the other. `plan`: [N, 8] int64, columns as in `megarl.ops.reshard`."""
    rows_of_plan = [tuple(int(number) for number in row) for row in plan.tolist()]
    for index, segment in enumerate(rows_of_plan):
        _check_segment(srcs, dsts, index, *segment)
    for src, src_offset, src_stride, dst, dst_offset, dst_stride, rows, width in rows_of_plan:
        if rows and width:
            flat_src, flat_dst = srcs[src].view(-1), dsts[dst].view(-1)
            taken = flat_src.as_strided((rows, width), (src_stride, 1), flat_src.storage_offset() + src_offset)
            flat_dst.as_strided((rows, width), (dst_stride, 1), flat_dst.storage_offset() + dst_offset).copy_(taken)


def _check_segment(
    srcs: Sequence[Tensor],
    dsts: Sequence[Tensor],
    index: int,
    src: int,
    src_offset: int,
    src_stride: int,
    dst: int,
    dst_offset: int,
    dst_stride: int,
    rows: int,
    width: int,
) -> None:
    def refuse(why: str) -> RuntimeError:
        return RuntimeError(f"copy_segments: segment {index} {why}")

    if rows < 0 or width < 0:
        raise refuse(f"has {rows} rows of {width} elements; neither may be negative")
    sides = (
        ("srcs", "reads", srcs, src, src_offset, src_stride),
        ("dsts", "writes", dsts, dst, dst_offset, dst_stride),
    )
    for name, verb, tensors, tensor, offset, stride in sides:
        if not 0 <= tensor < len(tensors):
            raise refuse(f"names {name}[{tensor}], there are {len(tensors)}")
        if offset < 0 or stride < 0:
            raise refuse(f"has offset {offset} and row stride {stride} in {name}[{tensor}]; neither may be negative")
        end = offset + (rows - 1) * stride + width
        if rows and width and end > tensors[tensor].numel():
            raise refuse(f"{verb} elements up to {end} of {name}[{tensor}], which has {tensors[tensor].numel()}")
    if rows > 1 and dst_stride < width:
        raise refuse(f"writes rows of {width} elements every {dst_stride} elements of dsts[{dst}]: they overlap")
    dtypes = srcs[src].dtype, dsts[dst].dtype
    if dtypes[0] != dtypes[1] and set(dtypes) != {torch.float32, torch.bfloat16}:
        raise refuse(
            f"goes from srcs[{src}] of dtype {dtypes[0]} to dsts[{dst}] of dtype {dtypes[1]}; "
            "only equal dtypes, fp32 to bf16 and bf16 to fp32 are copied"
        )
