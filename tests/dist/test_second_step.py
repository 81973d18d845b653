"""An update starts from clean gradients: the second and third step are the same for every way to cut the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.algo.objective import policy_objective
from megarl.models.build import BuildOptions
from megarl.models.forward import compute_logprobs
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.topology import plan_topology
from megarl.trainer.optim import AdamOptions, LRSchedule
from megarl.trainer.roles import build_role
from megarl.trainer.update import update_role
from tests.ranks import run_ranks
from tests.tiny import build_batch, save_hf_model

ADAM, SCHEDULE = AdamOptions(0.0, (0.9, 0.99), 1e-3, 1.0), LRSchedule(1e-2, 0.0, 0, "constant", 1)
CASES = {"one": ([0], 4096), "cut": ([0], 16), "two": ([0, 1], 16)}  # ranks, tokens of a micro-batch


def run(rank: int, world_size: int, path: str) -> dict[str, list[float]]:
    """The gradient norms of three steps, by case; on ranks outside it none."""
    cache = GroupCache(60)
    batch = build_batch([3, 4, 5, 6], [5, 2, 7, 2])
    generator = torch.Generator().manual_seed(3)
    advantages: Tensor = torch.randn(batch.num_tokens, generator=generator)
    norms: dict[str, list[float]] = {}
    for name, (ranks, max_tokens) in CASES.items():
        groups = build_groups(plan_topology("actor", world_size, ranks=ranks), cache)
        options = BuildOptions(torch.float32)
        role = build_role("actor", groups, path, options, max_tokens=max_tokens, learns=(ADAM, SCHEDULE))
        norms[name] = []
        if role is None:
            continue
        assert role.training is not None

        def objective(hidden, micro, weights, role=role):
            logprobs, entropy = compute_logprobs(role.model, hidden, micro, role.groups, 1.0, role.num_ids)
            pick = micro.token_index
            return policy_objective(
                logprobs, entropy, logprobs.detach(), advantages[pick], weights.loss[pick], weights.mask[pick],
                clip_low=0.2, clip_high=0.2, clip_c=3.0,
            )  # fmt: skip

        for step in range(3):
            done = update_role(role, batch, batch.response_mask, [[0, 1, 2, 3]], objective, "token-mean", step)
            norms[name].append(done.stats["actor/grad_norm"])
    return norms


def test_later_steps_do_not_depend_on_the_cut_or_on_what_the_step_before_left(tmp_path) -> None:
    path = save_hf_model(tmp_path / "model", "llama", num_hidden_layers=2)
    norms = run_ranks(run, 2, path)[0]
    assert len(norms["one"]) == 3 and len(set(norms["one"])) == 3
    assert norms["cut"] == pytest.approx(norms["one"], rel=1e-4)
    assert norms["two"] == pytest.approx(norms["one"], rel=1e-4)
