"""Updates with nothing to learn on one replica or on all, and gradients that are not finite on one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megarl.algo.objective import policy_objective, value_objective
from megarl.models.build import BuildOptions
from megarl.models.forward import compute_logprobs, compute_values
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.schedule import reversed_v, v_shape
from megarl.parallel.topology import plan_topology
from megarl.trainer.measured_costs import Profile
from megarl.trainer.optim import AdamOptions, LRSchedule, apply_step
from megarl.trainer.roles import Role, build_role
from megarl.trainer.update import (
    PipelineOptions,
    Task,
    compute_gradients,
    update_role,
    update_roles,
    weigh_tokens,
)
from tests.objectives import build_even_policy_objective
from tests.ranks import run_ranks
from tests.tiny import build_batch, save_hf_model

ADAM, SCHEDULE = AdamOptions(0.0, (0.9, 0.99), 1e-8, 1.0), LRSchedule(1e-3, 0.0, 0, "constant", 1)


def snapshot(role: Role) -> list[Tensor]:
    return [tensor.clone() for tensor in role.weights().values()]


def has_moved(role: Role, before: list[Tensor]) -> bool:
    return any(not torch.equal(new, old) for new, old in zip(role.weights().values(), before, strict=True))


def run(rank: int, world_size: int, path: str) -> dict[str, object]:
    """Two data-parallel replicas, one rank each; what happened in each case, on this rank."""
    groups = build_groups(plan_topology("actor", world_size), GroupCache(60))
    role = build_role("actor", groups, path, BuildOptions(torch.float32), max_tokens=64, learns=(ADAM, SCHEDULE))
    assert role is not None and role.training is not None
    batch = build_batch([3, 4, 5, 6], [5, 0, 7, 2])
    zeros = torch.zeros(batch.num_tokens)

    def objective(hidden, micro, weights):
        logprobs, entropy = compute_logprobs(role.model, hidden, micro, role.groups, 1.0, role.num_ids)
        pick = micro.token_index
        return policy_objective(
            logprobs, entropy, logprobs.detach(), 1.0 + zeros[pick], weights.loss[pick], weights.mask[pick],
            clip_low=0.2, clip_high=0.2, clip_c=3.0,
        )  # fmt: skip

    seen: dict[str, object] = {}
    rows = [0, 1, 2, 3]
    before = snapshot(role)
    nothing = torch.zeros_like(batch.response_mask)
    done = update_role(role, batch, nothing, [rows], objective, "token-mean", 0)
    seen["all masked"] = done.stats["actor/grad_norm"], done.num_skipped, has_moved(role, before)

    one = nothing.clone()
    one[batch.token_rows([2])] = batch.response_mask[batch.token_rows([2])]
    done = update_role(role, batch, one, [rows], objective, "token-mean", 0)
    seen["one sequence"] = done.stats["actor/grad_norm"], done.num_skipped, has_moved(role, before)

    before = snapshot(role)
    compute_gradients(role, batch, rows, objective, weigh_tokens(batch, batch.response_mask, rows, "token-mean"))
    if rank == 1:
        vars(role.training.model)["buffers"][0].grad_data[-1] = torch.nan
    result = apply_step(role.training.optimizer, 1e-3, ADAM)
    seen["nan on rank 1"] = result.was_applied, has_moved(role, before)

    def broken(hidden, micro, weights):
        loss, stats = objective(hidden, micro, weights)
        return loss * (torch.nan if rank == 1 else 1.0), stats

    done = update_role(role, batch, batch.response_mask, [rows], broken, "token-mean", 0)
    seen["source"] = done.num_skipped, done.sources, has_moved(role, before)

    done = update_role(role, batch, batch.response_mask, [[1]], objective, "token-mean", 0)
    seen["an empty answer alone"] = done.stats["actor/grad_norm"], done.num_skipped
    done = update_role(role, batch, batch.response_mask, [rows], objective, "token-mean", 0)
    seen["afterwards"] = done.num_skipped, has_moved(role, before)
    return seen


def run_alone(rank: int, world_size: int, path: str) -> list[float]:
    """Gradient norms of three steps that change nothing, of weights that are their own masters (fp32, one replica)."""
    groups = build_groups(plan_topology("actor", world_size), GroupCache(60))
    still = AdamOptions(0.0, (0.9, 0.99), 1e-8, 1.0), LRSchedule(0.0, 0.0, 0, "constant", 1)
    role = build_role("actor", groups, path, BuildOptions(torch.float32), max_tokens=64, learns=still)
    assert role is not None
    batch = build_batch([3, 4, 5, 6], [5, 1, 7, 2])

    def objective(hidden, micro, weights):
        logprobs, _ = compute_logprobs(role.model, hidden, micro, role.groups, 1.0, role.num_ids)
        return -(logprobs * weights.loss[micro.token_index]).sum(), {}

    done = [
        update_role(role, batch, batch.response_mask, [[0, 1, 2, 3]], objective, "token-mean", 0) for _ in range(3)
    ]
    return [each.stats["actor/grad_norm"] for each in done]


def test_a_step_does_not_add_the_gradients_of_the_step_before(tmp_path) -> None:
    path = save_hf_model(tmp_path / "model", "llama", num_hidden_layers=2)
    (norms,) = run_ranks(run_alone, 1, path)
    assert norms[1:] == [norms[0]] * 2

def run_fused(rank: int, world_size: int, path: str) -> list[tuple[float, float, int, bool]]:
    """Actor and critic on one pipeline of two stages: nothing counts, then only an answer that is empty."""
    cache = GroupCache(60)
    roles: list[Role] = []
    for name, stages in (("actor", v_shape(2)), ("critic", reversed_v(2))):
        topology = replace(plan_topology(name, world_size, pp=2), chunk_stages=stages)
        options = BuildOptions(torch.float32, head="value" if name == "critic" else "policy")
        groups = build_groups(topology, cache)
        role = build_role(name, groups, path, options, max_tokens=12, learns=(ADAM, SCHEDULE))
        assert role is not None
        roles.append(role)
    actor, critic = roles
    batch = build_batch([3, 4, 5, 6], [5, 0, 7, 2])

    policy = build_even_policy_objective(actor)

    def value(hidden, micro, weights):
        values = compute_values(critic.model, hidden, micro, critic.groups)
        pick = micro.token_index
        return value_objective(values, values.detach(), values.detach() + 1, weights.loss[pick], weights.mask[pick], 0.5)

    seen = []
    before = [tensor for role in roles for tensor in snapshot(role)]
    for mask, rows in ((torch.zeros_like(batch.response_mask), [0, 1, 2, 3]), (batch.response_mask, [1])):
        tasks = [Task(actor, [rows], policy, "token-mean", 0), Task(critic, [rows], value, "token-mean", 0)]
        done, _ = update_roles(tasks, batch, mask, PipelineOptions("fused"), Profile())
        after = [tensor for role in roles for tensor in snapshot(role)]
        moved = any(not torch.equal(new, old) for new, old in zip(after, before, strict=True))
        norms = [done[name].stats[f"{name}/grad_norm"] for name in ("actor", "critic")]
        seen.append((*norms, sum(result.num_skipped for result in done.values()), moved))
    return seen


def test_a_fused_pipeline_with_nothing_to_learn_changes_nothing(tmp_path) -> None:  # case D8
    path = save_hf_model(tmp_path / "model", "llama")
    assert run_ranks(run_fused, 2, path) == [[(0.0, 0.0, 0, False)] * 2] * 2


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict[str, object]]:
    path = save_hf_model(tmp_path_factory.mktemp("model") / "model", "llama", num_hidden_layers=2)
    return run_ranks(run, 2, path)


def test_nothing_to_learn_anywhere_gives_a_zero_gradient(outcomes) -> None:  # case D8
    assert [seen["all masked"] for seen in outcomes] == [(0.0, 0, False)] * 2
    assert [seen["an empty answer alone"] for seen in outcomes] == [(0.0, 0)] * 2


def test_a_replica_without_policy_tokens_joins_every_collective(outcomes) -> None:  # case D8
    for norm, skipped, moved in (seen["one sequence"] for seen in outcomes):
        assert norm > 0 and skipped == 0 and moved


def test_a_gradient_that_is_not_finite_changes_no_weight_on_any_rank(outcomes) -> None:  # case H5
    assert [seen["nan on rank 1"] for seen in outcomes] == [(False, False)] * 2
    assert [seen["afterwards"] for seen in outcomes] == [(0, True)] * 2, "the run must go on after a skipped step"


def test_the_rank_whose_gradients_are_not_finite_is_named_on_every_rank(outcomes) -> None:  # case H5
    for skipped, sources, moved in (seen["source"] for seen in outcomes):
        assert skipped == 1 and not moved
        (source,) = sources
        assert source.startswith("actor: rank 1 (tp0 pp0 dp1): the gradients of ") and "rank 0" not in source
