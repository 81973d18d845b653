"""Weights that every tensor-parallel rank holds whole get one gradient: each rank sees only some heads, or some tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.models.build import BuildOptions
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.topology import plan_topology
from megarl.trainer.optim import AdamOptions, LRSchedule
from megarl.trainer.roles import build_role
from megarl.trainer.update import compute_gradients, weigh_tokens
from tests.objectives import build_even_policy_objective
from tests.ranks import run_ranks
from tests.tiny import build_batch, save_hf_model

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

LEARNS = AdamOptions(0.0, (0.9, 0.99), 1e-8, 1.0), LRSchedule(1e-3, 0.0, 0, "constant", 1)


def run(rank: int, world_size: int, path: str) -> list[dict[str, Tensor]]:
    """Gradients of every norm after one backward pass, by one rank and by two (sequence parallelism included)."""
    cache = GroupCache(60)
    batch = build_batch([3, 4, 5, 6], [5, 1, 7, 2])
    found: list[dict[str, Tensor]] = []
    for tp in (1, 2):
        groups = build_groups(plan_topology("actor", world_size, tp, ranks=list(range(tp))), cache)
        role = build_role("actor", groups, path, BuildOptions(torch.float32), max_tokens=64, learns=LEARNS)
        if role is None:
            found.append({})
            continue

        objective = build_even_policy_objective(role)
        rows = list(range(batch.num_sequences))
        compute_gradients(role, batch, rows, objective, weigh_tokens(batch, batch.response_mask, rows, "token-mean"))
        norms = [layout.name for layout in role.layouts if "norm" in layout.name]
        found.append({name: role.gradients()[name].clone() for name in norms})
    return found


def test_norms_of_queries_and_keys_learn_alike_on_every_rank(tmp_path) -> None:  # case A11
    path = save_hf_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    (alone, first), (_, second) = run_ranks(run, 2, path)
    assert sum("q_layernorm" in name or "k_layernorm" in name for name in alone) == 4
    assert alone.keys() == first.keys() == second.keys()
    for name, expected in alone.items():
        assert expected.abs().max() > 1e-5, f"{name} has no gradient to compare"
        assert torch.equal(first[name], second[name]), f"{name} differs between ranks"
        torch.testing.assert_close(first[name], expected, rtol=1e-4, atol=1e-6)
