"""One PPO step is the same on every grid and for every way to cut the batch; one rank is the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from megarl import device
from megarl.algo.objective import policy_objective, value_objective
from megarl.algo.reduce import AggregationMode
from megarl.models.build import BuildOptions
from megarl.models.layout import HeadKind
from megarl.models.registry import read_model_spec
from megarl.models.forward import compute_logprobs, compute_logprobs_of_logits, compute_values, run_policy_head
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.picker import Choice, plan_chunk_stages
from megarl.parallel.topology import Order, Topology, plan_topology
from megarl.trainer.annotate import annotate_logprobs, annotate_values
from megarl.trainer.optim import AdamOptions, LRSchedule
from megarl.trainer.measured_costs import Profile
from megarl.trainer.roles import Role, build_role
from megarl.trainer.update import PipelineOptions, Task, update_roles
from megarl.weights.gather import gather_hf_tensors
from tests.ranks import run_ranks
from tests.tiny import build_batch, save_hf_model

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

PROMPTS, RESPONSES = [3, 9, 5, 2, 7, 4, 6, 11], [8, 3, 0, 14, 5, 1, 9, 2]
ADAM = AdamOptions(weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8, clip_grad=0.5)
SCHEDULE = LRSchedule(1e-3, 0.0, 0, "constant", 1)


@dataclass(frozen=True)
class Grid:
    """The actor's tp, pp, dp on the first ranks of the job; the critic's tp and pp on the same ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    critic: tuple[int, int] = (1, 1)
    max_tokens: int = 4096
    head: str = "recompute"  # how the actor's last stage gets from hidden states to the loss: or "one_pass", "logits"
    schedule: Choice = "1f1b"
    together: bool = False  # both updates in one schedule
    recompute: str = "none"
    order: Order = "tp-dp-pp"  # the actor's

    @property
    def ranks(self) -> list[int]:
        return list(range(self.tp * self.pp * self.dp))


@dataclass(frozen=True)
class Outcome:
    """What must agree: annotations, statistics of the updates, and every weight after them."""

    old_logprobs: Tensor
    values: Tensor
    stats: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def run_cases(rank: int, world_size: int, cases: list[tuple[str, Grid]]) -> list[Outcome]:
    """Every case one after the other in one job: starting ranks costs more than the steps."""
    cache = GroupCache(timeout_s=60)
    return [run_one_step(world_size, path, grid, cache) for path, grid in cases]


def plan_grid(name: str, world_size: int, path: str, grid: Grid) -> Topology:
    """The role's grid, chunks placed as the schedule wants them."""
    tp, pp = grid.critic if name == "critic" else (grid.tp, grid.pp)
    layers = read_model_spec(path)[1].num_layers
    stages = plan_chunk_stages(grid.schedule, pp, layers, is_reversed=grid.together and name == "critic")
    order = "tp-dp-pp" if name == "critic" else grid.order
    return replace(plan_topology(name, world_size, tp, pp, ranks=grid.ranks, order=order), chunk_stages=stages)


def open_role(name: str, world_size: int, path: str, grid: Grid, cache: GroupCache) -> Role | None:
    is_critic = name == "critic"
    groups = build_groups(plan_grid(name, world_size, path, grid), cache)
    options = BuildOptions(torch.float32, head="value" if is_critic else "policy", recompute=grid.recompute)
    role = build_role(name, groups, path, options, max_tokens=grid.max_tokens, learns=(ADAM, SCHEDULE))
    if role is not None and is_critic:  # a value head of zeros would hide the body's gradient
        for parameter in role.model.parameters():
            if tuple(parameter.shape) == (1, role.spec.hidden_size):
                parameter.data.copy_(torch.linspace(-0.2, 0.2, parameter.numel())[None])
        assert role.training is not None
        role.training.optimizer.reload_model_params()
    return role


def run_one_step(world_size: int, path: str, grid: Grid, cache: GroupCache) -> Outcome:
    actor = open_role("actor", world_size, path, grid, cache)
    critic = open_role("critic", world_size, path, grid, cache)
    batch = build_batch(PROMPTS, RESPONSES)
    generator = torch.Generator().manual_seed(7)
    old_logprobs = annotate_logprobs(actor, batch, temperature=0.7)
    values = annotate_values(critic, batch)
    advantages = torch.randn(batch.num_tokens, generator=generator)
    returns = torch.randn(batch.num_tokens, generator=generator)
    ref = old_logprobs - 0.3 * torch.rand(batch.num_tokens, generator=generator)
    noisy = old_logprobs + 0.4 * torch.randn(batch.num_tokens, generator=generator)  # so that some ratios clip
    outcome = Outcome(old_logprobs, values)

    def policy(hidden, micro, weights):
        assert actor is not None

        def token_loss(logprobs, entropy, part):
            pick = micro.token_index[part]
            return policy_objective(
                logprobs, entropy, noisy[pick], advantages[pick], weights.loss[pick], weights.mask[pick],
                clip_low=0.2, clip_high=0.2, clip_c=3.0, entropy_coeff=0.01, ref_logprobs=ref[pick], kl_loss_coef=0.1,
            )  # fmt: skip

        arguments = actor.model, hidden, micro, actor.groups, 0.7, actor.num_ids
        if grid.head == "one_pass":
            return run_policy_head(*arguments, token_loss)
        compute = compute_logprobs if grid.head == "recompute" else compute_logprobs_of_logits
        return token_loss(*compute(*arguments), slice(None))

    def value(hidden, micro, weights):
        assert critic is not None
        predicted = compute_values(critic.model, hidden, micro, critic.groups)
        pick = micro.token_index
        old, goal = values[pick], returns[pick]
        return value_objective(predicted, old, goal, weights.loss[pick], weights.mask[pick], clip_range=0.5)

    def collect(role: Role | None, head: HeadKind, name: str) -> None:
        family, spec = read_model_spec(path)
        topology = plan_grid(name, world_size, path, grid)
        weights = None if role is None else role.weights()
        tensors = gather_hf_tensors(family, spec, topology, weights, torch.float32, device.device(), head)
        outcome.weights.update({f"{name}/{key}": tensor.clone() for key, tensor in tensors})

    if actor is not None and critic is not None:
        rows = [list(range(batch.num_sequences))]
        mode: AggregationMode = "seq-mean-token-mean"
        tasks = [Task(actor, rows, policy, "token-mean", 0), Task(critic, rows, value, mode, 0)]
        for group in [tasks] if grid.together else [[task] for task in tasks]:
            results, _ = update_roles(group, batch, batch.response_mask, PipelineOptions(grid.schedule), Profile())
            for result in results.values():
                outcome.stats.update(result.stats)
    collect(actor, "policy", "actor")
    collect(critic, "value", "critic")
    return outcome


CASES = [
    ("tied", Grid(max_tokens=40, head="one_pass")),
    ("tied", Grid(dp=2, max_tokens=40, critic=(2, 1), head="one_pass")),
    ("tied", Grid(tp=2, critic=(1, 2), max_tokens=40, head="one_pass")),
    ("tied", Grid(tp=2, critic=(1, 2), max_tokens=40, head="logits")),
    ("tied", Grid(pp=2, critic=(1, 1), max_tokens=40, head="one_pass")),
    ("tied", Grid(pp=4, critic=(2, 2), max_tokens=25, head="logits")),
    ("untied", Grid(tp=2, pp=2, critic=(1, 1), max_tokens=40, head="one_pass")),
    ("norms", Grid(tp=2, pp=2, critic=(2, 1), max_tokens=40)),
    ("norms", Grid(tp=2, dp=2, critic=(1, 4), max_tokens=30, head="one_pass")),
    ("norms", Grid(tp=2, dp=2, critic=(2, 1), max_tokens=30, head="one_pass", order="dp-tp-pp")),
    ("tied", Grid(pp=2, critic=(1, 2), max_tokens=25, head="one_pass", schedule="fused", together=True)),
    ("tied", Grid(pp=2, dp=2, critic=(1, 2), max_tokens=25, head="one_pass", schedule="fused", together=True)),
    ("untied", Grid(tp=2, pp=2, critic=(1, 2), max_tokens=25, head="one_pass", schedule="auto", together=True)),
    ("norms", Grid(tp=2, pp=2, critic=(2, 2), max_tokens=25, head="one_pass", schedule="fused", together=True)),
    ("untied", Grid(pp=4, critic=(1, 4), max_tokens=25, head="one_pass", schedule="fused", together=True)),
    ("deep", Grid(pp=4, critic=(1, 4), max_tokens=25, head="one_pass", schedule="fused", together=True)),
    ("deep", Grid(pp=4, critic=(1, 4), max_tokens=60, schedule="fused", together=True)),  # case E6: 2 micro-batches
    ("deep", Grid(pp=4, critic=(2, 2), max_tokens=25, head="one_pass", schedule="zero_bubble", recompute="full")),
    ("tied", Grid(pp=2, critic=(1, 2), max_tokens=25, head="one_pass", schedule="interleaved")),
    ("untied", Grid(pp=2, critic=(1, 1), max_tokens=40, head="one_pass", schedule="zero_bubble", recompute="selective")),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple[str, Grid], list[Outcome]]:
    """(model, grid) -> outcome on every rank of a job of four."""
    folder = tmp_path_factory.mktemp("models")
    paths = {
        "tied": save_hf_model(folder / "tied", "llama", tie_word_embeddings=True),
        "untied": save_hf_model(folder / "untied", "qwen2", tie_word_embeddings=False),
        "norms": save_hf_model(folder / "norms", "qwen3", tie_word_embeddings=True),
        "deep": save_hf_model(folder / "deep", "qwen2", tie_word_embeddings=True, num_hidden_layers=8),
    }
    cases = [*((name, Grid()) for name in paths), *CASES]
    by_rank = run_ranks(run_cases, 4, [(paths[name], grid) for name, grid in cases], timeout_s=600)
    return {case: [outcomes[i] for outcomes in by_rank] for i, case in enumerate(cases)}


@pytest.mark.parametrize(("model", "grid"), CASES, ids=str)
def test_one_step_equals_one_rank(outcomes, model: str, grid: Grid) -> None:
    mask = build_batch(PROMPTS, RESPONSES).response_mask
    oracle = outcomes[model, Grid()][0]
    for rank, outcome in enumerate(outcomes[model, grid]):
        torch.testing.assert_close(outcome.old_logprobs[mask], oracle.old_logprobs[mask], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outcome.values[mask], oracle.values[mask], rtol=1e-4, atol=1e-5)
        assert outcome.stats.keys() == (oracle.stats.keys() if rank in grid.ranks else set())
        for name, value in outcome.stats.items():
            assert value == pytest.approx(oracle.stats[name], rel=1e-4, abs=1e-6), name
        assert outcome.weights.keys() == oracle.weights.keys()
        for name, expected in oracle.weights.items():
            difference = (outcome.weights[name] - expected).norm() / expected.norm()
            assert difference < 1e-4, f"{name} differs by {difference:.2e}"


def test_the_step_moves_every_weight(outcomes, tmp_path) -> None:
    """Without this the comparison could hold for an update that does nothing."""
    from megarl.weights.hf import HFFolder

    path = save_hf_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    family, _ = read_model_spec(path)
    source = HFFolder(path, family)
    for name, moved in outcomes["tied", Grid()][0].weights.items():
        role, _, tensor = name.partition("/")
        if tensor in source.files:
            before = source.read(tensor, 0, 0, source.shape(tensor)[0])
            assert (moved - before).abs().max() > 1e-4, f"{role}: {tensor} did not move"
