"""Advantages: how much better each policy token did than expected.

    scores [B] ──place_rewards──> rewards [T] ──compute_gae(values)──> advantages, returns [T] ──whiten──> advantages
    scores [B], group [B] ──────compute_group_advantages──────> advantages [T]

Masked tokens are stepped over as if they were not there. With gamma 1 and lam 0.95:

    mask        1    1    0        the reward sits on the last policy token, and V(next) of that token
    rewards     0    1    0        is the bootstrap (0), not the value of the masked token
    values      0    0    100
    advantages  0.95 1.0  0
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.groups import summarise_groups
from megarl.algo.segments import count_policy_tokens, last_policy_token, policy_token_before, sequence_of_token

_BLOCK_TOKENS = 64  # tokens that one row of the scan's matrix product covers
_GROUP_EPS = 1e-6


def place_rewards(scores: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Puts each sequence's score on its last policy token, finished or cut.

    Args:
        scores: [B] float; the score of a sequence without policy tokens is not read.
        mask: [T] bool.
        cu_seqlens: [B+1] int.

    Returns:
        [T] fp32 (fp64 for fp64 scores), 0 elsewhere.
    """
    last = last_policy_token(mask, cu_seqlens)
    has_policy = last >= 0
    rewards = scores.new_zeros(mask.numel(), dtype=_at_least_fp32(scores))
    rewards[last[has_policy]] = scores[has_policy].to(rewards.dtype)
    return rewards


@torch.no_grad()
def compute_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the policy tokens of every sequence (Schulman et al. 2016, eq. 16).

    A_t = δ_t + γλ A_next, δ_t = r_t + γ V_next - V_t, where "next" is the next policy token of the same sequence.
    A finite reward on a masked token counts for the last policy token before it in its sequence; before the first
    policy token there is none, and such a reward is dropped.

    Args:
        rewards: [T] float.
        values: [T] float, V of the state before each token.
        mask: [T] bool.
        cu_seqlens: [B+1] int.
        gamma, lam: discount and trace decay.
        bootstrap: [B] float, V of the state after the last policy token; None = 0 (the answer ended the episode).

    Returns:
        advantages [T], returns [T] = advantages + values: fp32 (fp64 for fp64 values), without gradient, 0 outside
        the mask. NaN or inf outside the mask has no effect.
    """
    num_tokens = mask.numel()
    advantages = values.new_zeros(num_tokens, dtype=_at_least_fp32(values))
    returns = advantages.clone()
    policy = mask.nonzero().squeeze(1)
    if not policy.numel():
        return advantages, returns
    counts = count_policy_tokens(mask, cu_seqlens)
    sequence = sequence_of_token(cu_seqlens, num_tokens)[policy]
    reward = _move_rewards(rewards, mask, cu_seqlens)[policy]
    value = values[policy].double()

    next_value = value.roll(-1)
    last = counts.cumsum(0)[counts > 0] - 1
    next_value[last] = 0.0 if bootstrap is None else bootstrap[counts > 0].double()
    delta = reward + gamma * next_value - value
    advantage = _discounted_sums(delta, sequence, counts, gamma * lam)
    advantages[policy] = advantage.to(advantages.dtype)
    returns[policy] = (advantage + value).to(returns.dtype)
    return advantages, returns


@torch.no_grad()
def compute_group_advantages(
    scores: Tensor, group: Tensor, failed: Tensor, mask: Tensor, cu_seqlens: Tensor, divide_by_std: bool
) -> tuple[Tensor, float, int]:
    """Advantages against the mean of the answers to the same prompt (GRPO, Shao et al. 2024, section 4.1.2).

    (score - mean) / (std + 1e-6) with the unbiased std; without the division it is Dr. GRPO (Liu et al. 2025). A group
    whose scored answers all agree, or with one scored answer, gives exactly 0.

    Args:
        scores: [B] float; not read where `failed`.
        group: [B] int, equal for answers to the same prompt.
        failed: [B] bool, True = no score: the row is left out of mean and std and gets 0. It must not count in the
            loss either: take it out of the mask with `mask_sequences` before the weights are computed.
        mask: [T] bool.
        cu_seqlens: [B+1] int.
        divide_by_std: divide by the group's standard deviation.

    Returns:
        advantages: [T] fp32, 0 outside the mask.
        flat_share: the share of scored groups that teach nothing because all their scores are equal.
        num_skipped: groups in which every answer failed.
    """
    groups = summarise_groups(scores, group, failed)
    advantage = torch.where(failed, 0.0, scores.double() - groups.mean[groups.member])
    if divide_by_std:
        advantage = advantage / (groups.std[groups.member] + _GROUP_EPS)
    advantage = torch.where(groups.is_flat[groups.member], 0.0, advantage)
    per_token = advantage[sequence_of_token(cu_seqlens, mask.numel())]
    return torch.where(mask, per_token, 0.0).float(), groups.flat_share, groups.num_skipped


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shifts and scales policy tokens to mean 0 and (unbiased) variance 1.

    Args:
        x: [T] float.
        mask: [T] bool.
        eps: added to the variance.

    Returns:
        [T] fp32 (fp64 for fp64 input), 0 outside the mask. Fewer than two policy tokens have no variance: all 0.
    """
    whitened = x.new_zeros(x.shape, dtype=_at_least_fp32(x))
    policy = x[mask].double()
    if policy.numel() >= 2:
        variance, mean = torch.var_mean(policy)
        whitened[mask] = ((policy - mean) * (variance + eps).rsqrt()).to(whitened.dtype)
    return whitened


def _at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _move_rewards(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] fp64: rewards with each masked token's finite reward added to the policy token before it."""
    target = policy_token_before(mask, cu_seqlens)
    counts = (target >= 0) & (mask | rewards.isfinite())
    moved = torch.where(counts, rewards.double(), 0.0)
    return torch.zeros_like(moved).index_add(0, target.clamp(min=0), moved)


def _discounted_sums(x: Tensor, sequence: Tensor, counts: Tensor, discount: float) -> Tensor:
    """S_i = x_i + discount * S_{i+1} within each sequence, in blocks: a matrix product inside, a short scan between.

    fp64, because on some devices an fp32 product silently runs at lower precision.

    Args:
        x: [N] fp64, sequences one after the other.
        sequence: [N] int64, which sequence each entry belongs to.
        counts: [B] int64, entries of each sequence.

    Returns:
        [N] fp64.
    """
    size = _BLOCK_TOKENS
    num_blocks = (counts + size - 1) // size
    first_block = num_blocks.cumsum(0) - num_blocks
    position = torch.arange(x.numel(), device=x.device) - (counts.cumsum(0) - counts)[sequence]
    slot = first_block[sequence] * size + position
    owner = torch.arange(counts.numel(), device=x.device).repeat_interleave(num_blocks)
    rank = torch.arange(owner.numel(), device=x.device) - first_block[owner]

    blocks = x.new_zeros(owner.numel() * size)
    blocks[slot] = x
    steps = torch.arange(size, device=x.device)
    distance = (steps[:, None] - steps).double()
    decay = torch.where(distance >= 0, discount ** distance.clamp(min=0), 0.0)
    inside = blocks.view(-1, size) @ decay  # [blocks, size]: the sum as far as the block's end

    longest = int(num_blocks.max())
    heads = x.new_zeros(longest + 1, counts.numel())
    heads[rank, owner] = inside[:, 0]
    for row in range(longest - 1, -1, -1):  # whole sequences in, last block first; heads[longest] stays 0
        heads[row] += discount**size * heads[row + 1]
    after = discount ** (size - steps).double()
    return (inside + heads[rank + 1, owner][:, None] * after).view(-1)[slot]
