"""What is added to the scores of answers before they become rewards of tokens: the price of length, rewards of steps.

limit 10, buffer 4, penalty 1:   length  6 -> 0    8 -> -0.5    10 -> -1     cut at 10 -> -1
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.segments import policy_token_before


def overlong_penalty(lengths: Tensor, limit: int, buffer: int, penalty: float) -> Tensor:
    """The price of an answer in the last `buffer` tokens before the limit (DAPO, Yu et al. 2025: soft punishment).

    Args:
        lengths: [B] int, policy tokens of each answer.
        limit: the most tokens an answer may have.
        buffer: over how many tokens below the limit the price grows from 0 to `penalty`; from 1 to `limit`.
        penalty: the price of an answer at the limit, 0 or more.

    Returns:
        [B] fp32 from -penalty to 0, to be added to the scores.
    """
    assert 1 <= buffer <= limit, f"buffer={buffer} must lie between 1 and limit={limit}"
    excess = (lengths.float() - (limit - buffer)) / buffer
    return -penalty * excess.clamp(0.0, 1.0)


def place_step_rewards(step_rewards: Tensor, ends: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rewards of turns or reasoning steps, each on the last policy token of its step.

    Args:
        step_rewards: [N] float, N steps of any sequences.
        ends: [N] int64, packed position of each step's last token. Where that token is not the policy's, the policy
            token before it in its sequence gets the reward; where there is none, the reward is dropped.
        mask: [T] bool.
        cu_seqlens: [B+1] int.

    Returns:
        [T] fp32 (fp64 for fp64 rewards); steps that end on one token add up.
    """
    dtype = torch.promote_types(step_rewards.dtype, torch.float32)
    rewards = torch.zeros(mask.numel(), dtype=dtype, device=step_rewards.device)
    if not ends.numel():
        return rewards
    target = policy_token_before(mask, cu_seqlens)[ends]
    reached = target >= 0
    return rewards.index_add(0, target[reached], step_rewards[reached].to(dtype))
