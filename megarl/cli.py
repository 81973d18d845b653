"""The command line: `megarl train`, `convert`, `launch`, `check parity`, `plan-reshard`, `data inspect`.

`megarl train` checks the configuration, then joins the ranks that torchrun or srun started, or starts
`trainer.n_gpus_per_node` local ranks of itself when nobody did.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.config.hub import load_run
from megarl.config.load import ConfigError
from megarl.config.schema import Config
from megarl.config.validate import find_problems
from megarl.launch.ending import Ending, forget_ending, write_ending
from megarl.launch.failure import INTERRUPTED_EXIT, LAUNCHER_PID, USER_MISTAKE_EXIT, run_rank
from megarl.launch.join import join_world
from megarl.launch.local import TRAINER, World, launch_local, resolve_world
from megarl.launch.peers import PeerWatch
from megarl.launch.stop import StopRequest
from megarl.obs.log import quiet_environment


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of the console script `megarl`."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="megarl", description="Reinforcement-learning post-training on Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="train a policy", add_help=False)
    data = commands.add_parser("data", help="look at data").add_subparsers(dest="data_command", required=True)
    inspect = data.add_parser("inspect", help="show one row as the model will see it")
    inspect.add_argument("file", help="parquet, jsonl, json, csv, or a folder of a saved data set")
    inspect.add_argument("--row", type=int, default=0)
    inspect.add_argument("--model", help="a Hugging Face folder: its tokenizer and chat template are used")
    inspect.add_argument("--prompt-key", default="prompt")
    inspect.add_argument("--chat-template", help="a Jinja template, or a file with one")
    inspect.add_argument("--raw-prompt", action="store_true", help="encode plain strings as they are")
    checks = commands.add_parser("check", help="prove that a grid computes what one rank does")
    checks.add_subparsers(dest="check_command", required=True).add_parser("parity", add_help=False)
    commands.add_parser("plan-reshard", help="the weight transfer of a run, on paper", add_help=False)
    commands.add_parser("convert", help="models between Hugging Face's form and Megatron's", add_help=False)
    commands.add_parser("launch", help="write and submit a Slurm job", add_help=False)
    if words[:1] == ["train"]:
        return run_train(words[1:])
    if words[:2] == ["check", "parity"]:
        return run_check_parity(words[2:])
    if words[:1] == ["plan-reshard"]:
        return run_reshard_table(words[1:])
    if words[:1] == ["convert"]:
        return run_convert_words(words[1:])
    if words[:1] == ["launch"]:
        return run_launch_words(words[1:])
    options = parser.parse_args(words)
    from megarl.rollout.show_row import run_inspect

    def inspect_row() -> int:
        run_inspect(
            options.file, options.row, options.model, options.prompt_key, options.chat_template, options.raw_prompt
        )
        return 0

    return tell_mistakes(inspect_row)


def tell_mistakes(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; a ValueError is the user's mistake, told without a traceback."""
    try:
        return command()
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return USER_MISTAKE_EXIT


def run_reshard_table(words: Sequence[str]) -> int:
    """`megarl plan-reshard ...`; returns the exit code."""
    quiet_environment()
    from rich.console import Console

    from megarl.reshard_table import add_arguments, run_plan_reshard

    parser = argparse.ArgumentParser(
        prog="megarl plan-reshard", description="What every rank keeps, receives and sends in a weight transfer."
    )
    add_arguments(parser)
    options, console = parser.parse_args(list(words)), Console(width=None if sys.stdout.isatty() else 180)
    return tell_mistakes(lambda: run_plan_reshard(options, console))


def run_check_parity(words: Sequence[str]) -> int:
    """`megarl check parity [--config FILE] [--tolerance X] [key=value ...]`; returns the exit code."""
    from megarl.parity import main as run_as_rank
    from megarl.parity import parse_words

    options = parse_words(words)
    quiet_environment()
    try:
        config, not_found = load_run(options.config, options.overrides)
        world = resolve_world(None, None, os.environ)
        world_size = config.trainer.n_gpus_per_node * config.trainer.nnodes if world is None else world.world_size
        problems = find_problems(config, world_size, not_found=not_found)
        if problems:
            raise ConfigError(problems)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return USER_MISTAKE_EXIT
    if world is None:
        return launch_local(config.trainer.n_gpus_per_node, words, "megarl.parity")
    run_rank(lambda: run_as_rank(words))
    return 0


def run_convert_words(words: Sequence[str]) -> int:
    """`megarl convert ...`; returns the exit code."""
    quiet_environment()
    parser = argparse.ArgumentParser(
        prog="megarl convert", description="Models between Hugging Face's form and Megatron's."
    )
    from rich.console import Console

    from megarl.convert import add_arguments, run_convert

    add_arguments(parser)
    options = parser.parse_args(list(words))
    try:
        return tell_mistakes(lambda: run_convert(options, Console()))
    except (KeyboardInterrupt, OSError) as error:
        why = str(error) or "interrupted"
        sys.stderr.write(f"{why}: files that are done are kept, the same command goes on with them\n")
        return INTERRUPTED_EXIT if isinstance(error, KeyboardInterrupt) else 1


def run_launch_words(words: Sequence[str]) -> int:
    """`megarl launch ...`; returns the exit code."""
    from rich.console import Console

    from megarl.launch.command import add_arguments, run_launch

    parser = argparse.ArgumentParser(prog="megarl launch", description="Runs on a cluster.")
    add_arguments(parser)
    options = parser.parse_args(list(words))
    return tell_mistakes(lambda: run_launch(options, Console()))


def run_train(words: Sequence[str], defaults: Mapping[str, Any] | None = None, module: str = TRAINER) -> int:
    """`megarl train [--config FILE] [--dry-run] [key=value ...]`; returns the exit code.

    Args:
        words: of the command line.
        defaults: by our keys, where the command starts from others than those of the schema.
        module: what local ranks are started as, with the same words.
    """
    parser = argparse.ArgumentParser(prog="megarl train", description="Train a policy on rewards, or on preferences.")
    parser.add_argument("--config", help="a YAML file; its values go over the defaults")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan; load no model")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="go over the file's values")
    options = parser.parse_args(list(words))
    quiet_environment()
    if LAUNCHER_PID in os.environ or os.environ.get("RANK", "0") != "0":
        logging.getLogger("megarl.config").setLevel(
            logging.ERROR
        )  # one process has said it, of all that read the words
    try:
        config, not_found = load_run(options.config, options.overrides, defaults or {})
        world = resolve_world(*_written_sizes(config, options.overrides), os.environ)
        world_size = config.trainer.n_gpus_per_node * config.trainer.nnodes if world is None else world.world_size
        problems = find_problems(config, world_size, not_found=not_found)
        if problems:
            raise ConfigError(problems)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{error}\n")
        return USER_MISTAKE_EXIT
    if options.dry_run:
        from rich.console import Console

        from megarl.plan import print_plan

        if world is None or world.rank == 0:
            print_plan(config, world_size, Console())
        return 0
    if world is None:
        return launch_local(config.trainer.n_gpus_per_node, words, module)
    peers = PeerWatch()
    run_rank(lambda: _run_as_rank(config, world, peers), peers.describe)
    return 0


def _written_sizes(config: Config, overrides: Sequence[str]) -> tuple[int | None, int | None]:
    """`trainer.nnodes` and `trainer.n_gpus_per_node` where the user wrote them on the command line.

    A file is often shared between launches of different sizes: there, a launcher's sizes win.
    """
    written = {word.partition("=")[0].lstrip("+") for word in overrides}
    nnodes = config.trainer.nnodes if "trainer.nnodes" in written else None
    per_node = config.trainer.n_gpus_per_node if "trainer.n_gpus_per_node" in written else None
    return nnodes, per_node


def train_on_rewards(config: Config, stop: StopRequest) -> Ending:
    """Trains a policy on rewards, from its checkpoint on if there is one. A collective of the world."""
    from megarl.keeper import open_run
    from megarl.train import train

    job, report, keeper = open_run(config, stop)
    train(job, report, keeper)
    return keeper.ending


def train_on_preferences(config: Config, stop: StopRequest) -> Ending:
    """Trains a policy or a reward model on preferences, from its checkpoint on if there is one. A collective of the
    world."""
    from megarl.train_preference import open_preference_run, train_preference

    job, report, keeper = open_preference_run(config, stop)
    train_preference(job, report, keeper)
    return keeper.ending


def _run_as_rank(config: Config, world: World, peers: PeerWatch) -> None:
    """Joins the process group, trains, and leaves it."""
    stop = StopRequest(config.trainer.max_wall_time_s)
    stop.install()
    join_world(world, config.trainer.timeout_s, peers)
    import torch.distributed as dist

    assert config.trainer.default_local_dir is not None, "resolve_config sets it"
    run_dir = Path(config.trainer.default_local_dir)
    if world.rank == 0:
        forget_ending(run_dir)
    ending = (train_on_rewards if config.preference is None else train_on_preferences)(config, stop)
    stop.close()
    if world.rank == 0:
        write_ending(run_dir, ending)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # engines and communicators have threads of their own that may hang while they are torn down
    os._exit(ending.code)
