"""Losses of preference training and of reward models: on pairs of answers, or on answers that are good or bad.

    log-probs of tokens [K] ──sum_by_sequence──> log-probs of answers [n] ──even rows chosen, odd rejected──> losses [P]
    scores of answers [n] ───────────────────────────────────────────────────────────────────────────────> losses [P]

P pairs lie as 2P answers: row 2p is the chosen one, row 2p + 1 the rejected one. With beta 1, policy sums -1 and -2,
reference -1.5 and -1.5, the DPO margin is (0.5) - (-0.5) = 1 and the loss log(1 + e^-1) = 0.3133.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PairLosses:
    """`loss` [P] with gradient; `chosen`, `rejected` [P] detached: what the model thinks each answer is worth."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor


def sum_by_sequence(x: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int, mean: bool = False) -> Tensor:
    """[n]: `x` [K] summed (or averaged) over the tokens in `mask` [K] of each of n sequences.

    Args:
        sequence: [K] int64, the sequence of each token.
        mean: divide by the number of tokens; a sequence without tokens gives 0.
    """
    totals = x.new_zeros(num_sequences).index_add(0, sequence, torch.where(mask, x, 0.0))
    if not mean:
        return totals
    counts = x.new_zeros(num_sequences).index_add(0, sequence, mask.to(x.dtype))
    return totals / counts.clamp(min=1)


def dpo_loss(log_ratios: Tensor, beta: float, label_smoothing: float = 0.0) -> PairLosses:
    """-log σ(β margin), the margin of policy-over-reference log-ratios (DPO, Rafailov et al. 2023, eq. 7).

    With label smoothing ε, -(1 - ε) log σ(β margin) - ε log σ(-β margin): labels are wrong with probability ε (cDPO,
    Mitchell 2023).

    Args:
        log_ratios: [2P], log-prob of the policy minus the reference's, summed over each answer.
        beta: positive.
    """
    chosen, rejected = log_ratios[0::2], log_ratios[1::2]
    margin = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return PairLosses(loss, (beta * chosen).detach(), (beta * rejected).detach())


def ipo_loss(mean_log_ratios: Tensor, beta: float) -> PairLosses:
    """(margin - 1/(2β))² (IPO, Azar et al. 2023, eq. 17), with log-ratios averaged over each answer's tokens.

    Args:
        mean_log_ratios: [2P].
    """
    chosen, rejected = mean_log_ratios[0::2], mean_log_ratios[1::2]
    loss = (chosen - rejected - 1.0 / (2.0 * beta)).square()
    return PairLosses(loss, (beta * chosen).detach(), (beta * rejected).detach())


def simpo_loss(mean_logprobs: Tensor, beta: float, gamma: float, label_smoothing: float = 0.0) -> PairLosses:
    """-log σ(β (mean log-prob chosen - rejected) - γ), without a reference (SimPO, Meng et al. 2024, eq. 6).

    Args:
        mean_logprobs: [2P], log-probs averaged over each answer's tokens.
        gamma: the margin that is asked for.
    """
    chosen, rejected = mean_logprobs[0::2], mean_logprobs[1::2]
    margin = beta * (chosen - rejected) - gamma
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return PairLosses(loss, (beta * chosen).detach(), (beta * rejected).detach())


def kto_loss(
    log_ratios: Tensor,
    is_desirable: Tensor,
    baseline: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """λ_D (1 - σ(β (r - z))) for a good answer, λ_U (1 - σ(β (z - r))) for a bad one (KTO, Ethayarajh et al. 2024).

    Args:
        log_ratios: [n], r: log-prob of the policy minus the reference's, summed over each answer.
        is_desirable: [n] bool.
        baseline: z, the KL of policy from reference, see `kto_baseline`.
        desirable_weight, undesirable_weight: λ_D, λ_U.

    Returns:
        [n].
    """
    towards = torch.where(is_desirable, log_ratios - baseline, baseline - log_ratios)
    weight = torch.where(is_desirable, desirable_weight, undesirable_weight)
    return weight * (1.0 - torch.sigmoid(beta * towards))


def kto_baseline(mismatched_log_ratios: Tensor) -> float:
    """The KL estimate of KTO: the mean log-ratio of answers to *other* prompts of the batch, at least 0 (section 4).

    Args:
        mismatched_log_ratios: [n], as `log_ratios` of `kto_loss`, of each prompt with another prompt's answer.
    """
    return max(0.0, float(mismatched_log_ratios.double().mean())) if mismatched_log_ratios.numel() else 0.0


def bradley_terry_loss(scores: Tensor, center_coeff: float = 0.0) -> PairLosses:
    """-log σ(score chosen - score rejected) (Bradley and Terry 1952; Ouyang et al. 2022, eq. 1).

    Args:
        scores: [2P], a reward model's.
        center_coeff: weight of (chosen + rejected)², which keeps the scores around 0 (Eisenstein et al. 2023).
    """
    chosen, rejected = scores[0::2], scores[1::2]
    loss = -F.logsigmoid(chosen - rejected) + center_coeff * (chosen + rejected).square()
    return PairLosses(loss, chosen.detach(), rejected.detach())
