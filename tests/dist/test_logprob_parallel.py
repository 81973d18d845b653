"""Log-prob and entropy over a vocabulary cut across ranks: one rank with all of it is the oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops import reference
from megarl.ops.logprob import linear_logprob_entropy, logprob_entropy
from megarl.ops.policy_head import policy_head
from tests.ranks import run_ranks

NUM_TOKENS, WIDTH, VALID, PADDED = 24, 16, 50257, 50688
TP_SIZES = [1, 2, 4]
FORMS = ["logits", "linear", "head", "sequence_parallel", "whole"]


def token_loss(logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
    return (logprobs.exp() * 3 + 0.1 * logprobs + 0.2 * entropy).sum(), {"entropy": entropy.sum()}


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
    weight = torch.randn(PADDED, WIDTH, generator=generator)
    targets = torch.randint(0, VALID, (NUM_TOKENS,), generator=generator)
    targets[:3] = torch.tensor([0, VALID - 1, -100])
    return hidden, weight, targets


def open_group(rank: int, world_size: int, tp_size: int) -> dist.ProcessGroup:
    """This rank's group of `tp_size` neighbours; every rank takes part in opening all of them."""
    groups = [dist.new_group(list(range(k, k + tp_size))) for k in range(0, world_size, tp_size)]
    group = groups[rank // tp_size]
    assert isinstance(group, dist.ProcessGroup)
    return group


def run_form(form: str, tp_rank: int, tp_size: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Loss and gradients of this rank's part."""
    hidden, weight, targets = make_inputs()
    rows = slice(PADDED // tp_size * tp_rank, PADDED // tp_size * (tp_rank + 1))
    hidden, weight = hidden.requires_grad_(), weight[rows].clone().requires_grad_()
    options = {"temperature": 0.7, "vocab_start": rows.start, "vocab_size": VALID, "tp_group": group}
    if form == "logits":
        logits = (hidden @ weight.t()).detach().requires_grad_()
        loss, _ = token_loss(*logprob_entropy(logits, targets, **options), slice(None))  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad(loss, logits)
        grad_hidden = grad @ weight.detach()
        dist.all_reduce(grad_hidden, group=group)
        return {"loss": loss.detach(), "hidden": grad_hidden, "weight": grad.t() @ hidden.detach()}
    if form == "linear":
        scores = linear_logprob_entropy(hidden, weight, targets, chunk_tokens=7, **options)  # type: ignore[arg-type]
        loss, _ = token_loss(*scores, slice(None))
    elif form == "sequence_parallel":
        share = NUM_TOKENS // tp_size
        hidden = hidden.detach()[share * tp_rank : share * (tp_rank + 1)].clone().requires_grad_()
        loss, _ = policy_head(
            hidden, weight, targets, token_loss, rows=torch.arange(NUM_TOKENS), sequence_parallel=True,
            chunk_tokens=7, **options,  # type: ignore[arg-type]
        )  # fmt: skip
    else:
        loss, _ = policy_head(
            hidden, weight, targets, token_loss, whole=form == "whole", chunk_tokens=7, **options  # type: ignore[arg-type]
        )  # fmt: skip
    grads = torch.autograd.grad(loss, (hidden, weight))
    return {"loss": loss.detach(), "hidden": grads[0], "weight": grads[1]}


def run_cases(rank: int, world_size: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for tp_size in TP_SIZES:
        group = open_group(rank, world_size, tp_size)
        for form in FORMS:
            found[f"{form}/{tp_size}"] = run_form(form, rank % tp_size, tp_size, group)
    width = PADDED // world_size
    zeros = torch.zeros(2, width, requires_grad=True)
    scores = logprob_entropy(
        zeros, torch.tensor([0, 50256]), temperature=1.0, vocab_start=width * rank, vocab_size=VALID, tp_group=group
    )
    (grad,) = torch.autograd.grad(scores, zeros, (torch.ones(2), torch.ones(2)))
    found["padded"] = [each.detach() for each in scores], grad[:, max(0, VALID - width * rank) :].abs().sum()
    found["pair"] = find_gradient_of_pair(rank)
    return found


def find_gradient_of_pair(rank: int) -> Tensor:
    """Two ranks of a vocabulary of 8, target 6: on the second."""
    pair = open_group(rank, 4, 2)
    logits = torch.arange(8.0)[None, 4 * (rank % 2) :][:, :4].clone().requires_grad_()
    logprobs, _ = logprob_entropy(
        logits, torch.tensor([6]), temperature=1.0, vocab_start=4 * (rank % 2), vocab_size=8, tp_group=pair
    )
    return torch.autograd.grad(logprobs.sum(), logits)[0][0]


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks(run_cases, 4)


@pytest.fixture(scope="module")
def oracle() -> dict[str, Tensor]:
    hidden, weight, targets = make_inputs()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss, _ = token_loss(*reference.logprob_entropy(hidden @ weight.t(), targets, 0.7, VALID), slice(None))
    grads = torch.autograd.grad(loss, (hidden, weight))
    return {"loss": loss.detach(), "hidden": grads[0], "weight": grads[1]}


@pytest.fixture(scope="module")
def plain_error(oracle) -> dict[str, float]:
    """How far plain torch in fp32 is from the oracle: the products' own rounding, which differs between machines."""
    hidden, weight, targets = make_inputs()
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    loss, _ = token_loss(*reference.logprob_entropy(hidden @ weight.t(), targets, 0.7, VALID), slice(None))
    grads = dict(zip(("hidden", "weight"), torch.autograd.grad(loss, (hidden, weight)), strict=True))
    return {name: float((grad - oracle[name]).norm() / oracle[name].norm()) for name, grad in grads.items()}


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_value_and_every_gradient_equal_one_ranks(found, oracle, plain_error, form: str, tp_size: int) -> None:
    for first in range(0, 4, tp_size):
        parts = [found[rank][f"{form}/{tp_size}"] for rank in range(first, first + tp_size)]
        shards = {name: torch.cat([part[name] for part in parts]) for name in ("hidden", "weight")}
        if form != "sequence_parallel":
            assert all(torch.equal(part["hidden"], parts[0]["hidden"]) for part in parts)
            shards["hidden"] = parts[0]["hidden"]
        assert all(torch.equal(part["loss"], parts[0]["loss"]) for part in parts)
        torch.testing.assert_close(parts[0]["loss"].double(), oracle["loss"], rtol=2e-6, atol=0)
        for name, mine in shards.items():
            difference = (mine - oracle[name]).norm() / oracle[name].norm()
            assert difference <= 2 * plain_error[name], f"{name} differs by {difference:.2e}, plain {plain_error}"


def test_padded_columns_take_no_mass_and_no_gradient(found) -> None:
    for rank in range(4):
        (logprobs, entropy), padded_grad = found[rank]["padded"]
        torch.testing.assert_close(logprobs, torch.full((2,), -10.82491), rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy, torch.full((2,), 10.82491), rtol=0, atol=1e-5)
        assert float(padded_grad) == 0.0


def test_the_gradient_is_onehot_minus_softmax_on_every_shard(found) -> None:
    p = [math.exp(x) / sum(math.exp(y) for y in range(8)) for x in range(8)]
    expected = torch.tensor([(j == 6) - p[j] for j in range(8)])
    torch.testing.assert_close(torch.cat((found[0]["pair"], found[1]["pair"])), expected, rtol=1e-5, atol=1e-7)
