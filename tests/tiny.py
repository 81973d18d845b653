"""Tiny models and batches, made in code, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.records import PackedBatch

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 500,  # not a multiple of anything that matters
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 2,
}


EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
}


def build_hf_model(family: str, **changes: Any) -> Any:
    """A transformers model of `family`, one of `EXTRA`, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SHAPE, **EXTRA[family], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_(0.0, 0.1)
        else:
            parameter.data.normal_(0.0, 0.05)
    return model


def save_hf_model(path: Path, family: str, **changes: Any) -> str:
    """Writes `build_hf_model(...)` as a folder and returns its path."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    build_hf_model(family, **changes).save_pretrained(path)
    return str(path)


def save_reward_model(path: Path, family: str, **changes: Any) -> str:
    """Writes a sequence-classification model with one label, of the body of `build_hf_model(...)`; returns its path."""
    from transformers import LlamaForSequenceClassification, Qwen2ForSequenceClassification

    body = build_hf_model(family, **changes)
    kinds = {"llama": LlamaForSequenceClassification, "qwen2": Qwen2ForSequenceClassification}
    body.config.num_labels = 1
    model = kinds[family](body.config).float()
    model.model.load_state_dict(body.model.state_dict())
    model.score.weight.data.copy_(torch.linspace(-0.3, 0.3, body.config.hidden_size)[None])
    model.save_pretrained(path)
    return str(path)


def build_batch(prompts: list[int], responses: list[int], vocab_size: int = 500, seed: int = 0) -> PackedBatch:
    """Random sequences: prompt b has `prompts[b]` tokens and its answer `responses[b]`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    mask = torch.cat([torch.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)])
    total = sum(lengths)
    return PackedBatch(
        tokens=torch.randint(3, vocab_size, (total,), generator=generator),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -torch.rand(total, generator=generator), 0.0),
        group=torch.arange(len(prompts)),
        is_finished=torch.ones(len(prompts), dtype=torch.bool),
    )
