"""`megarl launch slurm` and `megarl launch snapshot`: from words on the command line to files and a queued job."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

from rich.console import Console

from megarl.config.hub import load_run
from megarl.config.load import ConfigError, dump_config, load_config, resolve_config
from megarl.config.schema import Config
from megarl.config.validate import find_problems
from megarl.launch.slurm import SlurmJob, render_sbatch
from megarl.launch.snapshot import write_snapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands of `megarl launch`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    slurm = commands.add_parser("slurm", help="write a batch script and submit it")
    slurm.add_argument("--config", required=True, help="the run's YAML file")
    slurm.add_argument("--nodes", type=int, default=SlurmJob.nodes)
    slurm.add_argument("--gpus-per-node", type=int, default=SlurmJob.gpus_per_node, help="0: ranks on CPUs")
    slurm.add_argument("--ranks-per-node", type=int, help="default: one a GPU")
    slurm.add_argument("--cpus-per-rank", type=int, default=SlurmJob.cpus_per_rank)
    slurm.add_argument("--time", default=SlurmJob.time_limit, help="the job's time limit, as sbatch takes it")
    slurm.add_argument("--warn-s", type=int, default=SlurmJob.warn_s, help="seconds before the limit to save and leave")
    slurm.add_argument("--max-requeues", type=int, default=SlurmJob.max_requeues)
    for name in ("partition", "account", "qos"):
        slurm.add_argument(f"--{name}")
    slurm.add_argument(
        "--setup", action="append", metavar="LINE", help="shell line before anything runs; may be given several times"
    )
    slurm.add_argument("--interface", help="network interface that the nodes meet on, as NCCL_SOCKET_IFNAME takes it")
    slurm.add_argument("--ib-devices", help="InfiniBand ports, as NCCL_IB_HCA takes them")
    slurm.add_argument("--print", action="store_true", help="only print the script")
    slurm.add_argument("overrides", nargs="*", metavar="key=value")
    snapshot = commands.add_parser("snapshot", help="keep the code and the resolved configuration of a run")
    snapshot.add_argument("--config", required=True)
    snapshot.add_argument("--out", type=Path, required=True)
    snapshot.add_argument("overrides", nargs="*", metavar="key=value")


def run_launch(options: argparse.Namespace, console: Console) -> int:
    """Runs one sub-command; returns the exit code.

    Raises:
        ValueError: whatever is wrong with the configuration or the job, before anything is written.
    """
    config = resolve_config(load_config(options.config, options.overrides))
    if options.action == "snapshot":
        write_snapshot(config, options.out)
        console.print(f"{options.out}: code and configuration of this run", highlight=False, soft_wrap=True)
        return 0
    job = build_job(options, config)
    if options.print:
        console.file.write(render_sbatch(job))
        return 0
    return submit(job, options.overrides, console)


def build_job(options: argparse.Namespace, config: Config) -> SlurmJob:
    """The job that the words describe; name and folder come from the configuration."""
    assert config.trainer.default_local_dir is not None, "resolve_config sets it"
    return SlurmJob(
        name=config.trainer.experiment_name,
        config=options.config,
        run_dir=config.trainer.default_local_dir,
        overrides=tuple(options.overrides),
        nodes=options.nodes,
        ranks_per_node=options.gpus_per_node if options.ranks_per_node is None else options.ranks_per_node,
        gpus_per_node=options.gpus_per_node,
        cpus_per_rank=options.cpus_per_rank,
        time_limit=options.time,
        warn_s=options.warn_s,
        max_requeues=options.max_requeues,
        partition=options.partition,
        account=options.account,
        qos=options.qos,
        setup=SlurmJob.setup if options.setup is None else tuple(options.setup),
        interface=options.interface,
        ib_devices=options.ib_devices,
    )


def submit(job: SlurmJob, overrides: list[str], console: Console) -> int:
    """Checks the run at its real size, keeps code and configuration, and hands the script to sbatch."""
    sizes = [f"trainer.nnodes={job.nodes}", f"trainer.n_gpus_per_node={job.ranks_per_node}"]
    config, not_found = load_run(job.config, [*sizes, *overrides])
    problems = find_problems(config, job.nodes * job.ranks_per_node, not_found=not_found)
    if problems:
        raise ConfigError(problems)
    if shutil.which("sbatch") is None:
        raise ValueError("sbatch is not here: run this where jobs are submitted, or print the script with --print")
    launch = Path(job.run_dir) / "launch"
    if launch.exists():
        if (launch / "config.yaml").read_text() != dump_config(config):
            raise ValueError(
                f"{launch} holds another configuration, that of the first start; remove the folder to go on with the "
                "new one, or give the run a name of its own (trainer.experiment_name)"
            )
        console.print(f"{launch}: code and configuration of the first start are kept", highlight=False, soft_wrap=True)
    else:
        launch.parent.mkdir(parents=True, exist_ok=True)
        write_snapshot(config, launch)
    script = launch / "job.sbatch"
    script.write_text(render_sbatch(job))
    told = subprocess.run(["sbatch", str(script)], capture_output=True, text=True, check=False)
    if told.returncode != 0:
        raise ValueError(f"sbatch refused {script}: {told.stderr.strip()}")
    console.print(f"{told.stdout.strip()}: {script}; logs in {job.run_dir}/logs", highlight=False, soft_wrap=True)
    return 0
