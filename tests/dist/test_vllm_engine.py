"""vLLM inside the ranks of a job against Hugging Face transformers: same greedy tokens, same log-probabilities, the
weights that were sent last and no others, for one engine of one or two ranks and for two engines side by side.

Two jobs are started, of one and of two ranks; each builds several engines one after the other and hands its answers
back. The tests then recompute them with transformers from the same weights.
"""

from __future__ import annotations

import os
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.parallel.topology import Topology
from megarl.records import Prompt, Rollout, Sampling
from megarl.weights.checksum import compute_checksum
from tests.engines import write_folder
from tests.ranks import RankFailed, run_ranks
from tests.tiny import build_hf_model

VOCAB = 500
SHARED = tuple(range(100, 140))  # longer than a block of the KV cache: the prefix cache takes part
PROMPTS = [
    Prompt(row=10, token_ids=(*SHARED, 3, 4, 5), text=""),
    Prompt(row=11, token_ids=(*SHARED, 6), text=""),
    Prompt(row=12, token_ids=(7, 8, 9, 10, 11), text=""),
    Prompt(row=13, token_ids=(499, 1), text=""),
]
GREEDY = Sampling(n=1, temperature=0.0, max_tokens=12, stop_token_ids=(), seed=1)
AT_ONE = Sampling(n=2, temperature=1.0, max_tokens=12, stop_token_ids=(), seed=1)
AT_POINT_SEVEN = Sampling(n=2, temperature=0.7, max_tokens=12, stop_token_ids=(), seed=1)
SCALED_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tie_word_embeddings": False},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True, "rope_parameters": SCALED_ROPE},  # case A10
    "qwen2-bias": {"family": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3-norms": {"family": "qwen3", "tie_word_embeddings": False},
}
VERSIONS = (1, 2, 3)

Answers = dict[str, list[Rollout]]


def build_model(name: str, version: int = 0) -> Any:
    """The transformers model of one case; each version has weights of its own."""
    changes = dict(MODELS[name])
    model = build_hf_model(changes.pop("family"), num_hidden_layers=2, **changes)
    generator = torch.Generator().manual_seed(version)
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + 0.2 * noise if "norm" in key else 0.15 * noise)
    return model


def tensors_of(name: str, version: int) -> dict[str, Tensor]:
    model = build_model(name, version)
    if MODELS[name]["tie_word_embeddings"]:
        return dict(model.named_parameters())
    return {key: tensor for key, tensor in model.state_dict().items() if "rotary" not in key}


def build_engine(folder: str, name: str, rank: int, world_size: int, tp_size: int, **options: Any) -> Any:
    from megarl.rollout.vllm_engine import build_vllm_engine

    options = {"dtype": torch.float32, "max_model_len": 64, "max_num_seqs": 16, "kv_cache_gib": 0.02, **options}
    topology = Topology(tuple(range(world_size)), tp_size=tp_size, dp_size=world_size // tp_size)
    return build_vllm_engine(f"{folder}/{name}", topology, rank, **options)


def answer_versions(folder: str, name: str, rank: int, world_size: int, tp_size: int, **options: Any) -> Answers:
    """What an engine answers after each of three loads, and its checksums against those of the tensors sent."""
    engine = build_engine(folder, name, rank, world_size, tp_size, **options)
    answers: Answers = {}
    for version in VERSIONS:
        write_folder(engine, f"{folder}/{name}", tensors_of(name, version), version, rank % tp_size, tp_size)
        dtype = options.get("dtype", torch.float32)
        assert engine.checksums() == {
            key: compute_checksum(tensor.to(dtype)) for key, tensor in tensors_of(name, version).items()
        }
        answers[f"greedy {version}"] = engine.generate(PROMPTS, GREEDY)
        answers[f"1.0 {version}"] = engine.generate(PROMPTS, AT_ONE)
        answers[f"0.7 {version}"] = engine.generate(PROMPTS, AT_POINT_SEVEN)
    engine.close()
    return answers


def message_of(call: Any, *args: Any) -> str:
    """The ValueError's text that a call must raise."""
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return "no error"


def changes_since(rng: Tensor, python_rng: Any, set_num_threads: Any, num_threads: int) -> list[str]:
    """What of the process is no longer as it was."""
    now = {
        "torch random state": torch.equal(rng, torch.get_rng_state()),
        "Python random state": python_rng == random.getstate(),
        "set_num_threads": set_num_threads is torch.set_num_threads,
        "number of threads": num_threads == torch.get_num_threads(),
        "LD_PRELOAD": "tcmalloc" not in os.environ.get("LD_PRELOAD", ""),
        "LOCAL_WORLD_SIZE": os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"],
    }
    return [name for name, is_same in now.items() if not is_same]


def one_rank_job(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"llama-tied": answer_versions(folder, "llama-tied", rank, world_size, 1)}
    found["bf16"] = answer_versions(folder, "qwen2-bias", rank, world_size, 1, dtype=torch.bfloat16)

    before = (torch.get_rng_state(), random.getstate(), torch.set_num_threads, torch.get_num_threads())
    engine = build_engine(folder, "llama", rank, world_size, 1, vocab_limit=300)
    found["left after the start"] = changes_since(*before)
    weights = tensors_of("llama", 1)
    found["before the first load"] = message_of(engine.generate, PROMPTS, GREEDY)
    write_folder(engine, f"{folder}/llama", weights, 1)
    before = (torch.get_rng_state(), random.getstate(), torch.set_num_threads, torch.get_num_threads())
    found["limited"] = engine.generate(PROMPTS, AT_ONE)
    found["limited greedily"] = engine.generate(PROMPTS, GREEDY)
    found["left after answers"] = changes_since(*before)
    found["too long"] = message_of(engine.generate, [Prompt(row=5, token_ids=(1,) * 60, text="")], GREEDY)
    engine.discard_weights()
    found["after a discard"] = message_of(engine.generate, PROMPTS, GREEDY)
    write_folder(engine, f"{folder}/llama", weights, 2)
    engine.open_weights()
    found["while its weights are open"] = message_of(engine.generate, PROMPTS, GREEDY)
    found["names"] = set(engine.checksums())
    engine.close()

    engine = build_engine(folder, "llama", rank, world_size, 1)
    write_folder(engine, f"{folder}/llama", weights, 1)
    found["alone"] = engine.generate(PROMPTS, AT_ONE)
    found["one by one"] = [engine.generate([prompt], AT_ONE) for prompt in PROMPTS]
    found["other seed"] = engine.generate(PROMPTS, Sampling(2, 1.0, 12, (), seed=2))
    found["top-k"] = engine.generate(PROMPTS, Sampling(2, 1.0, 12, (), seed=1, top_k=2))
    found["nothing asked"] = engine.generate([], AT_ONE)
    greedy = engine.generate(PROMPTS, GREEDY)
    found["greedy"] = greedy
    found["with greedy"] = engine.generate(PROMPTS, dataclasses.replace(AT_ONE, with_greedy=True))
    stops = (greedy[0].token_ids[5], greedy[2].token_ids[3])
    found["stops"] = stops
    found["stopped"] = engine.generate(PROMPTS, Sampling(1, 0.0, 12, stops, seed=1))
    return found


def two_rank_job(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    found: dict[str, Any] = {
        name: answer_versions(folder, name, rank, world_size, 2) for name in ("llama", "qwen2-bias", "qwen3-norms")
    }
    engine = build_engine(folder, "llama", rank, world_size, 1)
    write_folder(engine, f"{folder}/llama", tensors_of("llama", 1), 1)
    mine = PROMPTS[:3] if rank == 0 else PROMPTS[3:]
    found["side by side"] = engine.generate(mine, AT_ONE)
    if rank == 0:  # nobody answers on rank 1: engines must not wait for each other
        found["on its own"] = engine.generate(PROMPTS, AT_ONE)
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folders with a configuration of each model; their weights are never read."""
    path = tmp_path_factory.mktemp("models")
    for name in MODELS:
        model = build_model(name)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(path / name)
    return str(path)


@pytest.fixture(scope="module")
def one_rank(folder: str) -> dict[str, Any]:
    return run_ranks(one_rank_job, 1, folder, timeout_s=200)[0]


@pytest.fixture(scope="module")
def two_ranks(folder: str) -> list[dict[str, Any]]:
    return run_ranks(two_rank_job, 2, folder, timeout_s=200)


@torch.no_grad()
def compute_logits(model: Any, prompt: Prompt, rollout: Rollout) -> Tensor:
    """[answer tokens, vocabulary]: what transformers predicts for every token of the answer."""
    ids = torch.tensor([prompt.token_ids + rollout.token_ids])
    return model(ids).logits[0, len(prompt.token_ids) - 1 : -1].float()


def largest_gap(model: Any, rollouts: Sequence[Rollout], temperature: float) -> float:
    """The largest difference between the engine's log-probabilities and those of transformers."""
    worst = 0.0
    for rollout in rollouts:
        logits = compute_logits(model, PROMPTS[rollout.prompt_index], rollout) / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        worst = max(worst, (expected - torch.tensor(rollout.logprobs)).abs().max().item())
    return worst


def check_against_transformers(name: str, answers: Answers) -> None:
    for version in VERSIONS:
        model = build_model(name, version)
        greedy = answers[f"greedy {version}"]
        for rollout in greedy:
            best = compute_logits(model, PROMPTS[rollout.prompt_index], rollout).argmax(-1)
            assert rollout.token_ids == tuple(best.tolist()), (name, version)
        assert largest_gap(model, greedy, 1.0) < 1e-3
        assert largest_gap(model, answers[f"1.0 {version}"], 1.0) < 1e-3
        assert largest_gap(model, answers[f"0.7 {version}"], 0.7) < 1e-3


def test_one_rank_engine_follows_three_loads_of_a_tied_model(one_rank: dict[str, Any]) -> None:
    check_against_transformers("llama-tied", one_rank["llama-tied"])


@pytest.mark.parametrize("name", ["llama", "qwen2-bias", "qwen3-norms"])
def test_two_rank_engine_follows_three_loads(two_ranks: list[dict[str, Any]], name: str) -> None:
    check_against_transformers(name, two_ranks[0][name])


def test_the_ranks_of_one_engine_return_the_same(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["llama"] == two_ranks[1]["llama"]


def test_bf16_weights_with_biases_follow_every_load(one_rank: dict[str, Any]) -> None:
    for version in VERSIONS:
        answers = one_rank["bf16"][f"1.0 {version}"]
        assert largest_gap(build_model("qwen2-bias", version), answers, 1.0) < 0.25
        assert largest_gap(build_model("qwen2-bias", version % 3 + 1), answers, 1.0) > 2


def test_answers_do_not_depend_on_the_number_of_engines_or_the_batch(
    one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    alone = [rollout.token_ids for rollout in one_rank["alone"]]
    side_by_side = [rollout.token_ids for found in two_ranks for rollout in found["side by side"]]
    one_by_one = [rollout.token_ids for answers in one_rank["one by one"] for rollout in answers]
    over_two_ranks = [rollout.token_ids for rollout in two_ranks[0]["llama"]["1.0 1"]]
    assert alone == side_by_side == one_by_one == over_two_ranks


def test_an_engine_answers_while_the_other_is_idle(two_ranks: list[dict[str, Any]]) -> None:
    assert len(two_ranks[0]["on its own"]) == 2 * len(PROMPTS)


def test_another_seed_and_another_sample_give_another_answer(one_rank: dict[str, Any]) -> None:
    answers = [rollout.token_ids for rollout in one_rank["alone"] + one_rank["other seed"]]
    assert len(set(answers)) == len(answers)


def test_one_call_draws_sampled_answers_and_a_greedy_one_each(one_rank: dict[str, Any]) -> None:
    """The greedy answer is the last sample of its prompt; the sampled ones are what they are without it."""
    drawn: list[Rollout] = one_rank["with greedy"]
    assert [rollout.sample for rollout in drawn] == [0, 1, 2] * len(PROMPTS)
    expected = [rollout.token_ids for rollout in one_rank["greedy"]]
    assert [rollout.token_ids for rollout in drawn if rollout.sample == 2] == expected
    sampled = [rollout.token_ids for rollout in drawn if rollout.sample < 2]
    assert sampled == [rollout.token_ids for rollout in one_rank["alone"]]


def test_rollouts_come_by_prompt_then_sample_with_the_version_of_the_weights(one_rank: dict[str, Any]) -> None:
    order = [(rollout.prompt_index, rollout.sample) for rollout in one_rank["alone"]]
    assert order == [(index, sample) for index in range(len(PROMPTS)) for sample in range(2)]
    for version in VERSIONS:
        assert {rollout.weights_version for rollout in one_rank["llama-tied"][f"1.0 {version}"]} == {version}
    assert one_rank["nothing asked"] == []


def test_any_of_several_stop_tokens_ends_an_answer_and_belongs_to_it(one_rank: dict[str, Any]) -> None:
    stops = one_rank["stops"]
    for whole, stopped in zip(one_rank["greedy"], one_rank["stopped"], strict=True):
        end = next((i for i, token in enumerate(whole.token_ids) if token in stops), None)
        assert stopped.is_finished == (end is not None)
        assert stopped.token_ids == whole.token_ids[: None if end is None else end + 1]
    assert {rollout.token_ids[-1] for rollout in one_rank["stopped"] if rollout.is_finished} == set(stops)


def test_an_answer_cut_at_the_limit_is_not_finished(one_rank: dict[str, Any]) -> None:
    assert all(len(rollout.token_ids) == 12 and not rollout.is_finished for rollout in one_rank["greedy"])


def test_log_probabilities_are_those_after_top_k(one_rank: dict[str, Any]) -> None:
    model = build_model("llama", 1)
    for rollout in one_rank["top-k"]:
        logits = compute_logits(model, PROMPTS[rollout.prompt_index], rollout)
        best = logits.topk(2).values
        chosen = logits.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert torch.allclose(chosen - best.logsumexp(-1), torch.tensor(rollout.logprobs), atol=1e-3)


def test_ids_beyond_the_tokenizer_are_never_sampled_and_take_no_mass(one_rank: dict[str, Any]) -> None:
    model = build_model("llama", 1)
    assert all(max(rollout.token_ids) < 300 for rollout in one_rank["limited"] + one_rank["limited greedily"])
    for rollout in one_rank["limited"]:
        logits = compute_logits(model, PROMPTS[rollout.prompt_index], rollout)[:, :300]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert torch.allclose(expected, torch.tensor(rollout.logprobs), atol=1e-3)


@pytest.mark.parametrize("moment", ["before the first load", "after a discard", "while its weights are open"])
def test_an_engine_without_weights_refuses(one_rank: dict[str, Any], moment: str) -> None:
    assert "holds no weights" in one_rank[moment]


def test_the_engine_names_its_tensors_as_the_folder_does(one_rank: dict[str, Any]) -> None:
    assert one_rank["names"] == set(tensors_of("llama", 1))


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(one_rank: dict[str, Any]) -> None:
    assert "row 5 has 60 tokens" in one_rank["too long"] and "takes 1 to 52" in one_rank["too long"]


def test_random_states_and_threads_of_the_trainer_are_untouched(one_rank: dict[str, Any]) -> None:
    assert one_rank["left after the start"] == [] and one_rank["left after answers"] == []


@pytest.mark.parametrize("topology", [Topology((0,)), Topology((1, 2, 3), dp_size=3), Topology((0, 1), pp_size=2)])
def test_a_topology_that_vllm_cannot_serve_is_refused(topology: Topology) -> None:
    from megarl.rollout.vllm_engine import check_topology

    with pytest.raises(ValueError, match=r"parallel\.rollout"):
        check_topology(topology, world_size=4 if len(topology.ranks) != 2 else 2)


def test_nothing_is_left_in_shared_memory(two_ranks: list[dict[str, Any]]) -> None:
    assert not list(Path("/dev/shm").glob("*megarl-vllm*"))


def failing_job(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the first cause")
    import torch.distributed as dist

    dist.barrier()


def test_run_ranks_raises_the_traceback_of_the_rank_that_failed_first() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed first.*the first cause"):
        run_ranks(failing_job, 2, timeout_s=30)
