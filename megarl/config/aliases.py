"""The names that users of verl type, and the options of ours that they mean.

Read by `load.py`. A row says: this name, our key, and how the value is converted when it differs. A name that ends
in `.*` stands for every option below it that has the same name on our side, so that
`actor_rollout_ref.actor.clip_ratio` is `actor.clip_ratio`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megarl.config.choices import AdvEstimator, Choice, DType, KLEstimator, PolicyLoss, ResumeMode

SAYS_NOTHING = object()
"""What a conversion returns when the value leaves the option to others."""


@dataclass(frozen=True)
class Alias:
    """A foreign name of the option `key`; `overrules` is another foreign name that gives way when this one speaks."""

    name: str
    key: str
    convert: Callable[[Any], Any] | None = None
    overrules: str | None = None


def read_flag(value: Any) -> bool:
    """True or False from what YAML or a command line holds. Raises ValueError for anything else."""
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if str(value).lower() not in words:
        raise ValueError("true or false")
    return words[str(value).lower()]


def _filter_or_nothing(value: Any) -> Any:
    return "filter" if read_flag(value) else SAYS_NOTHING


def _zero_or_nothing(value: Any) -> Any:
    return SAYS_NOTHING if read_flag(value) else 0


def _full_recompute(value: Any) -> str:
    return "full" if read_flag(value) else "none"


_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"


def _offload_rows(prefix: str, role: str) -> list[Alias]:
    """verl's names of what leaves the GPU, of both of its back ends."""
    parts = {"param_offload": "params", "grad_offload": "grads", "optimizer_offload": "optimizer"}
    return [
        Alias(f"{prefix}.{back_end}.{name}", f"{role}.offload.{ours}")
        for back_end in ("fsdp_config", "megatron")
        for name, ours in parts.items()
    ]


ROWS: tuple[Alias, ...] = (
    # data
    Alias("data.truncation", "data.overlong_prompts"),
    Alias("data.filter_overlong_prompts", "data.overlong_prompts", _filter_or_nothing, overrules="data.truncation"),
    Alias("data.tokenizer", "actor.tokenizer_path"),
    # model
    Alias("actor_rollout_ref.model.path", "actor.model_path"),
    Alias("actor_rollout_ref.model.tokenizer_path", "actor.tokenizer_path"),
    Alias("actor_rollout_ref.model.custom_chat_template", "data.chat_template"),
    Alias("actor_rollout_ref.model.enable_gradient_checkpointing", "actor.recompute", _full_recompute),
    Alias("critic.model.path", "critic.model_path"),
    Alias("critic.model.enable_gradient_checkpointing", "critic.recompute", _full_recompute),
    # actor
    Alias(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "actor.ppo_micro_batch_size"),
    Alias(f"{_ACTOR}.ppo_max_token_len_per_gpu", "actor.ppo_max_token_len"),
    Alias(f"{_ACTOR}.grad_clip", "actor.optim.clip_grad"),
    Alias(f"{_ACTOR}.policy_loss.loss_mode", "algorithm.policy_loss"),
    Alias(f"{_ACTOR}.megatron.tensor_model_parallel_size", "parallel.actor.tp"),
    Alias(f"{_ACTOR}.megatron.pipeline_model_parallel_size", "parallel.actor.pp"),
    *_offload_rows(_ACTOR, "actor"),
    Alias(f"{_ACTOR}.*", "actor.*"),
    # reference
    Alias(f"{_REF}.log_prob_max_token_len_per_gpu", "ref.ppo_max_token_len"),
    Alias(f"{_REF}.megatron.tensor_model_parallel_size", "parallel.ref.tp"),
    Alias(f"{_REF}.megatron.pipeline_model_parallel_size", "parallel.ref.pp"),
    Alias(f"{_REF}.model.path", "ref.model_path"),
    Alias(f"{_REF}.fsdp_config.param_offload", "ref.offload_params"),
    Alias(f"{_REF}.megatron.param_offload", "ref.offload_params"),
    Alias(f"{_REF}.*", "ref.*"),
    # rollout
    Alias(f"{_ROLLOUT}.tensor_model_parallel_size", "parallel.rollout.tp"),
    Alias(f"{_ROLLOUT}.val_kwargs.do_sample", "rollout.val.n", _zero_or_nothing, f"{_ROLLOUT}.val_kwargs.n"),
    Alias(f"{_ROLLOUT}.val_kwargs.*", "rollout.val.*"),
    Alias(f"{_ROLLOUT}.prompt_length", "data.max_prompt_length"),
    Alias(f"{_ROLLOUT}.response_length", "data.max_response_length"),
    Alias(f"{_ROLLOUT}.*", "rollout.*"),
    # critic
    Alias("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size"),
    Alias("critic.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len"),
    Alias("critic.grad_clip", "critic.optim.clip_grad"),
    Alias("critic.megatron.tensor_model_parallel_size", "parallel.critic.tp"),
    Alias("critic.megatron.pipeline_model_parallel_size", "parallel.critic.pp"),
    *_offload_rows("critic", "critic"),
    Alias("critic.model.fsdp_config.param_offload", "critic.offload.params"),
    Alias("critic.model.fsdp_config.optimizer_offload", "critic.offload.optimizer"),
    # reward, algorithm, trainer
    Alias("custom_reward_function.reward_kwargs", "reward.kwargs"),
    Alias("reward_model.model.path", "reward_model.model_path"),
    Alias("reward_model.megatron.tensor_model_parallel_size", "parallel.reward_model.tp"),
    Alias("reward_model.megatron.pipeline_model_parallel_size", "parallel.reward_model.pp"),
    Alias("reward_model.overlong_buffer.len", "algorithm.overlong_buffer_len"),
    Alias("reward_model.overlong_buffer.penalty_factor", "algorithm.overlong_penalty"),
    Alias(
        "reward_model.overlong_buffer.enable",
        "algorithm.overlong_buffer_len",
        _zero_or_nothing,
        overrules="reward_model.overlong_buffer.len",
    ),
    Alias("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std"),
    Alias("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    Alias("trainer.max_critic_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    Alias("trainer.critic_warmup", "critic.warmup_steps"),
    Alias("trainer.log_val_generations", "trainer.num_samples_to_show"),
)

REWARD_FILE, REWARD_NAME = "custom_reward_function.path", "custom_reward_function.name"
"""Two names that together are `reward.function`."""

FIXED: dict[str, tuple[Any, str]] = {
    # name -> the one value that is accepted, and why
    f"{_ACTOR}.strategy": ("megatron", "every model here runs on Megatron-Core"),
    f"{_REF}.strategy": ("megatron", "every model here runs on Megatron-Core"),
    "critic.strategy": ("megatron", "every model here runs on Megatron-Core"),
    "actor_rollout_ref.model.use_remove_padding": (True, "sequences are always packed"),
    "critic.model.use_remove_padding": (True, "sequences are always packed"),
    "actor_rollout_ref.hybrid_engine": (True, "all roles live in one set of processes"),
    "algorithm.filter_groups.metric": ("score", "groups are compared by their scores"),
    "algorithm.use_pf_ppo": (False, "it does not exist here"),
    f"{_ACTOR}.megatron.context_parallel_size": (1, "context parallelism does not exist here yet"),
    f"{_ACTOR}.megatron.expert_model_parallel_size": (1, "expert parallelism does not exist here yet"),
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": (
        None,
        "they are pipeline.schedule=interleaved with pipeline.virtual_stages",
    ),
    "critic.megatron.context_parallel_size": (1, "context parallelism does not exist here yet"),
    "critic.megatron.virtual_pipeline_model_parallel_size": (
        None,
        "they are pipeline.schedule=interleaved with pipeline.virtual_stages",
    ),
}

WITHOUT_EFFECT: dict[str, str] = {
    # accepted with a warning: nothing here depends on it, and no result changes
    f"{_ACTOR}.use_dynamic_bsz": "micro-batches always follow the token budget",
    "critic.use_dynamic_bsz": "micro-batches always follow the token budget",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": "forward passes follow actor.ppo_max_token_len",
    f"{_ROLLOUT}.log_prob_micro_batch_size": "forward passes follow actor.ppo_max_token_len",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": "forward passes follow actor.ppo_max_token_len",
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": "forward passes follow actor.ppo_max_token_len",
    f"{_REF}.log_prob_micro_batch_size_per_gpu": "forward passes follow ref.ppo_max_token_len",
    f"{_REF}.log_prob_micro_batch_size": "forward passes follow ref.ppo_max_token_len",
    f"{_REF}.log_prob_use_dynamic_bsz": "forward passes follow ref.ppo_max_token_len",
    "critic.forward_micro_batch_size_per_gpu": "forward passes follow critic.ppo_max_token_len",
    "critic.forward_max_token_len_per_gpu": "forward passes follow critic.ppo_max_token_len",
    "trainer.del_local_ckpt_after_load": "a checkpoint stays until trainer.max_ckpt_to_keep newer ones are complete",
    "trainer.balance_batch": "sequences are always balanced over data-parallel ranks",
    f"{_ACTOR}.megatron.sequence_parallel": "sequence parallelism is on whenever tp > 1",
    "critic.megatron.sequence_parallel": "sequence parallelism is on whenever tp > 1",
}

SYNONYMS: dict[type[Choice], dict[str, Choice]] = {
    # other words for the values of a choice
    DType: {"bfloat16": DType.bf16, "float32": DType.fp32},
    KLEstimator: {"kl": KLEstimator.k1, "mse": KLEstimator.k2, "low_var_kl": KLEstimator.k3},
    ResumeMode: {"resume_path": ResumeMode.path},
    AdvEstimator: {f"AdvantageEstimator.{estimator.name.upper()}": estimator for estimator in AdvEstimator},
    PolicyLoss: {"vanilla": PolicyLoss.clip, "gpg": PolicyLoss.pg, "geo_mean": PolicyLoss.gmpo},
}


def expand_aliases(keys: Iterable[str]) -> dict[str, Alias]:
    """The table by name, with the rows that end in `.*` written out for every one of our `keys` they fit."""
    table: dict[str, Alias] = {row.name: row for row in ROWS if not row.name.endswith(".*")}
    keys = list(keys)
    for row in ROWS:
        if not row.name.endswith(".*"):
            continue
        for key in keys:
            if key.startswith(row.key[:-1]):
                name = row.name[:-1] + key.removeprefix(row.key[:-1])
                table.setdefault(name, Alias(name, key))
    return table
