"""Generalised advantage estimation over packed sequences, in one backward sweep.

`megarl.algo.advantages.compute_gae` says what it computes and is the plain-torch form; here the extension does it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megarl.algo.advantages import compute_gae
from megarl.ops import dispatch, reference_segments


@functools.cache
def _kernel() -> Any | None:
    """The extension's op, or None for plain torch."""
    if not dispatch.has_extension():
        return None
    torch.library.register_fake("megarl::gae", _fake)
    return torch.ops.megarl.gae


def _fake(rewards: Tensor, values: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(values)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A_t = δ_t + γλ A_next, δ_t = r_t + γ V_next - V_t over the policy tokens of every sequence.

    Masked tokens are stepped over; a finite reward on one counts for the last policy token before it in its sequence.
    All arithmetic is fp64.

    Args:
        rewards: [T] float.
        values: [T] float, V of the state before each token.
        mask: [T] bool.
        cu_seqlens: [B+1] int, from 0 to T, ascending. On a GPU this is not checked.
        gamma, lam: discount and trace decay, for all sequences or [B], one for each.
        bootstrap: [B] float, V of the state after the last policy token; None = 0.

    Returns:
        advantages [T], returns [T] = advantages + values: fp32 (fp64 for fp64 values), 0 outside the mask. NaN or inf
        outside the mask has no effect.
    """
    out_dtype = torch.promote_types(values.dtype, torch.float32)
    dtype = torch.promote_types(rewards.dtype, out_dtype)
    rewards, values, cu_seqlens = rewards.to(dtype), values.to(dtype), cu_seqlens.long()
    if bootstrap is not None:
        bootstrap = bootstrap.to(dtype).contiguous()
    kernel = _kernel()
    if kernel is not None:
        advantages, returns = kernel(
            rewards.contiguous(),
            values.contiguous(),
            mask.contiguous(),
            cu_seqlens.contiguous(),
            0.0 if isinstance(gamma, Tensor) else gamma,
            0.0 if isinstance(lam, Tensor) else lam,
            bootstrap,
            gamma.double().contiguous() if isinstance(gamma, Tensor) else None,
            lam.double().contiguous() if isinstance(lam, Tensor) else None,
        )
    elif isinstance(gamma, Tensor) or isinstance(lam, Tensor):
        count = cu_seqlens.numel() - 1
        gammas, lams = (
            torch.as_tensor(x, dtype=torch.float64, device=values.device).expand(count) for x in (gamma, lam)
        )
        advantages, returns = reference_segments.gae(
            rewards.double(), values.double(), mask, cu_seqlens, gammas, lams, bootstrap
        )
    else:
        advantages, returns = compute_gae(rewards, values, mask, cu_seqlens, gamma, lam, bootstrap)
    return advantages.to(out_dtype), returns.to(out_dtype)
