"""Command lines that users of verl have at hand: what they set, and what is refused of them, with its reason."""

import shlex
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from megarl.config.load import ConfigError, load_config, resolve_config
from megarl.config.schema import Config
from megarl.config.validate import find_problems
from megarl.config.verl_names import DEFAULTS
from megarl.trainer.main_ppo import read_words
from tests.unit.test_config_validate import SMOLLM2
from tests.verl_tables import read_page, render_tables

SHARED = """
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet
    data.max_prompt_length=512 actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.path=MODEL
"""
PPO = f"""{SHARED}
    data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
    critic.optim.lr=1e-5 critic.model.path=MODEL critic.ppo_micro_batch_size_per_gpu=4
    algorithm.kl_ctrl.kl_coef=0.001 trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10
    trainer.test_freq=10 trainer.total_epochs=15
"""
PPO_OLD = f"""{PPO} data.max_response_length=256 actor_rollout_ref.rollout.gpu_memory_utilization=0.2
    trainer.logger=['console'] +trainer.val_before_train=False trainer.default_hdfs_dir=null
"""
PPO_NEW = f"""{PPO} data.max_response_length=512 actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    actor_rollout_ref.rollout.name=vllm trainer.logger=console trainer.val_before_train=False
"""
PPO_FIRST = f"""{SHARED}
    data.train_batch_size=1024 data.val_batch_size=1312 data.max_response_length=512
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size=64
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.grad_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.rollout.micro_batch_size=256
    actor_rollout_ref.rollout.log_prob_micro_batch_size=128 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    actor_rollout_ref.ref.log_prob_micro_batch_size=128 actor_rollout_ref.ref.fsdp_config.param_offload=True
    critic.optim.lr=1e-5 critic.model.path=MODEL critic.model.enable_gradient_checkpointing=False
    critic.ppo_micro_batch_size=64 critic.model.fsdp_config.param_offload=True
    critic.model.fsdp_config.grad_offload=False critic.model.fsdp_config.optimizer_offload=False
    algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0 trainer.logger=['console','tensorboard']
    trainer.project_name='verl_example_gsm8k' trainer.experiment_name='function_rm'
    trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.save_freq=-1 trainer.total_epochs=15
"""
GROUPS = f"""{SHARED}
    data.train_batch_size=1024 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error'
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=20
    actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.critic_warmup=0
    trainer.logger='["console","wandb"]' trainer.project_name='verl_grpo_example_gsm8k'
    trainer.experiment_name='function_rm' trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20
    trainer.test_freq=5 trainer.total_epochs=15
"""
GRPO = f"""{GROUPS} algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
    algorithm.use_kl_in_reward=False data.return_raw_chat= actor_rollout_ref.rollout.mode=sync
    actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.model.use_liger=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=triton
"""
REMAX = f"""{GROUPS} algorithm.adv_estimator=remax actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30000
    algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001
"""
RLOO = f"{REMAX} algorithm.adv_estimator=rloo"
MEGATRON = f"""--config-path=config --config-name='ppo_megatron_trainer.yaml' {PPO_NEW}
    data.train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size=2
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=3
    critic.model.enable_gradient_checkpointing=True critic.megatron.pipeline_model_parallel_size=2
    critic.megatron.virtual_pipeline_model_parallel_size=2 critic.megatron.tensor_model_parallel_size=3
    trainer.n_gpus_per_node=6
"""
LINES = {
    "ppo": (PPO_NEW, 1), "ppo older": (PPO_OLD, 1), "ppo first": (PPO_FIRST, 4), "grpo": (GRPO, 8),
    "remax": (REMAX, 8), "rloo": (RLOO, 8), "megatron": (MEGATRON, 6),
}  # fmt: skip


def parse(line: str, *more: str) -> Config:
    return load_config(None, read_words([*shlex.split(line.replace("MODEL", "Qwen/Q")), *more]), DEFAULTS)


def problems_of(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, read_words(words), DEFAULTS)
    return caught.value.problems


def changes(config: Any, plain: Any, prefix: str = "") -> dict[str, Any]:
    """The options in which `config` differs from `plain`, by dotted key."""
    found: dict[str, Any] = {}
    for field in fields(config):
        value, old = getattr(config, field.name), getattr(plain, field.name)
        if is_dataclass(value) and is_dataclass(old):
            found |= changes(value, old, f"{prefix}{field.name}.")
        elif value != old:
            found[prefix + field.name] = value
    return found


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """`$HOME` as the shell left it in the words, with the data of the quick start in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("gsm8k/train", "gsm8k/test", "math/train"):
        file = tmp_path / "data" / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_of_verl_runs_here(line):
    words, world_size = LINES[line]
    config = resolve_config(parse(words))
    found = find_problems(config, world_size, SMOLLM2)
    assert [problem for problem in found if not problem.startswith("critic.model_path=Qwen/Q")] == []


def test_a_micro_batch_counted_over_all_ranks_is_told_of_where_one_rank_holds_less():
    found = find_problems(resolve_config(parse(PPO_FIRST, "trainer.n_gpus_per_node=8")), 8, SMOLLM2)
    assert [line.split()[0] for line in found if "use 32 or less" in line] == [
        "actor.ppo_micro_batch_size=64", "critic.ppo_micro_batch_size=64",
    ]  # fmt: skip


def test_the_ppo_quick_start_sets_this_and_nothing_else(home):
    set_here = changes(parse(PPO_NEW), Config())
    assert set_here == {
        "data.train_files": [f"{home}/data/gsm8k/train.parquet"],
        "data.val_files": [f"{home}/data/gsm8k/test.parquet"],
        "data.train_batch_size": 256,
        "actor.model_path": "Qwen/Q",
        "actor.ppo_mini_batch_size": 64,
        "actor.ppo_micro_batch_size": 4,
        "critic.model_path": "Qwen/Q",
        "critic.ppo_micro_batch_size": 4,
        "rollout.gpu_memory_utilization": 0.4,
        "rollout.free_cache_engine": True,
        "trainer.logger": ["console"],
        "trainer.total_epochs": 15,
        "trainer.val_before_train": False,
        "trainer.test_freq": 10,
        "trainer.save_freq": 10,
    }


def test_the_older_quick_start_differs_in_its_own_words():
    older = changes(parse(PPO_OLD), parse(PPO_NEW))
    assert older == {"data.max_response_length": 256, "rollout.gpu_memory_utilization": 0.2}


def test_offload_of_fsdp_is_ours():
    config = parse(PPO_FIRST)
    actor, critic = config.actor.offload, config.critic.offload
    assert (actor.params, actor.grads, actor.optimizer) == (False, False, True)
    assert (critic.params, critic.optimizer, config.ref.offload_params) == (True, False, True)
    assert (config.actor.ppo_micro_batch_size, config.trainer.logger) == (64, ["console", "tensorboard"])


def test_the_grpo_script_sets_its_algorithm():
    config = parse(GRPO)
    assert (config.algorithm.adv_estimator, config.rollout.n, config.actor.use_kl_loss) == ("grpo", 5, True)
    assert (config.actor.kl_loss_type, config.actor.recompute, config.data.overlong_prompts) == ("k3", "full", "filter")
    assert config.trainer.logger == ["console", "wandb"]


def test_the_remax_script_sets_its_algorithm():
    config = parse(REMAX)
    assert (config.algorithm.adv_estimator, config.algorithm.use_kl_in_reward) == ("remax", True)
    assert (config.algorithm.kl_penalty, config.actor.ppo_max_token_len) == ("k1", 30000)


def test_the_megatron_script_sets_the_grids(home):
    config = parse(MEGATRON)
    grids = [config.parallel.actor, config.parallel.critic, config.parallel.ref]
    assert [(grid.tp, grid.pp) for grid in grids if grid is not None] == [(3, 2)] * 3
    assert (config.pipeline.virtual_stages, config.pipeline.schedule) == (2, "auto")
    assert config.data.train_files == [f"{home}/data/{name}/train.parquet" for name in ("gsm8k", "math")]


def test_a_home_folder_in_verls_first_form():
    assert parse("data.train_files=~/data/x.parquet").data.train_files == parse("data.train_files=$HOME/data/x.parquet"
                                                                                ).data.train_files  # fmt: skip


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("actor_rollout_ref.rollout.name=hf", "rollout.name", "naive"),
        ("reward_model.forward_max_token_len_per_gpu=9", "reward_model.ppo_max_token_len", 9),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "actor.optim.lr_warmup_steps_ratio", 0.1),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "actor.optim.lr_warmup_steps", 0),
        ("critic.optim.warmup_style=cosine", "critic.optim.lr_decay_style", "cosine"),
        ("critic.megatron.virtual_pipeline_model_parallel_size=null", "pipeline.virtual_stages", 2),
        ("critic.megatron.override_transformer_config.recompute_granularity=selective", "critic.recompute",
         "selective"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=['model','optimizer','extra','hf_model']",
         "trainer.save_hf", True),
        ("actor_rollout_ref.nccl_timeout=600", "trainer.timeout_s", 600),
        ("+custom_reward_function.reward_kwargs.method=flexible", "reward.kwargs", {"method": "flexible"}),
        ("custom_reward_function.path=~/f.py", "reward.function", "HOME/f.py:compute_score"),
    ],
)  # fmt: skip
def test_a_value_is_turned_into_ours(word, key, value, home):
    found: Any = parse(word)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == (value.replace("HOME", str(home)) if isinstance(value, str) else value)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("enable", "path"), [("True", "rm"), ("False", None)])
def test_a_reward_model_that_is_not_enabled_is_none(enable, path, order):
    words = [f"reward_model.enable={enable}", "reward_model.model.path=rm"]
    assert load_config(None, words[::order]).reward_model.model_path == path


REFUSED = [
    ("actor_rollout_ref.rollout.name=sglang", "use one of vllm, naive: weights go straight into the parameters"),
    ("actor_rollout_ref.model.use_remove_padding=False", "there is no padding here"),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "parallel.actor.tp"),
    ("actor_rollout_ref.actor.fsdp_config.fsdp_size=4", "parallel.actor.tp and .pp cut a model"),
    ("actor_rollout_ref.actor.strategy=fsdp2", "Megatron-Core"),
    ("actor_rollout_ref.model.lora_rank=32", "no LoRA"),
    ("critic.model.override_config.attn_implementation=eager", "config.json"),
    ("actor_rollout_ref.actor.megatron.expert_model_parallel_size=4", "expert parallelism"),
    ("actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm=True", "config.json"),
    ("actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml", "rollout.multi_turn.environment"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "algorithm.loss=file.py:function"),
    ("actor_rollout_ref.actor.checkpoint.save_contents=['model']", "hf_model"),
    ("reward_model.reward_manager=prime", "reward.sources"),
    ("data.image_key=images", "only text is read"),
    ("data.truncation=middle", "error, filter, left, right"),
    ("trainer.rollout_data_dir=dump", "trainer.rollout_dump_freq"),
    ("trainer.val_only=True", "trainer.val_before_train"),
    ("hydra.run.dir=x", "trainer.default_local_dir"),
    ("hydra/job_logging=none", "trainer.default_local_dir"),
    ("--config-name=mine", "megarl train --config FILE"),
    ("~trainer.logger", "write key=value"),
    ("actor@actor_rollout_ref.actor=mine", "write key=value"),
    ("+trainer.no_such_thing=1", "is not an option"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "reason"), REFUSED)
def test_what_has_no_meaning_here_is_refused_with_its_reason(word, reason):
    (line,) = problems_of(word)
    assert reason in line


def test_everything_refused_is_told_at_once():
    assert len(problems_of(*(word for word, _ in REFUSED))) == len(REFUSED)


def test_the_page_on_verl_holds_the_tables_of_today():
    assert read_page()[1].strip() == render_tables().strip(), "run: python -m tests.verl_tables"
