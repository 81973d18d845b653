"""Advantages without a critic: an answer's score against a baseline that other answers give.

    scores [B] ──leave_one_out | optimal_baseline──> one number an answer ──spread──> advantages [T]
    rewards [T] ──sum_to_go──> returns [T] ──minus the greedy answer's score──> advantages [T]      (ReMax)
                                          ──whiten over the batch──────────> advantages [T]      (REINFORCE++)

Three answers to one prompt, scores 1 0 0, lengths 1 1 2: leave one out 1 -0.5 -0.5; the length-weighted baseline is
1/4, so 0.75 -0.25 -0.25. `advantages.compute_group_advantages` is GRPO's form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algo.advantages import compute_gae
from megarl.algo.groups import summarise_groups
from megarl.algo.segments import sequence_of_token


@torch.no_grad()
def leave_one_out(scores: Tensor, group: Tensor, failed: Tensor) -> Tensor:
    """Each score minus the mean of its siblings' (RLOO: Kool et al. 2019; Ahmadian et al. 2024).

    Args:
        scores: [B] float; not read where `failed`.
        group: [B] int, equal for answers to the same prompt.
        failed: [B] bool, True = no score: such a row is nobody's sibling and gets 0.

    Returns:
        [B] fp64; 0 for an answer without a scored sibling, and exactly 0 in a group whose scores are all equal.
    """
    groups = summarise_groups(scores, group, failed)
    factor = groups.count / (groups.count - 1).clamp(min=1)
    advantage = factor[groups.member] * (scores.double() - groups.mean[groups.member])
    return torch.where(failed | groups.is_flat[groups.member], 0.0, advantage)


@torch.no_grad()
def subtract_group_mean(scores: Tensor, group: Tensor, failed: Tensor) -> Tensor:
    """Each score minus the mean over the answers to its prompt, itself included; arguments as `leave_one_out`."""
    groups = summarise_groups(scores, group, failed)
    advantage = scores.double() - groups.mean[groups.member]
    return torch.where(failed | groups.is_flat[groups.member], 0.0, advantage)


@torch.no_grad()
def subtract_optimal_baseline(scores: Tensor, lengths: Tensor, group: Tensor, failed: Tensor) -> Tensor:
    """Each score minus the mean of its group weighted by answer length (OPO, Hao et al. 2025).

    The squared gradient of an answer grows with its length, so this baseline makes the variance of the gradient least.

    Args:
        lengths: [B] int, policy tokens of each answer.
        scores, group, failed: as `leave_one_out`.

    Returns:
        [B] fp64.
    """
    groups = summarise_groups(scores, group, failed)
    weight = torch.where(failed, 0.0, lengths.double())
    weighted = groups.sum(torch.where(failed, 0.0, weight * scores.double()))
    baseline = weighted / groups.sum(weight).clamp(min=1.0)
    advantage = scores.double() - baseline[groups.member]
    return torch.where(failed | groups.is_flat[groups.member], 0.0, advantage)


@torch.no_grad()
def sum_to_go(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """The discounted rewards from each policy token to the end of its sequence.

    Args:
        rewards: [T] float; a reward on a masked token counts for the policy token before it.
        mask: [T] bool.
        cu_seqlens: [B+1] int.
        gamma: discount of one policy token.

    Returns:
        [T] fp32 (fp64 for fp64 rewards), 0 outside the mask.
    """
    return compute_gae(rewards, torch.zeros_like(rewards), mask, cu_seqlens, gamma, 1.0)[0]


@torch.no_grad()
def subtract_greedy(rewards: Tensor, greedy_scores: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """What is still to come minus the score of the greedy answer to the same prompt (ReMax, Li et al. 2023, alg. 1).

    Args:
        rewards: [T] float, undiscounted.
        greedy_scores: [B] float, the score of the greedy answer to each sequence's prompt.
        mask: [T] bool.
        cu_seqlens: [B+1] int.

    Returns:
        [T] fp32 (fp64 for fp64 rewards), 0 outside the mask.
    """
    to_go = sum_to_go(rewards, mask, cu_seqlens, 1.0)
    return torch.where(mask, to_go - greedy_scores.to(to_go.dtype)[sequence_of_token(cu_seqlens, mask.numel())], 0.0)


def spread(per_answer: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] fp32: each answer's number [B] on all its policy tokens, 0 elsewhere."""
    return torch.where(mask, per_answer[sequence_of_token(cu_seqlens, mask.numel())], 0.0).float()


def adaptive_lam(lengths: Tensor, alpha: float) -> Tensor:
    """The trace decay of each sequence, the longer the closer to 1: 1 - 1/(alpha·length).

    The sum of all λ^t is then alpha·length, so a reward at the end reaches the start of an answer of any length
    (length-adaptive GAE of VAPO, Yue et al. 2025).

    Args:
        lengths: [B] int, policy tokens of each answer.
        alpha: positive; the paper uses 0.05.

    Returns:
        [B] fp64 from 0 up to, not including, 1; 0 where alpha·length <= 1.
    """
    assert alpha > 0, f"alpha={alpha} must be positive"
    return (1.0 - 1.0 / (alpha * lengths.double().clamp(min=1))).clamp(min=0.0)
