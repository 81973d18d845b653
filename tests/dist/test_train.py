"""The whole program on a tiny model: what `megarl train` does on four ranks, with vLLM and with the naive engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_task import read_metrics, run_megarl, write_job

pytestmark = pytest.mark.timeout(900)  # ranks share the cores with whatever else runs here

GRIDS = [
    "trainer.n_gpus_per_node=4",
    "parallel.actor={tp: 2, pp: 2}",
    "parallel.critic={tp: 1, pp: 2, dp: 2}",
    "parallel.ref={tp: 2, ranks: [0, 1]}",
    "parallel.rollout.tp=2",
]
STEPS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """A finished run on four ranks, every role on another grid: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("vllm")
    done = run_megarl([
        *write_job(folder, "qwen2", tie_word_embeddings=True),
        *GRIDS,
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_hf_at_end=true",
        "trainer.test_freq=2",
        "rollout.n=4",
        "rollout.temperature=0.7",
        "actor.ppo_mini_batch_size=4",
        "actor.ppo_epochs=2",
        "actor.optim.lr=1e-4",
        "actor.optim.lr_warmup_steps=2",
        "actor.entropy_coeff=0.001",
        "actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.01, target_kl: 0.01, horizon: 64}",
        "critic.warmup_steps=1",
        "critic.optim.lr=1e-3",
    ])  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_every_step_writes_verls_metrics(trained) -> None:
    rows = read_metrics(trained[0])
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    names = (
        "actor/pg_loss actor/entropy actor/ppo_kl actor/pg_clipfrac actor/grad_norm actor/lr actor/kl_loss "
        "critic/vf_loss critic/grad_norm critic/rewards/mean critic/score/mean critic/advantages/mean "
        "response_length/mean prompt_length/mean timing_s/gen timing_s/old_log_prob timing_s/ref timing_s/values "
        "timing_s/update_actor timing_s/sync perf/throughput"
    ).split()
    assert set(names) <= set(rows[-1])
    assert "actor/pg_loss" not in rows[1], "critic.warmup_steps=1: the actor must not learn in step 1"


def test_sampler_and_trainer_agree_on_every_token(trained) -> None:
    for row in read_metrics(trained[0])[1:]:
        assert row["rollout/logprob_gap_max"] < 1e-3


def test_later_mini_batches_see_a_policy_that_has_moved_a_little(trained) -> None:
    """Four optimizer steps in each training step: the mean KL to the old policy is small, and not zero."""
    kl = [row["actor/ppo_kl"] for row in read_metrics(trained[0])[2:]]
    assert all(0 < abs(value) < 0.1 for value in kl), kl


def test_the_adaptive_coefficient_follows_the_kl(trained) -> None:
    rows = read_metrics(trained[0])
    coefficients = [row["actor/reward_kl_penalty_coeff"] for row in rows[1:]]
    assert coefficients[0] == pytest.approx(0.01)
    assert coefficients[1] < coefficients[0], "no KL before the first update: the coefficient must fall"


def test_the_line_a_user_sees(trained) -> None:
    assert "Epoch 1 | Step 3 | Actor Loss: " in trained[1]
    for part in ("Critic Loss: ", "KL: ", "Reward: ", "held-out accuracy", "time by phase", "sample answers"):
        assert part in trained[1]


def test_rollouts_are_dumped_whole(trained) -> None:
    lines = (trained[0] / "run" / "rollouts" / "step_000002.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(trained[0] / "model")
    assert len(rows) == 8 * 4
    assert {row["weights_version"] for row in rows} == {0}, "step 1 was the critic's: no new weights before step 2"
    for row in rows:
        assert len(row["advantages"]) == len(row["token_ids"]) == len(row["rollout_logprobs"]) <= 8
        assert row["response"] == tokenizer.decode(row["token_ids"], skip_special_tokens=True)


def test_picture_tensorboard_and_configuration_are_there(trained) -> None:
    run = trained[0] / "run"
    assert (run / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events*"))
    assert "clip_ratio" in (run / "config.yaml").read_text()


def test_the_exported_actor_is_the_trained_one(trained) -> None:
    """transformers gives the answers of the last step's dump the log-probs that the next policy would: not the old."""
    run = trained[0] / "run"
    model = AutoModelForCausalLM.from_pretrained(run / "hf" / f"step_{STEPS}" / "actor")
    before = AutoModelForCausalLM.from_pretrained(trained[0] / "model")
    assert model.dtype == torch.float32
    assert model.config.to_dict().keys() == before.config.to_dict().keys()
    moved = [
        (new - old).abs().max().item() for new, old in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert min(moved) > 0
    critic = run / "hf" / f"step_{STEPS}" / "critic" / "model.safetensors"
    from safetensors.torch import load_file

    tensors = load_file(critic)
    assert tensors["score.weight"].shape == (1, 128)
    assert "lm_head.weight" not in tensors


def test_a_saved_critic_and_actor_are_taken_up_again(trained, tmp_path) -> None:
    """One rank, the naive engine, GRPO's neighbour GAE from the saved critic: the value head is not fresh."""
    exported = trained[0] / "run" / "hf" / f"step_{STEPS}"
    words = [word for word in write_job(tmp_path, "qwen2") if not word.startswith("actor.model_path")]
    done = run_megarl([
        *words,
        f"actor.model_path={exported / 'actor'}",
        f"critic.model_path={exported / 'critic'}",
        "rollout.name=naive",
        "rollout.n=2",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
    ])  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    row = read_metrics(tmp_path)[-1]
    assert abs(row["critic/values/mean"]) > 1e-4
    assert row["rollout/logprob_gap_max"] < 1e-4


def test_ppo_learns_the_tiny_task_with_two_engines_while_roles_and_engines_step_aside(tmp_path) -> None:
    done = run_megarl([
        *write_job(tmp_path),
        "trainer.n_gpus_per_node=2",
        "parallel.actor.pp=2",
        "trainer.total_training_steps=12",
        "trainer.total_epochs=2",
        "rollout.n=8",
        "actor.optim.lr=5e-3",
        "critic.optim.lr=5e-3",
        "algorithm.gamma=1.0",
        "actor.offload={params: true, grads: true, optimizer: true}",
        "critic.offload.grads=true",
        "rollout.free_cache_engine=true",
        "rollout.verify_sync=always",
    ])  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path)
    assert rows[1]["critic/score/mean"] < 0.15
    assert rows[-1]["critic/score/mean"] > 0.5
    assert rows[-1]["val/accuracy_sampled"] > rows[0]["val/accuracy_sampled"] + 0.3
    assert all(row["sync/verify_s"] > 0 and row["sync/received_bytes"] > 0 for row in rows[1:])
    assert "actor.offload: weights and optimizer of actor are in host memory already" in done.stdout + done.stderr


def test_grpo_learns_the_tiny_task_with_the_naive_engine_on_a_pipeline(tmp_path) -> None:
    done = run_megarl([
        *write_job(tmp_path, "qwen3"),
        "trainer.n_gpus_per_node=2",
        "parallel.actor={tp: 1, pp: 2}",
        "rollout.name=naive",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=8",
        "rollout.n=8",
        "actor.optim.lr=5e-3",
    ])  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path)
    assert rows[-1]["critic/score/mean"] > rows[1]["critic/score/mean"] + 0.2
    assert "critic/vf_loss" not in rows[-1]
    for row in rows[1:]:  # case C5: one optimizer step a batch, so old and new are the same policy in another batch
        assert abs(row["actor/ppo_kl"]) < 1e-5 and row["actor/pg_clipfrac"] == 0


def test_mistakes_are_told_at_once_and_before_any_model(tmp_path) -> None:
    words = write_job(tmp_path)
    done = run_megarl([*words, "trainer.n_gpus_per_node=2", "actor.optim.lr=-1", "data.train_batch_size=7"], 60)
    assert done.returncode == 2
    assert "actor.optim.lr=-1" in done.stderr and "data.train_batch_size=7" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_megarl([*words, "data.train_batch_size=640"], 60)
    assert done.returncode == 2
    assert "64 prompts are fewer than data.train_batch_size=640" in done.stderr and "Traceback" not in done.stderr


def test_dry_run_prints_the_plan(tmp_path) -> None:
    done = run_megarl([*write_job(tmp_path), *GRIDS, "--dry-run"], 60)
    assert done.returncode == 0, done.stderr
    for part in ("4 ranks", "tp1 pp1 dp0", "engine 1 tp1", "8 prompts"):
        assert part in done.stdout


def test_a_reward_that_fails_too_often_ends_the_job(tmp_path) -> None:
    words = write_job(tmp_path)
    (tmp_path / "reward.py").write_text(
        "calls = []\n"
        "def share_of_d(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    calls.append(solution_str)\n"
        "    if len(calls) > 1:\n"  # the dry run before any model passes
        "        raise KeyError('no such label')\n"
        "    return 0.0\n"
    )
    done = run_megarl([*words, "rollout.name=naive", "rollout.n=2", "trainer.val_before_train=false"])
    assert done.returncode not in (0, 2)
    assert "KeyError" in done.stderr and "reward.max_failure_share" in done.stderr
