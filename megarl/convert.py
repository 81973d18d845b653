"""`megarl convert`: models between Hugging Face's form and Megatron's, and a check that two folders hold the same.

    megarl convert hf-to-megatron --hf DIR --out CKPT --tp 2 --pp 4
    megarl convert megatron-to-hf --ckpt CKPT --out DIR [--dtype bf16]
    megarl convert check A B [--text "..."]

One process on a CPU does it for any number of ranks: tensors are read by slices, written one by one, and never cast
unless `--dtype` asks for it. Everything that can be wrong with the input is found before the first byte is written.
A Megatron folder made here also holds config.json and the tokenizer, so it can be trained from as it is
(`actor.model_path=CKPT`) and converted back. CKPT may also be a checkpoint of a run, or the run's folder: then the
newest complete one, and `--role` says which model of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarl.config.load import load_config, resolve_config
from megarl.models.layout import VALUE_HEAD, Family, HeadKind, ModelSpec, hf_shapes
from megarl.models.registry import read_model_spec
from megarl.rollout.tokenizer import check_tokenizer_fits, count_token_ids, load_tokenizer
from megarl.trainer import checkpoint_files
from megarl.weights.hf import COMPANIONS, HFFolder, check_folder
from megarl.weights.hf_stream import TensorEntry, plan_files, write_files
from megarl.weights.megatron_folder import MegatronFolder, find_prefixes
from megarl.weights.megatron_write import Grid, list_rank_layouts, pick_dtypes, write_checkpoint
from megarl.weights.partial import build_folder, describe_files, write_atomically
from megarl.weights.source import read_whole
from megarl.weights.torch_dist import is_checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.distcp", ".metadata")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands of `megarl convert`."""
    commands = parser.add_subparsers(dest="direction", required=True, metavar="COMMAND")
    there = commands.add_parser("hf-to-megatron", help="a Hugging Face folder into a Megatron checkpoint")
    there.add_argument("--hf", type=Path, required=True, metavar="DIR", help="the Hugging Face folder")
    there.add_argument("--out", type=Path, required=True, metavar="CKPT", help="the folder to make")
    there.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks that the files are cut for")
    there.add_argument("--pp", type=int, default=1, help="pipeline stages")
    there.add_argument("--ep", type=int, default=1, help="expert-parallel ranks (mixture-of-experts models)")
    there.add_argument("--head", choices=("auto", "policy", "value"), default="auto")
    there.add_argument("--dtype", choices=("bf16", "fp32"), help="default: as stored")
    there.add_argument("--allow-pickle", action="store_true", help="read pytorch_model.bin where there is nothing else")
    back = commands.add_parser("megatron-to-hf", help="a Megatron checkpoint into a Hugging Face folder")
    back.add_argument("--ckpt", type=Path, required=True, metavar="CKPT", help="the Megatron checkpoint")
    back.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make")
    back.add_argument("--hf", type=Path, metavar="DIR", help="config.json and tokenizer; default: those in CKPT")
    back.add_argument("--dtype", choices=tuple(DTYPES), help="default: as stored")
    back.add_argument("--role", help="which model of a run's checkpoint; default: actor")
    back.add_argument("--shard-gib", type=float, default=5.0, help="size of a file, at most (or one tensor)")
    check = commands.add_parser("check", help="compare the weights of two folders of either form")
    check.add_argument("first", type=Path, metavar="A")
    check.add_argument("second", type=Path, metavar="B")
    check.add_argument("--role", help="which model of a run's checkpoint; default: actor")
    check.add_argument("--text", help="also compare the logits of this text, each folder computed in its own form")
    check.add_argument("--atol", type=float, default=0.0, help="differences up to this count as equal")
    check.add_argument("--allow-pickle", action="store_true")


def run_convert(options: argparse.Namespace, console: Console) -> int:
    """Runs one sub-command; returns the exit code (1: `check` found a difference).

    Raises:
        ValueError: bad input; nothing is left of what was to be written.
    """
    if options.direction == "hf-to-megatron":
        convert_to_megatron(options, console)
        return 0
    if options.direction == "megatron-to-hf":
        convert_to_hf(options, console)
        return 0
    from megarl.convert_check import run_check

    return run_check(options, console)


def convert_to_megatron(options: argparse.Namespace, console: Console) -> None:
    """`hf-to-megatron`. Raises ValueError for everything that is wrong with the folder or does not fit the grid."""
    grid = Grid(options.tp, options.pp, options.ep)
    for name, size in (("tp", grid.tp_size), ("pp", grid.pp_size), ("ep", grid.ep_size)):
        if size < 1:
            raise ValueError(f"--{name} {size} must be 1 or more")
    family, spec = read_model_spec(options.hf, is_computed=False)
    source = HFFolder(options.hf, family, options.allow_pickle)
    head: HeadKind = pick_head(options.head, VALUE_HEAD in source.names)
    check_folder(source, family, spec, head)
    check_tokenizer(options.hf, spec.vocab_size)
    dtype = DTYPES[options.dtype] if options.dtype else None
    dtypes = pick_dtypes(source, family, spec, head, dtype)
    shapes = hf_shapes(family, spec, head)
    layouts = [layout for rank in range(grid.num_ranks) for layout in list_rank_layouts(family, spec, grid, rank, head)]
    total = sum(layout.numel * dtypes[layout.stem].itemsize for layout in layouts)
    fingerprint = {
        "to": "megatron", "grid": [grid.tp_size, grid.pp_size, grid.ep_size], "head": head, "dtype": str(dtype),
        "source": [str(options.hf.resolve()), describe_files(options.hf)],
    }  # fmt: skip
    with build_folder(options.out, fingerprint) as partial, show_progress(console, options.out, total) as advance:
        copy_companions(options.hf, partial)
        write_checkpoint(source, family, spec, grid, partial, head, dtype, advance)
    console.print(
        f"{options.out}: {family.name}, {sum(math.prod(shape) for shape in shapes.values()):,} parameters, "
        f"{grid.num_ranks} ranks (tp={grid.tp_size} pp={grid.pp_size} ep={grid.ep_size})",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def convert_to_hf(options: argparse.Namespace, console: Console) -> None:
    """`megatron-to-hf`. Raises ValueError for all that is wrong with the checkpoint or does not fit the config."""
    source, family, spec, described_in = open_megatron(options.ckpt, options.role, options.hf)
    check_tokenizer(described_in, spec.vocab_size)
    dtype = DTYPES[options.dtype] if options.dtype else None
    entries = [
        TensorEntry(name, shape, dtype or source.dtype(name))
        for name, shape in hf_shapes(family, spec, source.head).items()
    ]
    files = plan_files(entries, int(options.shard_gib * 2**30))
    fingerprint = {
        "to": "hf", "dtype": str(dtype), "role": options.role, "shard_gib": options.shard_gib,
        "source": [str(source.folder.resolve()), describe_files(source.folder)],
        "config": [str(described_in.resolve()), describe_files(described_in)],
    }  # fmt: skip
    total = sum(entry.num_bytes for entry in entries)
    with build_folder(options.out, fingerprint) as partial, show_progress(console, options.out, total) as advance:
        copy_companions(described_in, partial)
        write_files(files, lambda name: read_whole(source, name), partial, advance)
        write_dtype(partial / "config.json", {entry.dtype for entry in entries})
    console.print(
        f"{options.out}: {family.name}, {len(entries)} tensors in {len(files)} files, {total / 2**30:.2f} GiB",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def pick_head(wanted: str, has_value_head: bool) -> HeadKind:
    """What the option says; `auto`: a value head where the folder holds one."""
    if wanted == "auto":
        return "value" if has_value_head else "policy"
    return "value" if wanted == "value" else "policy"


def open_megatron(
    path: Path, role: str | None = None, described_in: Path | None = None
) -> tuple[MegatronFolder, Family, ModelSpec, Path]:
    """A Megatron checkpoint, and the folder whose config.json describes its model.

    Args:
        path: a Megatron folder, a run's checkpoint, or a run.
        role: which model, where there are several.
        described_in: that folder; None = `path` itself, or what the run was started from.

    Raises:
        ValueError: no complete checkpoint there, or not of this model.
    """
    folder = find_megatron_folder(path, role or "actor")
    settings = folder.parent / "config.yaml"
    if described_in is None and not (folder / "config.json").is_file() and settings.is_file():
        config = resolve_config(load_config(str(settings)))
        model_path = config.critic.model_path if folder.name == "critic" else config.actor.model_path
        described_in = None if model_path is None else Path(model_path)
    described_in = described_in or folder
    if not (described_in / "config.json").is_file():
        raise ValueError(f"{described_in} holds no config.json; name the model's Hugging Face folder with --hf")
    family, spec = read_model_spec(described_in, is_computed=False)
    prefix = pick_prefix(folder, None if folder.name == role else role)
    return MegatronFolder(folder, family, spec, prefix), family, spec, described_in


def find_megatron_folder(path: Path, role: str) -> Path:
    """`path`, or the model `role` of the checkpoint that it is, or of its newest complete one."""
    if is_checkpoint(path):
        return path
    step: Path | None = path if (path / checkpoint_files.COMPLETE).is_file() else None
    for root in (path, path / "checkpoints"):
        step = step or checkpoint_files.find_newest(root).path
    if step is None:
        raise ValueError(
            f"{path} is no complete Megatron checkpoint (.metadata or metadata.json is missing), nor a run"
        )
    if not is_checkpoint(step / role):
        held = sorted(each.name for each in step.iterdir() if is_checkpoint(each))
        raise ValueError(f"--role {role}: {step} holds {', '.join(held) or 'no model'}")
    return step / role


def pick_prefix(folder: Path, role: str | None) -> str:
    """The prefix of the wanted model's keys. Raises ValueError where the choice is not clear."""
    prefixes = find_prefixes(folder)
    if not prefixes:
        raise ValueError(f"{folder} holds no model: no key ends with embedding.word_embeddings.weight")
    if role is None and len(prefixes) == 1:
        return prefixes[0]
    matching = [prefix for prefix in prefixes if prefix.strip(".").split(".")[0] == role]
    if len(matching) != 1:
        names = ", ".join(prefix.strip(".").split(".")[0] or "(one without a name)" for prefix in prefixes)
        raise ValueError(f"--role {role}: {folder} holds {names}; choose one of them with --role")
    return matching[0]


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Refuses a tokenizer with ids beyond the embedding table; a folder without a tokenizer is fine."""
    if any((folder / name).is_file() for name in TOKENIZERS):
        check_tokenizer_fits(count_token_ids(load_tokenizer(str(folder), "--hf")), vocab_size)


def copy_companions(folder: Path, out: Path) -> None:
    """Configuration and tokenizer."""
    for name in COMPANIONS:
        if (folder / name).is_file():
            shutil.copy2(folder / name, out / name)


def write_dtype(file: Path, dtypes: set[torch.dtype]) -> None:
    """config.json names the dtype of the tensors, where they have one."""
    if len(dtypes) == 1:
        config = json.loads(file.read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = str(next(iter(dtypes))).removeprefix("torch.")
        write_atomically(file, json.dumps(config, indent=2) + "\n")


@contextlib.contextmanager
def show_progress(console: Console, out: Path, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes written; yields the function that moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task(out.name, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)
