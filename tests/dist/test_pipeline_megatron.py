"""The executor against Megatron's own pipeline schedule: same losses, same gradients, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from torch import Tensor

from megarl import device
from megarl.algo.objective import value_objective
from megarl.models.build import BuildOptions
from megarl.models.forward import compute_values
from megarl.models.micro_batch import build_micro_batch
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.picker import Choice, plan_chunk_stages
from megarl.parallel.topology import Topology, plan_topology
from megarl.trainer.optim import AdamOptions, LRSchedule, reduce_gradients
from megarl.trainer.roles import Role, build_role
from megarl.trainer.update import PipelineOptions, Task, TokenWeights, compute_gradients_together, weigh_tokens
from megarl.weights.gather import gather_hf_tensors
from tests.ranks import run_ranks
from tests.tiny import build_batch, save_hf_model

pytestmark = pytest.mark.timeout(600)

BATCH = build_batch([4] * 5, [8] * 5)  # equal lengths: Megatron's schedule wants equal shapes
LEARNS = AdamOptions(0.0, (0.9, 0.99), 1e-8, 1.0), LRSchedule(1e-3, 0.0, 0, "constant", 1)
CHOICES: tuple[Choice, ...] = ("1f1b", "zero_bubble", "interleaved")


def open_critic(world_size: int, path: str, choice: Choice, cache: GroupCache) -> tuple[Role, Topology]:
    stages = plan_chunk_stages(choice, world_size, 4)
    topology = replace(plan_topology("critic", world_size, pp=world_size), chunk_stages=stages)
    options = BuildOptions(torch.float32, head="value")
    groups = build_groups(topology, cache)
    role = build_role("critic", groups, path, options, max_tokens=12, max_sequences=1, learns=LEARNS)
    assert role is not None
    if role.groups.is_last_stage:
        role.weights()["output_layer.weight"].fill_(0.1)
    return role, topology


def build_objective(role: Role):
    goal = torch.randn(BATCH.num_tokens, generator=torch.Generator().manual_seed(1))

    def objective(hidden: Tensor, micro, weights: TokenWeights):
        pick = micro.token_index
        values = compute_values(role.model, hidden, micro, role.groups)
        return value_objective(values, goal[pick] * 0, goal[pick], weights.loss[pick], weights.mask[pick], clip_range=9.0)

    return objective


def run_megatron(role: Role, objective, weights: TokenWeights) -> float:
    """Megatron's 1F1B over the same micro-batches; gradients lie in the role's buffers, reduced."""
    assert role.training is not None
    model = role.training.chunks[0]
    model.zero_grad_buffer()
    micros = [build_micro_batch(BATCH, [row], 1) for row in range(BATCH.num_sequences)]
    losses: list[float] = []

    def forward_step(iterator, model):
        micro = next(iterator)
        hidden = model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.segments)

        def loss_of(hidden: Tensor):
            loss, stats = objective(hidden, micro, weights)
            losses.append(float(loss.detach()))
            return loss, torch.tensor(1), stats

        return hidden, loss_of

    groups = role.groups.collection
    with device.megatron_build_scope():
        forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=[model],
            num_microbatches=len(micros),
            seq_length=12,
            micro_batch_size=1,
            p2p_communicator=P2PCommunicator(groups.pp, model.config),
            pg_collection=groups,
        )
    reduce_gradients(role.training.chunks, role.groups)
    return sum(losses)


def compare(rank: int, world_size: int, path: str) -> list[tuple[dict[str, float], dict[str, Tensor]]]:
    """Statistics and gradients by Megatron's schedule, then by ours with each of `CHOICES`."""
    cache = GroupCache(60)
    weights = weigh_tokens(BATCH, BATCH.response_mask, range(5), "token-mean")
    results = []

    def collect(role: Role, topology: Topology) -> dict[str, Tensor]:
        tensors = gather_hf_tensors(
            role.family, role.spec, topology, role.gradients(), torch.float32, device.device(), "value"
        )
        return {name: tensor.clone() for name, tensor in tensors}

    role, topology = open_critic(world_size, path, "1f1b", cache)
    results.append(({"loss": run_megatron(role, build_objective(role), weights)}, collect(role, topology)))
    for choice in CHOICES:
        role, topology = open_critic(world_size, path, choice, cache)
        task = Task(role, [list(range(5))], build_objective(role), "token-mean", 0)
        stats = compute_gradients_together([task], BATCH, BATCH.response_mask, PipelineOptions(choice))
        results.append((stats["critic"], collect(role, topology)))
    return results


def test_losses_and_gradients_equal_megatrons_schedule(tmp_path) -> None:
    path = save_hf_model(tmp_path / "model", "llama")
    by_rank = run_ranks(compare, 2, path)
    loss = by_rank[-1][0][0]["loss"]  # Megatron's last stage
    (_, expected), *ours = by_rank[0]
    for choice, (stats, gradients) in zip(CHOICES, ours, strict=True):
        assert stats["critic/vf_loss"] == pytest.approx(loss, rel=1e-6), choice
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), f"{choice}: {name}"
            assert float(gradient.norm()) > 0, name
