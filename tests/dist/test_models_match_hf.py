"""Log-probs and entropies of every family equal transformers', alone and packed, on every grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl import device
from megarl.models import forward as stages
from megarl.models.build import BuildOptions
from megarl.models.micro_batch import build_micro_batch
from megarl.parallel.costs import ratio_costs_of
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.picker import pick_stream
from megarl.parallel.pipeline import StageModel, run_instructions
from megarl.parallel.schedule import ModelPlan
from megarl.parallel.topology import plan_topology
from megarl.parallel.transfer import share_token_scores
from megarl.records import PackedBatch
from megarl.trainer.roles import build_role
from tests.ranks import run_ranks
from tests.tiny import build_batch, build_hf_model

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "yarn-rope": ("llama", {"rope_parameters": YARN}),
    "qwen2-biases": ("qwen2", {}),
    "qwen3-norms-tied": ("qwen3", {"tie_word_embeddings": True}),
    "seven-layers": ("llama", {"num_hidden_layers": 7}),
}
GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2)]
LENGTHS = [9, 3, 150, 40, 2]
SMOLLM2 = Path(__file__).parents[2] / ".cache" / "quickstart" / "model"


def long_batch(vocab_size: int) -> PackedBatch:
    return build_batch([1] * len(LENGTHS), [length - 1 for length in LENGTHS], vocab_size)


def run_cases(rank: int, world_size: int, cases: list[tuple[str, int, int]], vocab_size: int) -> list[Tensor]:
    """[2, T] log-probs and entropies for each (model folder, tp, pp), each on the first tp · pp ranks."""
    cache = GroupCache(timeout_s=100)
    return [run_case(world_size, *case, vocab_size, cache) for case in cases]


@torch.no_grad()
def run_case(world_size: int, path: str, tp: int, pp: int, vocab_size: int, cache: GroupCache) -> Tensor:
    groups = build_groups(plan_topology("actor", world_size, tp, pp, ranks=list(range(tp * pp))), cache)
    role = build_role("actor", groups, path, BuildOptions(dtype=torch.float32), max_tokens=4096)
    batch = long_batch(vocab_size)
    own, index = [torch.zeros(0), torch.zeros(0)], torch.zeros(0, dtype=torch.int64)
    if role is not None:
        micro = build_micro_batch(batch, range(batch.num_sequences), tp)

        def forward(chunk: int, m: int, received: Tensor | None) -> Tensor:
            nonlocal own, index
            hidden = stages.run_stage(role.model, micro, received)
            if role.groups.is_last_stage:
                scores = stages.compute_logprobs(role.model, hidden, micro, role.groups, 1.0, role.num_ids)
                if role.groups.at.tp == 0:
                    own, index = list(scores), micro.token_index
            return hidden

        shape = stages.hidden_shape(micro, role.groups, role.spec.hidden_size)
        with device.megatron_scope():
            plan = ModelPlan("actor", role.groups.topology.chunk_stages, (1,), trains=False)
            schedule = pick_stream([plan], ratio_costs_of([plan])).schedule
            run_instructions(
                schedule, role.groups.at.pp, {"actor": StageModel(forward, [shape], torch.float32, role.groups)}
            )
    shared = share_token_scores({"logprobs": own[0], "entropy": own[1]}, index, batch.num_tokens)
    return torch.stack([shared["logprobs"], shared["entropy"]])


@torch.no_grad()
def expect(model: Any, vocab_size: int) -> Tensor:
    """What transformers says, each sequence alone: [2, T], 0 at first tokens."""
    parts = []
    for tokens in long_batch(vocab_size).tokens.split(LENGTHS):
        log_p = model(tokens[None]).logits[0].float().log_softmax(-1)
        logprobs = log_p[:-1].gather(1, tokens[1:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
        parts.append(torch.nn.functional.pad(torch.stack([logprobs, entropy]), (1, 0)))
    return torch.cat(parts, dim=1)


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[tuple[str, int, int], tuple[Tensor, Tensor]]:
    """(model, tp, pp) -> ours, transformers'."""
    folder = tmp_path_factory.mktemp("models")
    expected: dict[str, Tensor] = {}
    for name, (family, changes) in MODELS.items():
        model = build_hf_model(family, **changes)
        model.save_pretrained(folder / name)
        expected[name] = expect(model, 500)
    cases = [(name, tp, pp) for name in MODELS for tp, pp in GRIDS]
    shared = run_ranks(run_cases, 4, [(str(folder / name), tp, pp) for name, tp, pp in cases], 500, timeout_s=600)
    return {case: (shared[0][i], expected[case[0]]) for i, case in enumerate(cases)}


@pytest.mark.parametrize(("tp", "pp"), GRIDS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_megatron_equals_transformers(answers, name: str, tp: int, pp: int) -> None:
    ours, expected = answers[name, tp, pp]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_smollm2_equals_transformers_at_tp_1_and_3() -> None:
    from transformers import AutoModelForCausalLM

    assert (SMOLLM2 / "config.json").is_file(), f"{SMOLLM2} is missing: `make test` prepares it"
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    expected = expect(model, model.config.vocab_size)
    cases = [(str(SMOLLM2), tp, 1) for tp in (1, 3)]
    for ours in run_ranks(run_cases, 3, cases, model.config.vocab_size, timeout_s=600)[0]:
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
