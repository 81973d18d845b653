"""Batch scripts: what is asked of Slurm, what each rank runs, and the examples, which are what the command prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config.load import load_config, resolve_config
from megarl.config.validate import find_problems
from megarl.launch.slurm import SlurmJob, render_sbatch
from megarl.launch.stop import REQUEUE_EXIT
from tests.tiny_task import write_job

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "slurm"
# example -> the command that prints it
COMMANDS = {
    "ppo_1_node": "--config examples/slurm/ppo_8b.yaml --nodes 1",
    "ppo_2_nodes": "--config examples/slurm/ppo_8b.yaml --nodes 2 --interface ib0",
    "ppo_8_nodes": "--config examples/slurm/ppo_8b.yaml --nodes 8 --interface ib0 --ib-devices =mlx5_0,mlx5_1",
    "llama3_70b": "--config examples/slurm/llama3_70b.yaml --nodes 16 --interface ib0 --warn-s 1200",
}
SIZES = {"ppo_1_node": 8, "ppo_2_nodes": 16, "ppo_8_nodes": 64, "llama3_70b": 128}
SHAPES = {
    "8B": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "70B": {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_what_the_command_prints(name: str, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["launch", "slurm", *COMMANDS[name].split(), "--print"]) == 0
    assert capsys.readouterr().out == (EXAMPLES / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_fit_their_models(name: str, tmp_path, monkeypatch) -> None:
    """With the shapes of the real models in the named folders, nothing is found wrong at the example's size."""
    config = resolve_config(load_config(str(ROOT / COMMANDS[name].split()[1])))
    monkeypatch.chdir(tmp_path)
    folder = Path(config.actor.model_path or "")
    shape = SHAPES["70B" if "70B" in folder.name else "8B"]
    facts = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**facts, **shape}))
    for file in (*config.data.train_files, *config.data.val_files):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    assert find_problems(config, SIZES[name]) == []


def test_bash_accepts_every_script() -> None:
    jobs = [
        SlurmJob("a", "c.yaml", "runs/a"),
        SlurmJob("b", "my config.yaml", "runs/b b", ("reward.kwargs={a: 'x y'}",), gpus_per_node=0, ranks_per_node=2),
    ]
    for job in jobs:
        checked = subprocess.run(["bash", "-n"], input=render_sbatch(job), text=True, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stderr


def test_what_slurm_is_asked_for() -> None:
    lines = render_sbatch(SlurmJob("a", "c.yaml", "runs/a", nodes=2, warn_s=300, partition="gpu")).splitlines()
    asked = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    wanted = {
        "nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "partition=gpu", "signal=USR1@300", "requeue", "exclusive",
    }  # fmt: skip
    assert wanted <= asked
    on_cpus = render_sbatch(SlurmJob("a", "c.yaml", "runs/a", gpus_per_node=0))
    assert "--gpus" not in on_cpus and "NCCL" not in on_cpus and "exclusive" not in on_cpus


def run_script(tmp_path: Path, job: SlurmJob, exit_code: int, restarts: int) -> tuple[int, str]:
    """Runs a script with an `srun` that ends with `exit_code`; returns its own code and what was called."""
    tools, called = tmp_path / "tools", tmp_path / "called"
    tools.mkdir(exist_ok=True)
    for name, code in (("srun", exit_code), ("scontrol", 0), ("python", 0)):
        (tools / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{called}\nexit {code}\n')
        (tools / name).chmod(0o755)
    called.unlink(missing_ok=True)
    environ = {
        "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_CPUS_PER_TASK": "3",
    }  # fmt: skip
    done = subprocess.run(["bash"], input=render_sbatch(job), text=True, cwd=tmp_path, env=environ, check=False)
    return done.returncode, called.read_text()


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [(REQUEUE_EXIT, 0, True), (REQUEUE_EXIT, 5, False), (0, 0, False), (1, 0, False)],
)
def test_only_a_saved_run_asks_to_be_started_again(tmp_path, code: int, restarts: int, is_requeued: bool) -> None:
    job = SlurmJob("a", "c.yaml", "runs/a", setup=(), max_requeues=5)
    returned, called = run_script(tmp_path, job, code, restarts)
    assert returned == code
    assert ("scontrol requeue 7" in called) == is_requeued
    assert (tmp_path / "runs" / "a" / "logs").is_dir()


def test_every_start_runs_the_first_starts_snapshot(tmp_path) -> None:
    job = SlurmJob("a", "c.yaml", "runs/a", ("actor.optim.lr=1e-5",), nodes=2, setup=())
    _, called = run_script(tmp_path, job, 0, 0)
    first, second = called.splitlines()
    run = tmp_path / "runs" / "a"
    assert first.startswith(f"python -m megarl launch snapshot --config c.yaml --out {run}/launch")
    assert "trainer.nnodes=2 trainer.n_gpus_per_node=8 actor.optim.lr=1e-5" in first
    assert second.endswith(f"python -m megarl.train --config {run}/launch/config.yaml")
    assert f"--output={run}/logs/%j.0.rank-%t.log" in second and "--cpus-per-task=3" in second
    (run / "launch").mkdir()
    _, called = run_script(tmp_path, job, 0, 1)
    assert [line.split()[0] for line in called.splitlines()] == ["srun"]


def test_a_snapshot_holds_code_and_every_option(tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "launch"
    words = ["launch", "snapshot", "--config", str(EXAMPLES / "ppo_8b.yaml"), "--out", str(out)]
    assert main([*words, "actor.optim.lr=3e-6"]) == 0
    config = resolve_config(load_config(str(out / "config.yaml")))
    assert config == resolve_config(load_config(str(EXAMPLES / "ppo_8b.yaml"), ["actor.optim.lr=3e-6"]))
    assert (out / "code" / "megarl" / "train.py").read_text() == (ROOT / "megarl" / "train.py").read_text()
    assert "torch 2." in (out / "versions.txt").read_text()
    assert main(words) == 2
    assert "has its snapshot already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "nodes=0 must be 1 or more"),
        (["--ranks-per-node", "4"], "a rank drives one GPU"),
        (["--partition", "a b"], "must be one word"),
        (["actor.optim.lrr=1"], "actor.optim.lrr"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(words: list[str], message: str, capsys) -> None:
    assert main(["launch", "slurm", "--config", str(EXAMPLES / "ppo_8b.yaml"), *words, "--print"]) == 2
    assert message in capsys.readouterr().err


def test_a_run_is_submitted_with_its_snapshot_and_goes_on_with_it(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "sbatch").write_text('#!/bin/bash\nbash -n "$1" && echo Submitted batch job 7\n')
    (tmp_path / "tools" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/tools:{os.environ['PATH']}")
    (tmp_path / "config.yaml").write_text("{}")
    words = ["launch", "slurm", "--config", f"{tmp_path}/config.yaml", "--gpus-per-node", "0", "--ranks-per-node", "2",
             *write_job(tmp_path)]  # fmt: skip
    assert main(words) == 0
    assert "Submitted batch job 7" in capsys.readouterr().out
    launch = tmp_path / "run" / "launch"
    config = resolve_config(load_config(str(launch / "config.yaml")))
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes) == (2, 1)
    assert main(words) == 0
    assert "of the first start are kept" in capsys.readouterr().out
    assert main([*words, "actor.optim.lr=7e-6"]) == 2
    assert "holds another configuration" in capsys.readouterr().err


def test_without_slurm_the_way_out_is_named(tmp_path, capsys, monkeypatch) -> None:
    words = write_job(tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code = main(["launch", "slurm", "--config", str(tmp_path / "config.yaml"), "--gpus-per-node", "0",
                 "--ranks-per-node", "2", *words])  # fmt: skip
    assert code == 2
    assert "sbatch is not here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
