"""One PPO step is the same on every grid and for every way to cut the batch; one rank is the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.tiny import build_batch, save_hf_model


@dataclass(frozen=True)
class Grid:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    critic: tuple[int, int] = (1, 1)  # tp, pp
    max_tokens: int = 4096

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Outcome:
    stats: dict[str, float]
    weights: dict[str, Tensor]
    old_logprobs: Tensor
    values: Tensor


def run_one_step(rank: int, world_size: int, path: str, grid: Grid, family_dtype: str = "fp32") -> Outcome:
    """Annotates a fixed batch, updates actor and critic once each, and returns everything that must agree."""
    from megarl import device
    from megarl.algo.objective import policy_objective, value_objective
    from megarl.models.build import BuildOptions
    from megarl.models.forward import compute_logprobs, compute_values
    from megarl.parallel.groups import GroupCache, build_groups
    from megarl.parallel.topology import plan_topology
    from megarl.trainer.annotate import annotate_logprobs, annotate_values
    from megarl.trainer.optim import AdamOptions, LRSchedule
    from megarl.trainer.roles import build_role
    from megarl.trainer.update import update_role
    from megarl.weights.gather import gather_hf_tensors

    cache = GroupCache(timeout_s=60)
    adam = AdamOptions(weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8, clip_grad=0.5)
    schedule = LRSchedule(1e-3, 0.0, 0, "constant", 1)
    dtype = device.pick_dtype(family_dtype)

    def role(name: str, tp: int, pp: int, head: str):
        groups = build_groups(plan_topology(name, world_size, tp, pp), cache)
        options = BuildOptions(dtype=dtype, head=head)
        return build_role(name, groups, path, options, max_tokens=grid.max_tokens, learns=(adam, schedule))

    actor, critic = role("actor", grid.tp, grid.pp, "policy"), role("critic", *grid.critic, "value")
    for parameter in critic.model.parameters():  # a value head of zeros would hide the body's gradient
        if tuple(parameter.shape) == (1, critic.spec.hidden_size):
            parameter.data.copy_(torch.linspace(-0.2, 0.2, parameter.numel())[None])
    critic.training.optimizer.reload_model_params()

    batch = build_batch([3, 9, 5, 2, 7, 4, 6, 11], [8, 3, 0, 14, 5, 1, 9, 2])
    mask = batch.response_mask
    generator = torch.Generator().manual_seed(7)
    old_logprobs = annotate_logprobs(actor, batch, temperature=0.7)
    values = annotate_values(critic, batch)
    advantages = torch.randn(batch.num_tokens, generator=generator)
    returns = torch.randn(batch.num_tokens, generator=generator)
    ref = old_logprobs - 0.3 * torch.rand(batch.num_tokens, generator=generator)
    noisy = old_logprobs + 0.4 * torch.randn(batch.num_tokens, generator=generator)  # so that some ratios clip
    rows = list(range(batch.num_sequences))

    def policy(hidden, micro, weights):
        logprobs, entropy = compute_logprobs(
            actor.model, hidden, micro, actor.groups, 0.7, actor.num_ids
        )
        pick = micro.token_index
        return policy_objective(
            logprobs, entropy, noisy[pick], advantages[pick], weights.loss[pick], weights.mask[pick],
            clip_low=0.2, clip_high=0.2, clip_c=3.0, entropy_coeff=0.01, ref_logprobs=ref[pick], kl_loss_coef=0.1,
        )  # fmt: skip

    def value(hidden, micro, weights):
        predicted = compute_values(critic.model, hidden, micro, critic.groups)
        pick = micro.token_index
        return value_objective(
            predicted, values[pick], returns[pick], weights.loss[pick], weights.mask[pick], clip_range=0.5
        )

    done = update_role(actor, batch, mask, [rows], policy, "token-mean", 0)
    done_critic = update_role(critic, batch, mask, [rows], value, "seq-mean-token-mean", 0)
    weights: dict[str, Tensor] = {}
    for one, head in ((actor, "policy"), (critic, "value")):
        tensors = gather_hf_tensors(
            one.family, one.spec, one.groups.topology, one.weights(), dtype, torch.device("cpu"), head
        )
        weights |= {f"{one.name}/{name}": tensor.clone() for name, tensor in tensors}
    return Outcome({**done.stats, **done_critic.stats}, weights, old_logprobs, values)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": save_hf_model(folder / "tied", "llama", tie_word_embeddings=True),
        "untied": save_hf_model(folder / "untied", "qwen2", tie_word_embeddings=False),
        "norms": save_hf_model(folder / "norms", "qwen3", tie_word_embeddings=True),
    }


@pytest.fixture(scope="module")
def oracles(models) -> dict[str, Outcome]:
    return {name: run_ranks(run_one_step, 1, path, Grid())[0] for name, path in models.items()}


def assert_same(outcome: Outcome, oracle: Outcome, mask: Tensor) -> None:
    torch.testing.assert_close(outcome.old_logprobs[mask], oracle.old_logprobs[mask], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outcome.values[mask], oracle.values[mask], rtol=1e-4, atol=1e-5)
    assert outcome.stats.keys() == oracle.stats.keys()
    for name, value in oracle.stats.items():
        assert outcome.stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert outcome.weights.keys() == oracle.weights.keys()
    for name, expected in oracle.weights.items():
        difference = (outcome.weights[name] - expected).norm() / expected.norm()
        assert difference < 1e-4, f"{name} differs by {difference:.2e}"


CASES = [
    ("tied", Grid(max_tokens=40)),
    ("tied", Grid(dp=2, max_tokens=40, critic=(2, 1))),
    ("tied", Grid(tp=2, critic=(1, 2), max_tokens=40)),
    ("tied", Grid(pp=2, critic=(1, 1), max_tokens=40)),
    ("untied", Grid(tp=2, pp=2, critic=(1, 1), max_tokens=40)),
    ("norms", Grid(tp=2, pp=2, critic=(2, 1), max_tokens=40)),
]


@pytest.mark.parametrize(("model", "grid"), CASES, ids=lambda value: str(value))
def test_one_step_equals_one_rank(models, oracles, model: str, grid: Grid) -> None:
    mask = build_batch([3, 9, 5, 2, 7, 4, 6, 11], [8, 3, 0, 14, 5, 1, 9, 2]).response_mask
    for outcome in run_ranks(run_one_step, grid.world_size, models[model], grid):
        assert_same(outcome, oracles[model], mask)
