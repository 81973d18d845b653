"""From a `SlurmJob` to a batch script: PPO on any number of nodes, with logs per rank and requeueing.

    megarl launch slurm --config FILE --nodes 8 [--print] [key=value ...]

The script's own story, in this order:

    first start     a snapshot of the code and of the resolved configuration is taken; later edits change no queued run
    srun            one rank a GPU; each runs `python -m megarl.train` out of the snapshot and finds the others
    warning         so many seconds before the time limit Slurm sends SIGUSR1 to every rank: they save and leave with
                    the exit code that says "requeue me"
    requeue         the script asks for it; the next start resumes from the save (trainer.resume_mode=auto)
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from megarl.launch.stop import REQUEUE_EXIT

ENVIRONMENT = """\
# Threads of each rank; Slurm binds a rank to its own cores.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export PYTHONUNBUFFERED=1"""

GPU_ENVIRONMENT = """\
# Tensor parallelism overlaps a collective with the matrix product behind it: with one hardware queue they start in the
# order in which they were launched.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# NCCL. WARN names the rank and the call that failed; INFO tells rings, trees and which network was chosen.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# A collective that runs into trainer.timeout_s ends its rank (torch's default); what the last ones were is written
# then, a file a rank: which rank did not come, and to what.
export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE="$RUN/logs/nccl-trace-"
# Other settings pass through: NCCL_IB_GID_INDEX on RoCE networks, NCCL_NET_PLUGIN on clouds with their own network,
# NCCL_TOPO_FILE in virtual machines that hide how GPUs and network cards hang together."""

INTERFACE = """\
# The interface that nodes first meet on (TCP). Needed where the first one that NCCL and gloo find is not routed
# between nodes (docker0, a management network).
export NCCL_SOCKET_IFNAME={interface} GLOO_SOCKET_IFNAME={interface}"""

INFINIBAND = """\
# The InfiniBand ports of the compute network; without it NCCL takes every active port, storage networks too.
export NCCL_IB_HCA={ib_devices}"""


@dataclass(frozen=True)
class SlurmJob:
    """One job. `config`, `run_dir`: paths as seen from the folder that the job is submitted from, on every node.

    `gpus_per_node` 0 = ranks on CPUs. `warn_s`: seconds between the warning and the time limit: a save must fit.
    `setup`: shell lines that make `python` the right one (module load, activate).
    """

    name: str
    config: str
    run_dir: str
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    ranks_per_node: int = 8
    gpus_per_node: int = 8
    cpus_per_rank: int = 12
    time_limit: str = "24:00:00"
    warn_s: int = 600
    max_requeues: int = 50
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    setup: tuple[str, ...] = ("source .venv/bin/activate",)
    interface: str | None = None
    ib_devices: str | None = None

    def __post_init__(self) -> None:
        for key in ("nodes", "ranks_per_node", "cpus_per_rank", "warn_s"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} must be 1 or more")
        if self.gpus_per_node not in (0, self.ranks_per_node):
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} does not agree with gpus_per_node={self.gpus_per_node}: a rank "
                "drives one GPU; make them equal, or set gpus_per_node=0 for CPUs"
            )
        for key in ("name", "partition", "account", "qos", "time_limit"):
            value = getattr(self, key)
            if value is not None and (not value or any(sign.isspace() for sign in value)):
                raise ValueError(f"{key}={value!r} must be one word: it stands in an #SBATCH line")


def render_sbatch(job: SlurmJob) -> str:
    """The text of the batch script."""
    blocks = ["\n".join(_list_directives(job)), _render_start(job)]
    environment = [ENVIRONMENT]
    if job.gpus_per_node:
        environment.append(GPU_ENVIRONMENT)
    if job.interface:
        environment.append(INTERFACE.format(interface=shlex.quote(job.interface)))
    if job.ib_devices and job.gpus_per_node:
        environment.append(INFINIBAND.format(ib_devices=shlex.quote(job.ib_devices)))
    blocks += ["\n".join(environment), _render_run(job)]
    return "\n\n".join(blocks) + "\n"


def _list_directives(job: SlurmJob) -> list[str]:
    device = f"{job.gpus_per_node} GPUs" if job.gpus_per_node else f"{job.ranks_per_node} CPU ranks"
    nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "cpus-per-task": job.cpus_per_rank,
        "gpus-per-node": job.gpus_per_node or None,
        "mem": 0 if job.gpus_per_node else None,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "time": job.time_limit,
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
        "signal": f"USR1@{job.warn_s}",
    }
    lines = [
        "#!/bin/bash",
        f"# {nodes} × {device}. Written by `megarl launch slurm`; submit it from the folder that its paths start in.",
    ]
    lines += [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    return [*lines, "#SBATCH --requeue", *(["#SBATCH --exclusive"] if job.gpus_per_node else [])]


def _render_start(job: SlurmJob) -> str:
    return "\n".join([
        "set -uo pipefail",
        f"RUN={shlex.quote(job.run_dir)}",
        'mkdir -p "$RUN/logs" && RUN=$(realpath "$RUN") || exit 2',
        *job.setup,
    ])  # fmt: skip


def _render_run(job: SlurmJob) -> str:
    words = [f"trainer.nnodes={job.nodes}", f"trainer.n_gpus_per_node={job.ranks_per_node}", *job.overrides]
    overrides = " \\\n    ".join(shlex.quote(word) for word in words)
    return f"""\
# The first start keeps the code and the resolved configuration; a start after a requeue runs the same ones.
[ -d "$RUN/launch" ] || python -m megarl launch snapshot --config {shlex.quote(job.config)} --out "$RUN/launch" \\
    {overrides} || exit 2
export PYTHONPATH="$RUN/launch/code${{PYTHONPATH:+:$PYTHONPATH}}"

# A log for each rank: <job>.<restart>.rank-<rank>.log. A rank that fails ends the others within seconds. A warning that
# comes before a rank can heed it is ignored: it would end the rank.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\
    --output="$RUN/logs/%j.${{SLURM_RESTART_COUNT:-0}}.rank-%t.log" \\
    bash -c 'trap "" USR1; exec "$@"' rank python -m megarl.train --config "$RUN/launch/config.yaml"
code=$?

# {REQUEUE_EXIT}: everything is saved, and there is more to do.
if [ "$code" -eq {REQUEUE_EXIT} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_requeues} ]; then
    echo "saved; asking Slurm to start this job again (start ${{SLURM_RESTART_COUNT:-0}} is over)"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code\""""
