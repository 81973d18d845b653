"""The live parameters of a vLLM model: where they are, how new values take effect, and proof of what they hold.

On a GPU vLLM's parameters stay what its loader wrote and its kernels read them: writing them is enough. On a CPU vLLM
packs the weight of every linear layer for its matrix kernels when the model is built, and empties the parameter; the
head even goes on using its hidden packed copy. Here the parameters stay visible beside the packed copies
(`visible_weights`, active while the model is built), and the copies are made anew after every write (`pack_`).

Why pack at all: SmolLM2-135M, 48 sequences in flight, one AMX core, tokens/s packed against plain `linear` on the
visible weights: bf16 418 against 326, fp32 166 against 154. Packing all of it takes 0.2 s (bf16) to 0.4 s (fp32); the
price is the weights twice in memory.

    with visible_weights():
        llm = LLM(...)                  # builds the model
    parameters = live_parameters(model) # written in place, any number of times
    pack_(model)                        # what was written takes effect
    compute_checksums(model)            # what the model holds now, by Hugging Face name
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.weights.checksum import add_checksums, compute_checksum


@dataclass(frozen=True)
class LiveSlice:
    """A part of one Hugging Face tensor, where it lives in a vLLM model.

    `tensor`: a view of the live parameter, [rows, columns] or [rows]; it holds the rows from `row_start` and the
    columns from `column_start` of the whole tensor.
    """

    hf_name: str
    tensor: Tensor
    row_start: int = 0
    column_start: int = 0


@contextlib.contextmanager
def visible_weights() -> Iterator[None]:
    """While active, linear layers that vLLM builds for the CPU keep their weights visible beside the packed copy."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = pack


def check_loadable(model: nn.Module) -> None:
    """Raises ValueError when weights cannot be loaded into this model a second time (see `visible_weights`)."""
    lost = [name for name, parameter in model.named_parameters() if parameter.numel() == 0]
    if lost:
        raise ValueError(
            f"vLLM's {type(model).__name__} packed {len(lost)} weights away on this device (first: {lost[0]}), so they "
            f"cannot be updated; on a CPU only dense unquantized models are supported as rollout.name=vllm, "
            f"use rollout.name=naive or a GPU"
        )


def live_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of the model by vLLM's name, sharing its storage; a tied head is not listed beside the embedding.

    Raises:
        AssertionError: a parameter that is not contiguous, which cannot be written as a flat tensor.
    """
    live = {name: parameter.data for name, parameter in model.named_parameters()}
    scattered = [name for name, tensor in live.items() if not tensor.is_contiguous()]
    assert not scattered, f"vLLM's parameters {scattered[:3]} are not contiguous"
    return live


def share_parameters_(model: nn.Module, trained: Mapping[str, Tensor]) -> int:
    """Makes parameters of the model the storage of the trainer's; their own is freed.

    Args:
        trained: by vLLM's name, contiguous, of the same dtype and at least as many elements; what is more is the
            trainer's padding at the end.

    Returns:
        Bytes freed.
    """
    freed = 0
    for name, tensor in trained.items():
        parameter = model.get_parameter(name)
        assert parameter.dtype == tensor.dtype and tensor.is_contiguous(), f"{name}: {tensor.dtype}, {tensor.stride()}"
        freed += parameter.nbytes
        parameter.data = tensor.detach().view(-1)[: parameter.numel()].view(parameter.shape)
    return freed


def pack_(model: nn.Module) -> None:
    """Renews the packed copies on a CPU from the visible weights; nothing to do on a GPU."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    head = getattr(model, "lm_head", None)
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "cpu_linear")]
    for module in modules:
        if isinstance(module, VocabParallelEmbedding) and module is not head:
            vars(module)["cpu_linear"] = (
                nn.functional.linear
            )  # only looked up, never multiplied: frees vLLM's packed copy
        else:
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def model_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's weights: that of the embedding, the first (on a CPU some biases are kept in fp32)."""
    return next(model.parameters()).dtype


def live_slices(model: nn.Module) -> Iterator[LiveSlice]:
    """Every part of every Hugging Face tensor that this rank holds, as a view of the live parameter.

    Rows that vLLM added to the vocabulary are left out. A tied head is not listed beside the embedding.
    """
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            parent, _, leaf = prefix.rpartition(".")
            names = [".".join(filter(None, (parent, part, kind))) for part in fused.get(leaf, [leaf])]
            yield from _slices_of(module, kind, parameter.data, names)


def _slices_of(module: nn.Module, kind: str, tensor: Tensor, names: list[str]) -> Iterator[LiveSlice]:
    """The slices of one parameter; `names` are the Hugging Face tensors fused in it, in order."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, linear.QKVParallelLinear):
        query = module.num_heads * module.head_size
        key, value = module.num_kv_heads * module.head_size, module.num_kv_heads * module.v_head_size
        kv_rank = module.tp_rank // module.num_kv_head_replicas
        starts = (module.tp_rank * query, kv_rank * key, kv_rank * value)
        parts = zip(names, tensor.split([query, key, value]), starts, strict=True)
        yield from (LiveSlice(name, part, row_start=start) for name, part, start in parts)
    elif isinstance(module, linear.ColumnParallelLinear):
        sizes = [size // module.tp_size for size in getattr(module, "output_sizes", [module.output_size])]
        parts = zip(names, tensor.split(sizes), sizes, strict=True)
        yield from (LiveSlice(name, part, row_start=module.tp_rank * size) for name, part, size in parts)
    elif isinstance(module, VocabParallelEmbedding):
        rows = module.shard_indices
        yield LiveSlice(names[0], tensor[: rows.num_org_elements], row_start=rows.org_vocab_start_index)
    elif isinstance(module, linear.RowParallelLinear) and kind == "weight":
        yield LiveSlice(names[0], tensor, column_start=module.tp_rank * module.input_size_per_partition)
    else:
        assert len(names) == 1, f"{type(module).__name__}.{kind} holds {names} in an order unknown here"
        yield LiveSlice(names[0], tensor)


def compute_checksums(model: nn.Module, tp_group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """The checksum of every Hugging Face tensor as the engine holds it, over all its ranks.

    Args:
        model: vLLM's model of this rank.
        tp_group: the engine's ranks (host tensors); None for an engine of one rank. Collective.

    Returns:
        Hugging Face name -> checksum of the whole tensor in the engine's dtype.

    Raises:
        AssertionError: ranks that hold the same part (norms, key/value heads) disagree.
    """
    dtype = model_dtype(model)
    mine = {
        (part.hf_name, part.row_start, part.column_start): compute_checksum(
            part.tensor.to(dtype), part.row_start, part.column_start
        )
        for part in live_slices(model)
    }
    everyone: list[dict[tuple[str, int, int], int]] = [mine]
    if tp_group is not None and tp_group.size() > 1:
        everyone = [{} for _ in range(tp_group.size())]
        dist.all_gather_object(everyone, mine, group=tp_group)
    merged: dict[tuple[str, int, int], int] = {}
    for rank, parts in enumerate(everyone):
        for where, checksum in parts.items():
            assert merged.setdefault(where, checksum) == checksum, (
                f"tp rank {rank} of the engine holds other values of {where[0]} (from row {where[1]}, column "
                f"{where[2]}) than a rank before it"
            )
    by_name: dict[str, list[int]] = defaultdict(list)
    for (name, _, _), checksum in merged.items():
        by_name[name].append(checksum)
    return {name: add_checksums(parts) for name, parts in by_name.items()}
