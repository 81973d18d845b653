"""Reward models: Megatron's scores on any grid are those of transformers, and a job uses several sources at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.models.build import BuildOptions
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.topology import plan_topology
from megarl.records import PackedBatch
from megarl.trainer.annotate import (
    annotate_logprobs,
    annotate_sequence_scores,
    annotate_values,
    append_end_tokens,
)
from megarl.trainer.role_methods import ScoringRole
from megarl.trainer.roles import build_role
from tests.ranks import run_ranks
from tests.tiny import build_batch, save_hf_model, save_reward_model
from tests.tiny_task import WORDS, read_metrics, run_megarl, write_job

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

PROMPTS, RESPONSES = [3, 9, 3, 2, 7, 3], [8, 3, 8, 14, 0, 5]
GRIDS = [(1, 1, [0]), (2, 1, [0, 1, 2, 3]), (1, 2, [1, 2]), (2, 2, [0, 1, 2, 3]), (1, 1, [0, 1, 3])]


def build_shared_batch() -> PackedBatch:
    """Answers to three prompts; those to one prompt begin with the same tokens, and two are of the same length."""
    import dataclasses

    batch = build_batch(PROMPTS, RESPONSES)
    tokens, bounds = batch.tokens.clone(), batch.cu_seqlens.tolist()
    for row in (2, 5):
        tokens[bounds[row] : bounds[row] + 3] = tokens[bounds[0] : bounds[0] + 3]
    return dataclasses.replace(batch, tokens=tokens, group=torch.tensor([0, 1, 0, 2, 3, 0]))


def score_on_grids(rank: int, world_size: int, path: str) -> list[Tensor]:
    cache = GroupCache(timeout_s=60)
    found = []
    for tp, pp, ranks in GRIDS:
        groups = build_groups(plan_topology("reward_model", world_size, tp, pp, ranks=ranks), cache)
        options = BuildOptions(dtype=torch.float32, head="value")
        role = build_role("reward_model", groups, path, options, max_tokens=25)
        found.append(annotate_sequence_scores(role, build_shared_batch()))
    return found


def call_across_grids(rank: int, world_size: int, policy: str, reward: str) -> dict[str, Any]:
    """8 ranks -> 2 -> 1 -> 8, each with its sequences: called from the actor's grid, against all ranks together."""
    cache = GroupCache(timeout_s=60)
    caller = plan_topology("caller", world_size)
    batch = build_shared_batch()
    mine = batch.select([row for row in range(batch.num_sequences) if row % world_size == rank])
    found: dict[str, Any] = {"rows": [row for row in range(batch.num_sequences) if row % world_size == rank]}
    for name, (tp, pp, ranks) in {"two": (2, 1, [2, 5]), "one": (1, 1, [6]), "eight": (2, 2, list(range(8)))}.items():
        topology = plan_topology(name, world_size, tp, pp, ranks=ranks)
        groups = build_groups(topology, cache)
        scorer = build_role(
            name, groups, reward, BuildOptions(dtype=torch.float32, head="value"), max_tokens=64
        )
        actor = build_role(name, groups, policy, BuildOptions(dtype=torch.float32), max_tokens=64)
        rewards, logprobs = ScoringRole(topology, scorer), ScoringRole(topology, actor, temperature=0.7)
        found[name] = (
            rewards.get_rewards(mine, caller=caller),
            rewards.compute_values(mine, caller=caller),
            logprobs.compute_logprobs(mine, caller=caller),
        )
        found[f"{name} whole"] = (
            annotate_sequence_scores(scorer, batch), annotate_values(scorer, batch), annotate_logprobs(actor, batch, 0.7),
        )  # fmt: skip
    return found


def test_calls_across_grids_equal_the_scores_of_all_ranks_together(tmp_path) -> None:
    changes = {"num_hidden_layers": 2}
    policy = save_hf_model(tmp_path / "policy", "llama", **changes)
    reward = save_reward_model(tmp_path / "rm", "llama", **changes)
    batch = build_shared_batch()
    for found in run_ranks(call_across_grids, 8, policy, reward, timeout_s=400):
        own = batch.select(found["rows"])
        positions = batch.token_rows(found["rows"])
        for name in ("two", "one", "eight"):
            scores, values, logprobs = found[name]
            whole_scores, whole_values, whole_logprobs = found[f"{name} whole"]
            torch.testing.assert_close(scores, whole_scores[found["rows"]], rtol=1e-5, atol=1e-6)
            for part, whole in ((values, whole_values), (logprobs, whole_logprobs)):
                mask = own.response_mask
                torch.testing.assert_close(part[mask], whole[positions][mask], rtol=1e-5, atol=1e-6)


def test_scores_on_every_grid_are_those_of_transformers(tmp_path) -> None:
    from transformers import AutoModelForSequenceClassification

    path = save_reward_model(tmp_path / "rm", "qwen2")
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    batch = build_shared_batch()
    bounds = batch.cu_seqlens.tolist()
    with torch.no_grad():
        expected = torch.cat([
            model(input_ids=batch.tokens[None, start:end]).logits.flatten()
            for start, end in zip(bounds[:-1], bounds[1:], strict=True)
        ])
    assert float(expected.std()) > 0.1, "scores that hardly differ would prove nothing"
    for scores in run_ranks(score_on_grids, 4, path, timeout_s=300):
        for grid, found in zip(GRIDS, scores, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, at=grid: f"{at}: {text}")


def test_end_tokens_lie_behind_each_sequence_and_change_nothing_before() -> None:
    batch = build_shared_batch()
    longer = append_end_tokens(batch)
    ends = longer.cu_seqlens[1:] - 1
    kept = torch.ones(longer.num_tokens, dtype=torch.bool)
    kept[ends] = False
    assert bool(longer.response_mask[ends].all()) and bool((longer.tokens[ends] == 0).all())
    assert longer.lengths.tolist() == [length + 1 for length in batch.lengths.tolist()]
    assert torch.equal(longer.tokens[kept], batch.tokens)
    assert torch.equal(longer.response_mask[kept], batch.response_mask)
    assert longer.prefix_lengths.tolist() == PROMPTS, "answers to one prompt must go on sharing it"


@pytest.fixture
def judge_url() -> Iterator[str]:
    """A service that scores an answer by its number of words, and fails on one of them."""

    class Handler(BaseHTTPRequestHandler):
        num_requests = 0

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            Handler.num_requests += 1
            reply = {} if Handler.num_requests == 5 else {"score": len(body["response"].split())}
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/judge"
    server.shutdown()
    server.server_close()


def without(words: list[str], name: str) -> list[str]:
    return [word for word in words if not word.startswith(f"{name}=")]


def test_a_job_with_a_function_two_models_and_a_service(tmp_path, judge_url) -> None:
    words = without(write_job(tmp_path), "reward.function")
    size = len(WORDS) + 8
    megatron = save_reward_model(tmp_path / "rm", "llama", num_hidden_layers=2, vocab_size=size)
    other = save_reward_model(tmp_path / "hf", "llama", num_hidden_layers=1, vocab_size=size)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tmp_path / "model" / file).exists():
            (Path(other) / file).write_bytes((tmp_path / "model" / file).read_bytes())
    done = run_megarl([
        *words,
        f"reward.sources=[{{function: '{tmp_path / 'reward.py'}:share_of_d', weight: 2}}, {{model: reward_model}}, "
        f"{{name: text, model: '{other}', device: cpu, weight: 0.5}}, {{name: words, remote: '{judge_url}'}}]",
        f"reward_model.model_path={megatron}",
        "reward_model.dtype=fp32",
        f"cost_model.model_path={megatron}",
        "trainer.n_gpus_per_node=2",
        "parallel.reward_model={tp: 1, pp: 1, ranks: [1]}",
        "parallel.cost_model={tp: 1, pp: 2}",
        "rollout.name=naive",
        "algorithm.name=safe_rlhf",
        "rollout.n=4",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "data.val_max_samples=1",
    ])  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    row = read_metrics(tmp_path)[-1]
    parts = {name: row[f"reward/{name}/score"] for name in ("share_of_d", "reward_model", "text", "words")}
    assert parts["words"] == pytest.approx(row["response_length/mean"], abs=1.0)
    assert row["reward/failed_share"] == 1 / 32
    line = (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    rewards = [json.loads(each)["reward"] for each in line]
    assert sum(reward is None for reward in rewards) == 1
    mean = 2 * parts["share_of_d"] + parts["reward_model"] + 0.5 * parts["text"] + parts["words"]
    judged = [reward for reward in rewards if reward is not None]
    assert sum(judged) / len(judged) == pytest.approx(mean, abs=0.3), "the failed answer is in the parts' means"


def test_sources_that_cannot_judge_are_told_at_once_and_before_any_model(tmp_path) -> None:  # case H4
    """One message names them all: no trained head for Megatron, none for transformers, nobody there, a wrong return."""
    given = without(write_job(tmp_path), "reward.function")
    wrong = "def judge(data_source, solution_str, ground_truth, extra_info=None):\n    return [1.0, 2.0]\n"
    (tmp_path / "wrong.py").write_text(wrong)
    policy = tmp_path / "model"
    done = run_megarl([
        *given,
        f"reward_model.model_path={policy}",
        f"reward.sources=[{{model: reward_model}}, {{name: text, model: '{policy}'}}, "
        f"{{remote: 'http://127.0.0.1:9/x', num_retries: 0}}, {{function: '{tmp_path / 'wrong.py'}:judge'}}]",
        "rollout.name=naive",
    ], 120)  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "4 problems" in done.stderr and "Traceback" not in done.stderr
    for words in (
        "reward.sources[0] (reward_model): ",
        "missing tensor score.weight",
        "reward.sources[1] (text): ",
        "has no weights for score.weight",
        "reward.sources[2].remote=http://127.0.0.1:9/x fails on row 0",
        f"reward.sources[3].function={tmp_path / 'wrong.py'}:judge fails on row 0",
        "must return a number",
    ):
        assert words in done.stderr, done.stderr
    assert "built in" not in done.stderr + done.stdout


def test_a_policy_folder_without_head_is_refused_for_scoring(tmp_path) -> None:
    from megarl.models.registry import read_model_spec
    from megarl.weights.hf import HFFolder, check_folder

    path = save_hf_model(tmp_path / "policy", "llama")
    family, spec = read_model_spec(path)
    check_folder(HFFolder(path, family), family, spec, "value")
    with pytest.raises(ValueError, match="not trained to score"):
        check_folder(HFFolder(path, family), family, spec, "value", needs_value_head=True)
