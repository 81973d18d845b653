"""A role whose tensors are parked between its phases trains as one that stays, and its memory is really free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.algo.objective import policy_objective
from megarl.models.build import BuildOptions
from megarl.models.forward import compute_logprobs
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.topology import plan_topology
from megarl.trainer.annotate import annotate_logprobs
from megarl.trainer.offload import Offload, OffloadOptions, bring_back_, list_parameters, park_
from megarl.trainer.optim import AdamOptions, LRSchedule
from megarl.trainer.roles import build_role
from megarl.trainer.update import update_role
from tests.ranks import run_ranks
from tests.tiny import build_batch, save_hf_model

ADAM, SCHEDULE = AdamOptions(0.01, (0.9, 0.99), 1e-8, 1.0), LRSchedule(1e-3, 0.0, 0, "constant", 1)
EVERYTHING = OffloadOptions(params=True, grads=True, optimizer=True)


def train(world_size: int, path: str, dtype: torch.dtype, tp: int, is_parked: bool) -> dict[str, Any]:
    """Three updates with an annotation before each, everything parked in between or not."""
    groups = build_groups(plan_topology("actor", world_size, tp), GroupCache(60))
    role = build_role("actor", groups, path, BuildOptions(dtype), max_tokens=64, learns=(ADAM, SCHEDULE))
    assert role is not None
    offload = Offload(role, EVERYTHING if is_parked else OffloadOptions())
    batch = build_batch([3, 4, 5, 6], [5, 3, 7, 2])
    parked: list[int] = []
    for _ in range(3):
        offload.leave()
        offload.leave()
        parked.append(offload.parked_bytes)
        if is_parked:
            assert all(parameter.untyped_storage().nbytes() == 0 for parameter in list_parameters(role))
        offload.return_params()
        old = annotate_logprobs(role, batch, 1.0)
        offload.return_all()

        def objective(hidden: Any, micro: Any, weights: Any, old: torch.Tensor = old) -> Any:
            logprobs, entropy = compute_logprobs(role.model, hidden, micro, role.groups, 1.0, role.num_ids)
            pick = micro.token_index
            return policy_objective(
                logprobs, entropy, old[pick], torch.ones_like(old[pick]), weights.loss[pick], weights.mask[pick],
                clip_low=0.2, clip_high=0.2, clip_c=3.0,
            )  # fmt: skip

        update_role(role, batch, batch.response_mask, [[0, 1], [2, 3]], objective, "token-mean", 0)
    return {
        "weights": {name: tensor.clone() for name, tensor in role.weights().items()},
        "parked": parked,
        "num_params": sum(parameter.numel() for parameter in list_parameters(role)),
    }


def run(rank: int, world_size: int, path: str) -> dict[str, list[dict[str, Any]]]:
    cases = {"dp2 fp32": (torch.float32, 1), "dp2 bf16": (torch.bfloat16, 1), "tp2 bf16": (torch.bfloat16, 2)}
    return {
        name: [train(world_size, path, dtype, tp, is_parked) for is_parked in (False, True)]
        for name, (dtype, tp) in cases.items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    return run_ranks(run, 2, save_hf_model(tmp_path_factory.mktemp("model") / "model", "llama", num_hidden_layers=2))


@pytest.mark.parametrize("case", ["dp2 fp32", "dp2 bf16", "tp2 bf16"])
def test_a_parked_role_learns_bit_for_bit_the_same(results: list[dict[str, Any]], case: str) -> None:
    for found in results:
        stayed, left = found[case]
        for name, tensor in stayed["weights"].items():
            assert torch.equal(tensor, left["weights"][name]), name


@pytest.mark.parametrize("case", ["dp2 bf16", "tp2 bf16"])
def test_parked_bytes_are_those_of_weights_gradients_masters_and_moments(
    results: list[dict[str, Any]], case: str
) -> None:
    """bf16 weights 2, fp32 gradients 4, and over the replicas fp32 masters 4 and, from the first step on, moments 8."""
    for found in results:
        stayed, left = found[case]
        assert stayed["parked"] == [0, 0, 0]
        share = 1 if case.startswith("tp2") else 2
        expected = left["num_params"] * (2 + 4 + 12 / share)
        assert left["parked"][-1] == pytest.approx(expected, rel=0.02)


def test_views_stay_views_and_values_return() -> None:
    whole = torch.arange(10.0)
    first, second = whole[:4], whole[4:].view(2, 3)
    parked = park_([first, second], keeps_contents=True)
    assert whole.untyped_storage().nbytes() == 0
    bring_back_(parked)
    assert whole.tolist() == list(range(10))
    second += 1
    assert whole[4:].tolist() == [5, 6, 7, 8, 9, 10]
    bring_back_(park_([whole], keeps_contents=False))
    assert whole.tolist() == [0.0] * 10
