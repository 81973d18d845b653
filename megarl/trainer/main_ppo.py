"""`python -m megarl.trainer.main_ppo key=value ...`: the command line of verl's main_ppo; it is `megarl train`.

What the names mean here is in docs/verl.md. Two things are verl's own: the defaults of `config/verl_names.py`, and
Hydra's `--config-path` and `--config-name`, which may say what is verl's default or its Megatron variant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megarl.cli import run_train
from megarl.config.verl_names import DEFAULTS

MODULE = "megarl.trainer.main_ppo"


def read_words(words: Sequence[str]) -> list[str]:
    """The words of `megarl train`: Hydra's options become `hydra.config_path=...`, judged like any other name."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", allow_abbrev=False, add_help=False)
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    options, rest = parser.parse_known_args(list(words))
    return rest + [f"hydra.{name}={value}" for name, value in vars(options).items() if value is not None]


if __name__ == "__main__":
    sys.exit(run_train(read_words(sys.argv[1:]), DEFAULTS, MODULE))
