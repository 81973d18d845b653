"""The log-prob ops in plain torch: what they mean, what tests compare with, and what computes without the extension.

`logprob_entropy` is the specification, over a whole vocabulary. The others compute what the kernels of the same name
in csrc/ do, row by row, with the numbers that csrc/logprob.h explains; tests hold the kernels to them, and them to the
specification.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_LOGIT = -1e30  # the maximum of no logits: finite, so that differences stay numbers
LOWEST_EXPONENT = {torch.float32: -88.0, torch.float64: -800.0}  # exp of it counts as 0


def logprob_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    vocab_size: int | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, differentiable.

    Args:
        logits: [T, Vp] over the whole vocabulary, not modified.
        targets: [T] int64; `ignore_index` gives 0, 0 and no gradient.
        temperature: a number, or [T].
        vocab_size: ids from here on take no mass; None = Vp.

    Returns:
        logprobs [T], entropy [T], fp32 (fp64 for fp64 logits).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    is_kept = targets != ignore_index
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None].to(wide)
    scaled = torch.where(is_kept[:, None], logits[:, :vocab_size].to(wide), 0.0) / temperature
    log_p = torch.log_softmax(scaled, -1)
    logprobs = log_p.gather(1, torch.where(is_kept, targets, 0)[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.where(is_kept, logprobs, 0.0), torch.where(is_kept, entropy, 0.0)


def logprob_stats(
    logits: Tensor, targets: Tensor, temperature: Tensor, vocab_start: int, vocab_size: int, ignore_index: int
) -> Tensor:
    """[4, T] fp32 or fp64: maximum, sum exp(t), the target's logit, sum exp(t) t, with t = (logit - maximum) / temp."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    num_valid = _num_valid(logits, vocab_start, vocab_size)
    is_kept = targets != ignore_index
    x = logits[:, :num_valid].to(wide)
    stats = x.new_empty(4, logits.shape[0])
    top = x.amax(-1).clamp_(min=NO_LOGIT) if num_valid else x.new_full(targets.shape, NO_LOGIT)
    column, is_here = _find_column(targets, vocab_start, num_valid)
    chosen = x.gather(1, column[:, None]).squeeze(1) if num_valid else top
    chosen = torch.where(is_here, chosen, 0.0)
    is_token = (targets >= 0) & (targets < vocab_size)
    t = (x - top[:, None]).div_(temperature.to(wide)[:, None]).clamp_(min=LOWEST_EXPONENT[wide])
    exp = t.exp()
    stats[0] = torch.where(is_kept, top, 0.0)
    stats[1] = torch.where(is_kept, exp.sum(-1), 1.0)
    stats[2] = torch.where(is_kept, torch.where(is_token, chosen, torch.nan), 0.0)
    stats[3] = torch.where(is_kept, exp.mul_(t).sum(-1), 0.0)
    return stats


def logprob_grad(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    joined: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    out: Tensor,
) -> None:
    """Writes the gradient of the logits into `out` [T, Vp]; `joined` [3, T]: maximum, sum exp(t), entropy."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    num_valid = _num_valid(logits, vocab_start, vocab_size)
    is_kept = (targets != ignore_index)[:, None]
    top, total, entropy = (row[:, None] for row in joined)
    divisor = temperature.to(wide)[:, None]
    column, is_here = _find_column(targets, vocab_start, num_valid)
    t = ((logits[:, :num_valid].to(wide) - top) / divisor).clamp_(min=LOWEST_EXPONENT[wide])
    grad = (t + (entropy - total.log())).mul_(grad_entropy[:, None]).add_(grad_logprob[:, None])
    grad.mul_(t.exp_().div_(total)).neg_()
    if num_valid:
        grad.scatter_add_(1, column[:, None], torch.where(is_here, grad_logprob, 0.0)[:, None])
    out[:, :num_valid] = torch.where(is_kept, grad.div_(divisor), 0.0)
    out[:, num_valid:] = 0.0


def logprob_grad_(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    joined: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
) -> None:
    """`logprob_grad` over the logits themselves."""
    logprob_grad(
        logits, targets, temperature, joined, grad_logprob, grad_entropy, vocab_start, vocab_size, ignore_index, logits
    )


def add_transposed_(total: Tensor, part: Tensor) -> None:
    """total [R, H] fp32 += part [H, R] transposed."""
    total += part.t()


def _num_valid(logits: Tensor, vocab_start: int, vocab_size: int) -> int:
    return min(max(vocab_size - vocab_start, 0), logits.shape[1])


def _find_column(targets: Tensor, vocab_start: int, num_valid: int) -> tuple[Tensor, Tensor]:
    """Where the target is among this shard's columns (0 where it is not), and whether it is."""
    column = targets - vocab_start
    is_here = (column >= 0) & (column < num_valid)
    return torch.where(is_here, column, 0), is_here
