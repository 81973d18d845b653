"""Hugging Face folders: read exactly the slices that a rank holds, and write whole tensors back.

Reading goes slice by slice through safetensors, so a rank never holds more than one tensor beside its own shard.
Tensor names are matched after taking off the folder's own prefix (`model.` in most, `language_model.model.` or none
in others). Pickled files are read only when the user allows it (`pickled.py`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.models.layout import VALUE_HEAD, Family, ModelSpec, ParamLayout, hf_shapes
from megarl.weights.pickled import PickledFile
from megarl.weights.source import TensorSource

IGNORED = ("rotary_emb.inv_freq", "attention.bias", "masked_bias")  # buffers that old exports carry along
SHARD_BYTES = 4 << 30
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
COMPANIONS = (
    "config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.json merges.txt chat_template.jinja"
).split()


_CHAT_OPENS = "{% set chat %}"
_CHAT_CLOSES = "{% endset %}{{ chat if add_generation_prompt else chat.rstrip() }}"


class HFFolder:
    """The tensors of one Hugging Face folder, by the names of the family (prefix taken off); opened lazily.

    Args:
        allow_pickle: read `pytorch_model.bin` where there are no safetensors.

    Raises:
        ValueError: no safetensors, an index that names missing files, or a file that safetensors cannot read.
    """

    def __init__(self, folder: str | Path, family: Family, allow_pickle: bool = False) -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self._allow_pickle = allow_pickle
        files = self._list_tensors()
        tail = family.embedding.rpartition("embed_tokens.weight")[0]
        found = [name for name in files if name.endswith("embed_tokens.weight")]
        if len(found) != 1:
            raise ValueError(f"{folder}: expected one tensor named ...embed_tokens.weight, found {found}")
        prefix = found[0].removesuffix("embed_tokens.weight")
        self.files: dict[str, tuple[str, str]] = {}  # name -> (file, name in the file)
        for name, file in files.items():
            if name.endswith(IGNORED):
                continue
            if name == family.head or name.endswith("." + family.head):
                plain = family.head
            elif name.endswith(VALUE_HEAD):
                plain = VALUE_HEAD
            elif name.startswith(prefix):
                plain = tail + name.removeprefix(prefix)
            else:
                plain = name
            self.files[plain] = (file, name)

    def _list_tensors(self) -> dict[str, str]:
        for single in (SAFETENSORS, PICKLED) if self._allow_pickle else (SAFETENSORS,):
            index = self.folder / f"{single}.index.json"
            if index.is_file():
                try:
                    return dict(json.loads(index.read_text())["weight_map"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{index} is not an index of tensors: {error!r}") from error
            if (self.folder / single).is_file():
                return dict.fromkeys(self._file(single).keys(), single)
        is_pickled = any(self.folder.glob(f"{PICKLED.removesuffix('.bin')}*.bin*"))
        hint = "; it holds pickled weights, which `megarl convert` reads with --allow-pickle" if is_pickled else ""
        raise ValueError(
            f"{self.folder} holds neither {SAFETENSORS} nor {SAFETENSORS}.index.json; megarl reads safetensors only: "
            f"save the model with transformers' save_pretrained{hint}"
        )

    def _file(self, name: str) -> Any:
        if name not in self._open:
            if name.endswith(".bin") and self._allow_pickle:
                self._open[name] = PickledFile(self.folder / name)
                return self._open[name]
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.folder / name} cannot be read: {error}") from error
        return self._open[name]

    def _slice(self, name: str) -> Any:
        file, stored = self.files[name]
        try:
            return self._file(file).get_slice(stored)
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{self.folder / file} does not hold {stored}, which the index says it does") from error

    @property
    def names(self) -> Set[str]:
        """The tensors that are there."""
        return self.files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """dtype of a tensor, from the file's header. Raises ValueError for one that is no plain float."""
        stored = self._slice(name).get_dtype()
        if stored not in DTYPES:
            raise ValueError(f"{self.folder}: {name} is stored as {stored}; megarl reads {', '.join(DTYPES)}")
        return DTYPES[stored]

    def read(self, name: str, axis: int, start: int, length: int) -> Tensor:
        """`length` rows (axis 0) or columns (axis 1) of a tensor from `start` on."""
        part = self._slice(name)
        return part[start : start + length] if axis == 0 else part[:, start : start + length]


def check_folder(
    source: TensorSource, family: Family, spec: ModelSpec, head: str, needs_value_head: bool = False
) -> None:
    """Raises one ValueError that lists every tensor that is missing, of another shape, or unknown.

    A critic (`head="value"`) needs no head on disk: its value head starts fresh, and a policy's output layer is left.
    A model whose scores are used as they are has `needs_value_head`: a fresh one would give every answer the same.
    """
    wanted = hf_shapes(family, spec, "policy")
    problems: list[str] = []
    optional = {family.head} if head == "value" or spec.is_tied else set()
    for name, shape in wanted.items():
        if name not in source.names:
            if name not in optional:
                problems.append(f"missing tensor {name} {list(shape)}")
        elif source.shape(name) != shape:
            problems.append(f"tensor {name} has shape {list(source.shape(name))}, config.json says {list(shape)}")
    if VALUE_HEAD in source.names and source.shape(VALUE_HEAD) != (1, spec.hidden_size):
        problems.append(f"tensor {VALUE_HEAD} has shape {list(source.shape(VALUE_HEAD))}, a head of one number has "
                        f"{[1, spec.hidden_size]}")  # fmt: skip
    elif needs_value_head and VALUE_HEAD not in source.names:
        problems.append(f"missing tensor {VALUE_HEAD} {[1, spec.hidden_size]}: this model was not trained to score")
    known = {*wanted, family.head, VALUE_HEAD}
    problems += [f"unknown tensor {name}" for name in sorted(set(source.names) - known)]
    if problems:
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(f"{source.folder} does not hold this model:\n  " + "\n  ".join(problems[:20]) + more)


def load_shard(source: TensorSource, layouts: Iterable[ParamLayout], weights: Mapping[str, Tensor]) -> list[str]:
    """Fills one rank's parameters, in place, padding with zeros; a value head that the folder lacks is left as it is.

    Args:
        source: a folder that `check_folder` accepted.
        layouts: what this rank holds.
        weights: parameter by layout name; dtypes may differ from the file's.

    Returns:
        The names of parameters the folder has nothing for (only ever the value head).

    Raises:
        AssertionError: the layouts and the parameters do not name the same things in the same shapes.
    """
    fresh: list[str] = []
    layouts = list(layouts)
    names = {layout.name for layout in layouts}
    assert names == set(weights), f"layout and model differ: {sorted(names ^ set(weights))}"
    for layout in layouts:
        local = weights[layout.name]
        assert tuple(local.shape) == layout.shape, f"{layout.name}: {tuple(local.shape)} against {layout.shape}"
        if any(piece.hf_name == VALUE_HEAD and VALUE_HEAD not in source.names for piece in layout.slices):
            fresh.append(layout.name)
            continue
        if sum(piece.length for piece in layout.slices) < layout.shape[0] and layout.name.endswith("weight"):
            local.zero_()
        for piece in layout.slices:
            values = source.read(piece.hf_name, piece.axis, piece.hf_start, piece.length)
            local.narrow(piece.axis, piece.start, piece.length).copy_(values)
    return fresh


def save_hf_folder(
    tensors: Iterable[tuple[str, Tensor]], out: str | Path, config_from: str | Path, dtype: torch.dtype
) -> None:
    """Writes whole tensors as a Hugging Face folder: beside first, then renamed over.

    Args:
        tensors: name and whole tensor, in the order they are to lie; consumed one by one.
        out: the folder to make; one that exists is replaced when complete.
        config_from: the folder that configuration and tokenizer are copied from.
        dtype: dtype on disk, also written into config.json.
    """
    out = Path(out)
    beside = out.with_name(f".{out.name}.writing-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        if held:
            save_file(held, beside / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
            shards.append(list(held))
            held.clear()

    for name, tensor in tensors:
        held[name] = tensor.detach().to("cpu", dtype).contiguous()
        total += held[name].nbytes
        if sum(value.nbytes for value in held.values()) >= SHARD_BYTES:
            flush()
    flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (beside / f"shard-{number}.safetensors").rename(beside / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (beside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for companion in COMPANIONS:
        if (Path(config_from) / companion).is_file():
            shutil.copy2(Path(config_from) / companion, beside / companion)
    config = json.loads((beside / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if VALUE_HEAD in weight_map:
        config |= _describe_score_head(config)
        _end_chats_with_their_answer(beside)
    (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    replaced = out.with_name(f".{out.name}.old-{os.getpid()}")
    if out.exists():
        out.rename(replaced)
    beside.rename(out)
    shutil.rmtree(replaced, ignore_errors=True)


def _describe_score_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of a model with a head of one number, for programs that choose the model class by it."""
    names = config.get("architectures") or []
    return {
        "architectures": [name.replace("ForCausalLM", "ForSequenceClassification") for name in names],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def _end_chats_with_their_answer(folder: Path) -> None:
    """Takes off what the folder's chat template writes behind a last answer, such as a line feed.

    A score is read at the last token. The head was trained on answers as the policy samples them, which end with the
    end-of-turn token, so that is where a chat that the template writes must end too.
    """
    file, config_file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        file.write_text(_strip_end(file.read_text()))
    if config_file.is_file():
        config = json.loads(config_file.read_text())
        if isinstance(config.get("chat_template"), str):
            config["chat_template"] = _strip_end(config["chat_template"])
            config_file.write_text(json.dumps(config, indent=2) + "\n")


def _strip_end(template: str) -> str:
    if template.startswith(_CHAT_OPENS):
        return template
    return f"{_CHAT_OPENS}{template}{_CHAT_CLOSES}"
