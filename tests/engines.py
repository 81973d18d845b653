"""Weights into a live engine without a trainer: whole Hugging Face tensors take the way that shards take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.registry import read_model_spec
from megarl.weights.blocks import list_engine_shards, list_hf_shards
from megarl.weights.plan import plan_reshard
from megarl.weights.reshard import build_resharder
from megarl.weights.sync import check_live, zero_padding_


def write_folder(
    engine: Any, folder: str, tensors: Mapping[str, Tensor], version: int, tp_rank: int = 0, tp_size: int = 1
) -> None:
    """Writes and publishes whole tensors under their Hugging Face names; no communication.

    Args:
        engine: a vLLM engine, this rank its `tp_rank` of `tp_size`.
        folder: with the model's config.json.
    """
    family, spec = read_model_spec(folder)
    shards = list_engine_shards(family, spec, [list(range(tp_size))])[tp_rank]
    plan = plan_reshard({0: list_hf_shards(family, spec)}, {0: shards}, 1)
    live = engine.open_weights()
    check_live(shards, live)
    zero_padding_(shards, live)
    dtype = live["model.embed_tokens.weight"].dtype
    assert dist.group.WORLD is not None
    resharder = build_resharder(plan, 0, dist.group.WORLD, torch.float32, dtype)
    resharder.run({name: tensor.contiguous() for name, tensor in tensors.items()}, live)
    engine.publish_weights(version)
