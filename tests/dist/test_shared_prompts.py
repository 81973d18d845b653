"""Answers to one prompt share its tokens: fewer tokens computed, the same log-probs and the same gradients."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megarl import device
from megarl.models.build import BuildOptions
from megarl.models.forward import compute_logprobs, run_stage
from megarl.models.micro_batch import build_micro_batch, plan_replicas
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.topology import plan_topology
from megarl.records import PackedBatch
from megarl.trainer.optim import AdamOptions, LRSchedule, reduce_gradients
from megarl.trainer.roles import build_role
from tests.ranks import run_ranks
from tests.tiny import build_batch, save_hf_model


def grouped_batch() -> PackedBatch:
    """Two prompts of 9 and 5 tokens with four answers each, one of them empty."""
    batch = build_batch([9] * 4 + [5] * 4, [3, 8, 0, 1, 6, 2, 2, 7])
    tokens, bounds = batch.tokens.clone(), batch.cu_seqlens.tolist()
    for row in range(8):
        first, length = (0, 9) if row < 4 else (bounds[4], 5)
        tokens[bounds[row] : bounds[row] + length] = batch.tokens[first : first + length]
    return dataclasses.replace(batch, tokens=tokens, group=torch.tensor([0] * 4 + [1] * 4))


def compute(rank: int, world_size: int, path: str, tp: int) -> list[tuple[int, Tensor, dict[str, Tensor]]]:
    """Shared, then not: packed tokens, [T] log-probs, gradients of a weighted sum of log-probs."""
    groups = build_groups(plan_topology("actor", world_size, tp), GroupCache(60))
    learns = AdamOptions(0.0, (0.9, 0.99), 1e-8, 1.0), LRSchedule(0.0, 0.0, 0, "constant", 1)
    role = build_role("actor", groups, path, BuildOptions(torch.float32), max_tokens=999, learns=learns)
    assert role is not None and role.training is not None
    batch = grouped_batch()
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    results = []
    for group in (batch.group, torch.arange(8)):
        micro = build_micro_batch(dataclasses.replace(batch, group=group), [5, 0, 1, 2, 4, 3, 6, 7], tp)
        role.training.model.zero_grad_buffer()
        with device.megatron_scope():
            hidden = run_stage(role.training.model, micro, None)
            logprobs, _ = compute_logprobs(role.model, hidden, micro, role.groups, 1.0, role.num_ids)
            (logprobs * weights[micro.token_index]).sum().backward()
        scores = torch.zeros(batch.num_tokens).index_put((micro.token_index,), logprobs.detach())
        reduce_gradients(role.training.chunks, role.groups)
        grads = {name: vars(parameter)["main_grad"].clone() for name, parameter in role.model.named_parameters()}
        results.append((micro.num_tokens, scores, grads))
    return results


def test_sharing_changes_the_number_of_tokens_and_nothing_else(tmp_path) -> None:
    path = save_hf_model(tmp_path / "model", "qwen3")
    for tp in (1, 2):
        for shared, alone in run_ranks(compute, tp, path, tp):
            assert shared[0] - alone[0] in (-3 * 9 - 3 * 5, -3 * 9 - 3 * 5 + 1)  # one filler token at tp 2
            torch.testing.assert_close(shared[1], alone[1], rtol=1e-5, atol=1e-5)
            for name, expected in alone[2].items():
                difference = (shared[2][name] - expected).norm() / expected.norm()
                assert difference < 1e-5, f"{name} differs by {difference:.1e}"


def test_replicas_keep_answers_together_and_all_get_work() -> None:
    batch = grouped_batch()
    plans = plan_replicas(batch, range(8), 2, 4096, None)
    rows = [row for plan in plans for part in plan for row in part]
    assert sorted(rows) == list(range(8))
    assert [len(plan) for plan in plans] == [1, 1]
    assert all(plan[0] for plan in plans)
    for part in (part for plan in plan_replicas(batch, range(8), 1, 24, None) for part in plan):
        assert build_micro_batch(batch, part, 1).num_tokens <= 24
