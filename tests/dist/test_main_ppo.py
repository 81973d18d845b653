"""verl's quick start, word for word but for the sizes, on a tiny model: `python -m megarl.trainer.main_ppo`."""

import os
import subprocess
import sys
from pathlib import Path

from megarl.rollout.rows import load_rows, write_rows
from tests.tiny_task import ROOT, read_metrics, write_job


def write_gsm8k(folder: Path) -> None:
    """The tiny task's rows in the form that verl's script gives GSM8K."""
    for name in ("train", "val"):
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "72"},
                "extra_info": {"index": index, "split": name},
            }
            for index, row in enumerate(load_rows([str(folder / f"{name}.jsonl")]))
        ]
        write_rows(folder / "data" / "gsm8k" / f"{name}.parquet", rows)


def test_the_quick_start_of_verl_trains_two_steps_on_two_ranks_with_offload(tmp_path: Path) -> None:
    write_job(tmp_path)
    write_gsm8k(tmp_path)
    words = [
        "data.train_files=$HOME/data/gsm8k/train.parquet",
        "data.val_files=$HOME/data/gsm8k/val.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.rollout.name=naive",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.optim.lr=1e-5",
        f"critic.model.path={tmp_path}/model",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.logger=['console','jsonl']",
        "trainer.project_name=verl_example_gsm8k",
        "trainer.experiment_name=tiny",
        "+trainer.val_before_train=False",
        "trainer.default_hdfs_dir=null",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.n_gpus_per_node=2",
        "trainer.nnodes=1",
        "trainer.save_freq=10",
        "trainer.test_freq=10",
        "trainer.total_epochs=15",
        "trainer.total_training_steps=2",
    ]
    environ = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "megarl.trainer.main_ppo", *words],
        cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path)
    assert len(rows) == 2
    assert all({"actor/pg_loss", "critic/vf_loss", "critic/rewards/mean"} <= set(row) for row in rows)
    assert "reward from by_data_source" in done.stderr
    assert done.stderr.count("rollout.log_prob_micro_batch_size_per_gpu (command line) has no effect") == 1
