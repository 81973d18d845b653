"""Log-probability and entropy of given tokens straight from hidden states, over a vocabulary cut across ranks.

The [T, V] tensor of logits never exists: hidden states are projected chunk by chunk, each chunk is reduced to four
numbers a token (maximum, sum of exponentials, target logit, sum of p·logit), the ranks join those once for all tokens,
and the backward pass projects each chunk again. Memory follows the chunk, not the length.

With l the logits over temperature, p = softmax(l), y the target, H the entropy:

    logprob = l_y - logsumexp(l)        d logprob / d l_j = 1[j = y] - p_j
    H = logsumexp(l) - sum_j p_j l_j    d H / d l_j       = -p_j (log p_j + H)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 128 << 20  # of fp32 logits held at a time
OUTSIDE = -1e30  # logit of a column without a token: no mass, and finite, so that 0 · logit stays 0


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies at the given temperature, differentiable in `hidden` and `weight`.

    Args:
        hidden: [K, H], the same on every rank of `tp_group`; K may be 0.
        weight: [Vp, H], this rank's rows of the output projection.
        targets: [K] int64, ids of the whole vocabulary.
        temperature: logits are divided by it.
        vocab_start: the id of this rank's first row.
        vocab_size: ids at or beyond it are padding and take no mass.
        tp_group: the ranks that share the vocabulary; all of them must call.
        chunk_tokens: tokens projected at a time; by default as many as fit `CHUNK_BYTES`.

    Returns:
        logprobs [K] fp32, entropy [K] fp32, the same on every rank.
    """
    if chunk_tokens is None:
        chunk_tokens = max(16, CHUNK_BYTES // (4 * weight.shape[0]))
    return _LinearLogprobEntropy.apply(
        hidden, weight, targets, temperature, vocab_start, vocab_size, tp_group, chunk_tokens
    )


def _project(hidden: Tensor, weight: Tensor, temperature: float, num_valid: int) -> Tensor:
    logits = torch.mm(hidden, weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    if num_valid < weight.shape[0]:
        logits[:, max(0, num_valid) :] = OUTSIDE
    return logits


class _LinearLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_start: int,
        vocab_size: int,
        tp_group: dist.ProcessGroup,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        num_valid = vocab_size - vocab_start
        local = targets - vocab_start
        is_here = (local >= 0) & (local < min(num_valid, weight.shape[0]))
        column = torch.where(is_here, local, 0)
        top = hidden.new_empty(targets.shape, dtype=torch.float32)
        sums = hidden.new_empty((3, *targets.shape), dtype=torch.float32)  # sum exp, target logit, sum exp · logit
        for begin in range(0, targets.numel(), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            logits = _project(hidden[part], weight, temperature, num_valid)
            top[part] = logits.amax(-1)
            sums[1, part] = torch.where(is_here[part], logits.gather(1, column[part, None]).squeeze(1), 0.0)
            exp = (logits - top[part, None]).exp_()
            sums[0, part] = exp.sum(-1)
            sums[2, part] = exp.mul_(logits).sum(-1)
        if dist.get_world_size(tp_group) > 1:
            own = top.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=tp_group)
            shrink = (own - top).exp_()
            sums[0] *= shrink
            sums[2] *= shrink
            dist.all_reduce(sums, group=tp_group)
        lse = top + sums[0].log()
        entropy = lse - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, column, is_here, lse, entropy)
        ctx.options = temperature, num_valid, tp_group, chunk_tokens
        return sums[1] - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprob, grad_entropy = (grad.float() for grad in grads)
        hidden, weight, column, is_here, lse, entropy = ctx.saved_tensors
        temperature, num_valid, tp_group, chunk_tokens = ctx.options
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        uses_entropy = bool(grad_entropy.any())
        for begin in range(0, column.numel(), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            log_p = _project(hidden[part], weight, temperature, num_valid).sub_(lse[part, None])
            if uses_entropy:  # -g_lp · p - g_H · p · (log p + H)
                factor = (log_p + entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_logprob[part, None])
                grad_logits = log_p.exp_().mul_(factor).neg_()
            else:
                grad_logits = log_p.exp_().mul_(-grad_logprob[part, None])
            at_target = torch.where(is_here[part], grad_logprob[part], 0.0)
            grad_logits.scatter_add_(1, column[part, None], at_target[:, None])
            if temperature != 1.0:
                grad_logits.div_(temperature)
            narrow = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = torch.mm(narrow, weight)
            if grad_weight is not None:
                grad_weight += torch.mm(narrow.t(), hidden[part])
        if grad_hidden is not None and dist.get_world_size(tp_group) > 1:
            dist.all_reduce(grad_hidden, group=tp_group)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 6
