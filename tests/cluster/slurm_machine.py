"""A Slurm cluster of this one machine: munged, slurmctld and slurmd of our own, in a folder of our own.

Nothing of the system's own configuration is read or changed; the daemons end with the `with` block, by their pids.
Needs root and Debian's packages slurm-wlm and munge (`install_packages` gets them).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from megarl.launch.local import find_free_port

PACKAGES = ("slurm-wlm", "munge")
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue")
START_S = 60
INDEX_S, DOWNLOAD_S, INSTALL_S = 90, 180, 300
APT_OPTIONS = [
    "-o", "Acquire::http::Timeout=15", "-o", "Acquire::https::Timeout=15", "-o", "Acquire::Retries=1",
    "-o", "DPkg::Lock::Timeout=60",
]  # fmt: skip

CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
# A job that asks to be started again waits until the credential of its last start is void.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=10
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def install_packages() -> str:
    """Gets what is missing with apt; returns why it cannot, empty when all is there."""
    if os.geteuid() != 0:
        return "starting munged, slurmctld and slurmd needs root"
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    os.environ["PATH"] = environ["PATH"]
    if all(shutil.which(tool) for tool in TOOLS):
        return ""
    if shutil.which("apt-get") is None:
        return "slurm-wlm and munge are not installed, and there is no apt-get to install them"
    install = ["install", "-y", "-qq", "--no-install-recommends"]
    for command, limit_s in (
        (["update", "-qq"], INDEX_S),
        ([*install, "--download-only", *PACKAGES], DOWNLOAD_S),  # apart: dpkg must not be broken off in its work
        ([*install, "--no-download", *PACKAGES], INSTALL_S),
    ):
        try:
            done = subprocess.run(
                ["apt-get", *APT_OPTIONS, *command], env=environ, capture_output=True, text=True, check=False,
                stdin=subprocess.DEVNULL, timeout=limit_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"apt-get {' '.join(command)} was not done within {limit_s} s"
        if done.returncode != 0:
            return f"apt-get {' '.join(command)} failed: {' '.join(done.stderr.strip().splitlines()[-1:])}"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"the packages do not hold {missing}" if missing else ""


@contextlib.contextmanager
def one_machine_cluster(folder: Path, cpus: int) -> Iterator[dict[str, str]]:
    """Starts the daemons; yields the environment in which `sbatch` and the others talk to them.

    Args:
        cpus: that the node says it has, whatever it really has.
    """
    folder.chmod(0o755)
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    ports = {"ctld_port": find_free_port(), "slurmd_port": find_free_port()}
    conf.write_text(CONF.format(folder=folder, host=host, cpus=cpus, **ports))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    environ["SLURM_CONF"] = str(conf)
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
         f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed", f"--log-file={folder}/munged.log"],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf), "-N", host],
    ]  # fmt: skip
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as out:
                daemons.append(subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT))
            if command[0] == "munged":
                wait_for(lambda: (folder / "munge.socket").exists(), "munged", folder)
        wait_for(lambda: "idle" in run(["sinfo", "-h", "-o", "%T"], environ), "an idle node", folder)
        yield environ
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def run(command: list[str], environ: dict[str, str]) -> str:
    """What a command of Slurm prints; empty when it fails."""
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout


def wait_for(is_there, what: str, folder: Path, timeout_s: float = START_S) -> None:
    """Waits; on time-out raises with the ends of all logs in `folder`."""
    deadline = time.monotonic() + timeout_s
    while not is_there():
        if time.monotonic() > deadline:
            logs = [
                f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in folder.glob("*.[lo][ou][gt]")
            ]
            raise TimeoutError(f"{what} did not come within {timeout_s:.0f} s\n" + "\n".join(logs))
        time.sleep(0.5)
