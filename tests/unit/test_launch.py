"""Joining the world that torchrun or srun made, and refusing one that contradicts the configuration."""

from __future__ import annotations

import pytest

from megarl.launch.failure import Failure, describe_failure
from megarl.launch.local import (
    RankExit,
    World,
    build_environments,
    expand_tasks_per_node,
    find_world,
    first_host,
    is_under_launcher,
    pick_first_cause,
    resolve_world,
)

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_STEP_TASKS_PER_NODE": "4,2",
}  # fmt: skip


def failed(rank: int, at: float, error: BaseException | None) -> RankExit:
    failure: Failure | None = describe_failure(error, rank) if error is not None else None
    return RankExit(rank, 1, at, failure)


def test_world_of_torchrun() -> None:
    assert find_world(TORCHRUN) == World(3, 4, 1, 2, "a", 5)


def test_world_of_srun() -> None:
    assert find_world(SRUN) == World(5, 6, 1, 2, "gpu003", 20077)


def test_a_batch_script_of_slurm_is_not_under_srun() -> None:
    assert not is_under_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77"})


def test_the_environment_of_a_world_is_read_back_as_the_same_world() -> None:
    world = find_world(SRUN)
    assert world is not None
    assert find_world(world.environment()) == world


def test_a_broken_launcher_variable_is_named() -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE='four'"):
        find_world(TORCHRUN | {"WORLD_SIZE": "four"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-006,9],other", "gpu003"),
        ("node7", "node7"),
        ("a,b", "a"),
        ("r[1,3]-n[02-04]", "r1-n02"),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_tasks_per_node_are_expanded() -> None:
    assert expand_tasks_per_node("4(x2),3") == [4, 4, 3]


def test_sizes_that_agree_are_accepted() -> None:
    assert resolve_world(2, 2, TORCHRUN) == find_world(TORCHRUN)


def test_sizes_the_user_did_not_write_are_not_compared() -> None:
    assert resolve_world(None, None, TORCHRUN) == find_world(TORCHRUN)


def test_other_number_of_processes_a_node_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.n_gpus_per_node=4 .* 2 processes .*set trainer\.n_gpus_per_node=2"):
        resolve_world(None, 4, TORCHRUN)


def test_other_number_of_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.nnodes=3 .* launcher started 4; set trainer\.nnodes=2"):
        resolve_world(3, None, TORCHRUN)


def test_several_nodes_need_a_launcher() -> None:
    with pytest.raises(ValueError, match=r"trainer\.nnodes=2: .*torchrun or srun"):
        resolve_world(2, 1, {})


def test_alone_there_is_no_world() -> None:
    assert resolve_world(1, 2, {}) is None


def test_threads_of_the_user_are_kept() -> None:
    assert "OMP_NUM_THREADS" not in build_environments(2, {"OMP_NUM_THREADS": "5"})[0]


def test_threads_are_shared_out_and_never_zero() -> None:
    assert build_environments(1000, {})[999]["OMP_NUM_THREADS"] == "1"


def test_a_rank_that_lost_its_peer_is_not_the_cause_though_it_spoke_first() -> None:
    peer = failed(0, 1.0, RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer"))
    cause = failed(1, 2.0, None)
    assert pick_first_cause([peer, cause]) is cause


def test_of_two_causes_the_earlier_is_told() -> None:
    late, early = failed(0, 2.0, ValueError("late")), failed(1, 1.0, ValueError("early"))
    assert pick_first_cause([late, early]) is early


def test_a_collective_that_timed_out_counts_as_a_cause() -> None:
    error = RuntimeError("gloo/transport/tcp/unbound_buffer.cc: Timed out waiting 1000ms for recv operation")
    assert not describe_failure(error, 0).is_peer_loss
