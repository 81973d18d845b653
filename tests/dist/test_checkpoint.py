"""Roles saved and loaded on four ranks: any grid reads what any other wrote; a failure leaves the old one current."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.algo.objective import policy_objective, value_objective
from megarl.models.build import BuildOptions
from megarl.models.forward import compute_logprobs, compute_values
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.topology import plan_topology
from megarl.trainer import checkpoint_files
from megarl.trainer.checkpoint import CheckpointWriter, load_roles, read_rng
from megarl.trainer.masters import list_masters
from megarl.trainer.optim import AdamOptions, LRSchedule
from megarl.trainer.rng import restore_rng
from megarl.trainer.role_state import find_mismatches
from megarl.trainer.roles import Role, build_role
from megarl.trainer.sharded_folder import CheckpointFailed
from megarl.trainer.update import update_role
from megarl.weights.gather import gather_hf_tensors
from tests.checkpoints import list_differences, read_tensors
from tests.ranks import run_ranks
from tests.tiny import build_batch, save_hf_model

ADAM, SCHEDULE = AdamOptions(0.01, (0.9, 0.99), 1e-8, 1.0), LRSchedule(1e-3, 0.0, 0, "constant", 1)
BATCH = build_batch([3, 4, 5, 6], [5, 2, 7, 2])

# name -> (actor in bf16, critic in fp32): tp, pp, ranks
GRIDS: dict[str, tuple[tuple[int, int, list[int]], tuple[int, int, list[int]]]] = {
    "first": ((2, 2, [0, 1, 2, 3]), (1, 1, [1, 3])),
    "spread": ((1, 1, [0, 1, 2, 3]), (2, 1, [0, 1])),
    "deep": ((1, 3, [1, 2, 3]), (1, 2, [0, 1, 2, 3])),
}


def open_roles(cache: GroupCache, grid: str, paths: dict[str, str]) -> dict[str, Role | None]:
    roles: dict[str, Role | None] = {}
    for name, (tp, pp, ranks) in zip(("actor", "critic"), GRIDS[grid], strict=True):
        groups = build_groups(plan_topology(name, dist.get_world_size(), tp, pp, ranks=ranks), cache)
        is_actor = name == "actor"
        options = BuildOptions(torch.bfloat16 if is_actor else torch.float32, "policy" if is_actor else "value")
        roles[name] = build_role(name, groups, paths[name], options, max_tokens=64, learns=(ADAM, SCHEDULE))
    return roles


def step(role: Role, first: int) -> dict[str, float]:
    """One update of each kind of role on the same batch; its statistics."""
    zeros = torch.zeros(BATCH.num_tokens)

    def actor(hidden, micro, weights):
        logprobs, entropy = compute_logprobs(role.model, hidden, micro, role.groups, 1.0, role.num_ids)
        pick = micro.token_index
        return policy_objective(
            logprobs, entropy, logprobs.detach(), 1.0 + zeros[pick], weights.loss[pick], weights.mask[pick],
            clip_low=0.2, clip_high=0.2, clip_c=3.0,
        )  # fmt: skip

    def critic(hidden, micro, weights):
        pick = micro.token_index
        return value_objective(
            compute_values(role.model, hidden, micro, role.groups), zeros[pick], 1.0 + zeros[pick],
            weights.loss[pick], weights.mask[pick], clip_range=0.5,
        )  # fmt: skip

    objective = actor if role.name == "actor" else critic
    return update_role(role, BATCH, BATCH.response_mask, [[0, 1, 2, 3]], objective, "token-mean", first).stats


def save(writer: CheckpointWriter, number: int) -> Path:
    writer.begin(number, {"run": {}, "stream": {}, "data": {}}, {"config.yaml": "a: 1\n"})
    return writer.finish()


def run_round_trips(rank: int, world_size: int, paths: dict[str, str], folder: str) -> dict[str, Any]:
    """Two steps on the first grid, saved; every other grid loads that, saves it again, and takes a third step."""
    cache, root = GroupCache(60), Path(folder)
    seen: dict[str, Any] = {}
    roles = open_roles(cache, "first", paths)
    for first in range(2):
        for role in (role for role in roles.values() if role is not None):
            step(role, first)
    first_path = save(CheckpointWriter(root / "first", roles, None, is_async=False), 2)
    embedding = {}
    for name, role in roles.items():  # whole Hugging Face tensors, to compare with what lies in the folder
        weights = None if role is None else role.weights()
        spec, family, head = gather_facts(roles, name)
        tp, pp, ranks = GRIDS["first"][0 if name == "actor" else 1]
        topology = plan_topology(name, world_size, tp, pp, ranks=ranks)
        dtype = torch.bfloat16 if name == "actor" else torch.float32
        whole = dict(gather_hf_tensors(family, spec, topology, weights, dtype, torch.device("cpu"), head))
        embedding[name] = whole["model.embed_tokens.weight"]
    for name, tensor in embedding.items() if rank == 0 else ():
        saved = read_tensors(first_path / name)
        assert torch.equal(saved["embedding.word_embeddings.weight"], tensor)
    drawn = [torch.rand(1).item(), np.random.rand(), random.random()]
    stats: dict[str, dict[str, Any]] = {grid: {} for grid in (*GRIDS, "first again")}
    for name, role in roles.items():
        stats["first"][name] = None if role is None else step(role, 2)
    seen["draws"] = drawn
    for grid in ("spread", "deep", "first"):
        others = open_roles(cache, grid, paths)
        torch.manual_seed(rank)
        for name, role in others.items():
            assert role is None or find_mismatches(role, first_path / name, 2) == []
        load_roles(first_path, others)
        again = save(CheckpointWriter(root / f"again-{grid}", others, None, is_async=grid == "deep"), 2)
        if rank == 0:
            seen[f"differences {grid}"] = list_differences(first_path, again)
        state = read_rng(first_path, rank)
        assert state is not None
        restore_rng(state)
        seen[f"draws {grid}"] = [torch.rand(1).item(), np.random.rand(), random.random()]
        for name, role in others.items():
            result = None if role is None else step(role, 2)
            stats[f"{grid} again" if grid == "first" else grid][name] = result
        if grid == "first":
            seen["is third step the same"] = all(
                torch.equal(one.values, other.values)
                for name in roles
                if (role := roles[name]) is not None and (again_role := others[name]) is not None
                for one, other in zip(list_masters(role), list_masters(again_role), strict=True)
            )
    seen["stats"] = stats
    return seen


def gather_facts(roles: dict[str, Role | None], name: str) -> tuple[Any, Any, Any]:
    """Spec, family and head of a role, on ranks outside it too."""
    box: list[Any] = [None] * dist.get_world_size()
    role = roles[name]
    dist.all_gather_object(box, None if role is None else (role.spec, role.family, role.head))
    return next(each for each in box if each is not None)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "actor": save_hf_model(folder / "actor", "qwen3", num_hidden_layers=3, tie_word_embeddings=True),
        "critic": save_hf_model(folder / "critic", "qwen2", num_hidden_layers=2, tie_word_embeddings=False),
    }


@pytest.fixture(scope="module")
def trips(paths, tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks(run_round_trips, 4, paths, str(tmp_path_factory.mktemp("checkpoints")), timeout_s=240)


def test_every_grid_holds_bit_for_bit_what_was_saved(trips) -> None:  # cases F3, F5, F9
    for grid in ("spread", "deep", "first"):
        assert trips[0][f"differences {grid}"] == []


def test_the_same_grid_takes_the_same_next_step(trips) -> None:  # case F3
    assert all(seen["is third step the same"] for seen in trips)
    for seen in trips:
        assert seen["stats"]["first"] == seen["stats"]["first again"]


def test_another_grid_takes_the_same_next_step_but_for_rounding(trips) -> None:  # case F5
    for role, names in (("actor", ("actor/pg_loss", "actor/entropy", "actor/grad_norm")), ("critic", ("critic/vf_loss",))):
        by_grid = {
            grid: next(seen["stats"][grid][role] for seen in trips if seen["stats"][grid][role]) for grid in GRIDS
        }
        tolerance = 2e-2 if role == "actor" else 1e-4  # bf16 and fp32
        for name in names:
            values = [stats[name] for stats in by_grid.values()]
            assert values == pytest.approx([values[0]] * 3, rel=tolerance, abs=1e-6), (name, values)


def test_random_draws_go_on_as_they_would_have(trips) -> None:  # case F6
    for seen in trips:
        for grid in ("spread", "deep", "first"):
            assert seen[f"draws {grid}"] == seen["draws"]


def run_failures(rank: int, world_size: int, paths: dict[str, str], folder: str) -> dict[str, Any]:
    """Saves that fail in different ways; after each the first checkpoint must be the current one, on every rank."""
    roles = open_roles(GroupCache(60), "first", paths)
    root, seen = Path(folder), {}
    save(CheckpointWriter(root, roles, 1, is_async=False), 1)

    def try_to_save(case: str, is_async: bool = False) -> None:
        try:
            save(CheckpointWriter(root, roles, 1, is_async), 2)
            seen[case] = "saved"
        except CheckpointFailed as error:
            seen[case] = str(error)
        dist.barrier()
        seen[f"{case}, current"] = (root / "latest").read_text().strip(), checkpoint_files.find_newest(root).step
        seen[f"{case}, left"] = sorted(path.name for path in root.iterdir())

    from torch.distributed.checkpoint import FileSystemWriter

    true_write = FileSystemWriter.write_data
    if rank == 2:  # a full disk under one rank's file

        def fail(*_: Any, **__: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        FileSystemWriter.write_data = fail  # type: ignore[method-assign]
    try_to_save("full disk on rank 2")
    try_to_save("full disk on rank 2, asynchronous", is_async=True)
    FileSystemWriter.write_data = true_write  # type: ignore[method-assign]

    true_finish = FileSystemWriter.finish
    FileSystemWriter.finish = lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room"))  # type: ignore
    try_to_save("full disk under the metadata")
    FileSystemWriter.finish = true_finish  # type: ignore[method-assign]

    import shutil

    true_usage = shutil.disk_usage
    shutil.disk_usage = lambda path: true_usage(path)._replace(free=1000)  # type: ignore
    try_to_save("no room beforehand")
    shutil.disk_usage = true_usage

    if rank == 0:
        (root / "step_000002").mkdir()
        (root / "step_000002" / "mine.txt").write_text("keep me")
    dist.barrier()
    try_to_save("a foreign folder")
    dist.barrier()
    if rank == 0:
        (root / "step_000002" / "mine.txt").unlink()
        (root / "step_000002").rmdir()
    dist.barrier()
    try_to_save("at last")
    return seen


@pytest.fixture(scope="module")
def failures(paths, tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks(run_failures, 4, paths, str(tmp_path_factory.mktemp("failures")), timeout_s=240)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("full disk on rank 2", "rank 2: OSError: [Errno 28] No space left"),
        ("full disk on rank 2, asynchronous", "rank 2: OSError: [Errno 28] No space left"),
        ("full disk under the metadata", "rank 0: OSError: [Errno 28] no room"),
        ("no room beforehand", "GiB are to be written"),
        ("a foreign folder", "is in the way and is no checkpoint of megarl"),
    ],
)
def test_a_save_that_fails_is_told_on_every_rank_and_the_old_one_stays(failures, case: str, reason: str) -> None:
    for seen in failures:
        assert reason in seen[case], seen[case]
        assert seen[f"{case}, current"] == ("step_000001", 1)
        assert {"latest", "step_000001"} <= set(seen[f"{case}, left"]) <= {"latest", "step_000001", "step_000002"}


def test_after_failures_a_save_succeeds_and_only_then_the_old_one_goes(failures) -> None:
    for seen in failures:
        assert seen["at last"] == "saved"
        assert seen["at last, current"] == ("step_000002", 2)
        assert seen["at last, left"] == ["latest", "step_000002"]


def test_the_state_file_names_grid_and_versions_of_what_it_holds(trips, tmp_path_factory) -> None:
    root = next(tmp_path_factory.getbasetemp().glob("checkpoints*"))
    roles = json.loads((root / "first" / "step_000002" / "state.json").read_text())["roles"]
    assert roles["actor"]["grid"] == {"tp": 2, "pp": 2, "dp": 1, "ranks": [0, 1, 2, 3]}
    assert roles["actor"]["adam_step"] == roles["critic"]["adam_step"] == 2
    assert (roles["actor"]["dtype"], roles["critic"]["dtype"]) == ("bf16", "fp32")
