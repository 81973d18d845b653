"""The CUDA sources compile for sm_80 and sm_90 without a spilled register. To compile is not to run: see tests/gpu.

Where there is no nvcc there is nothing to compile with and no CUDA build either, so no test is collected.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch.utils.cpp_extension

from setup import NVCC_FLAGS

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc")
ARCHITECTURES = ("80", "90")


def compile_source(source: Path, out: Path) -> str:
    """What ptxas says of every kernel."""
    command = [str(NVCC), "-c", str(source), "-o", str(out), *NVCC_FLAGS, "-Xptxas", "-v"]
    command += [f"-I{path}" for path in torch.utils.cpp_extension.include_paths()]
    command += [f"-gencode=arch=compute_{each},code=sm_{each}" for each in ARCHITECTURES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


if NVCC is not None:

    @pytest.mark.slow
    @pytest.mark.parametrize("source", sorted((ROOT / "csrc/cuda").glob("*.cu")), ids=lambda path: path.name)
    def test_kernels_compile_without_spills(source: Path, tmp_path: Path) -> None:
        log = compile_source(source, tmp_path / "kernels.o")
        kernels = re.findall(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", log)
        assert {architecture for _, architecture in kernels} == set(ARCHITECTURES)
        spills = [int(each) for each in re.findall(r"(\d+) bytes spill stores", log)]
        assert len(spills) >= len(kernels)
        assert max(spills) == 0, log
