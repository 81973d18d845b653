"""The names that users of verl type, as data: what each means here, or why it means nothing.

    actor_rollout_ref.actor.clip_ratio=0.3                        ROWS     -> actor.clip_ratio=0.3
    actor_rollout_ref.model.enable_gradient_checkpointing=True    ROWS     -> actor.recompute=full
    actor_rollout_ref.model.use_remove_padding=True               FOREIGN  -> nothing: sequences are always packed
    actor_rollout_ref.model.use_remove_padding=False              FOREIGN  -> refused, with that reason

Read by names.py; the kinds of row are in aliases.py. docs/verl.md is written from these tables (tests/verl_tables.py).
"""

from __future__ import annotations

from typing import Any

from megarl.config.aliases import SAYS_NOTHING, Alias, Foreign, always, any_value, no_value, read_flag
from megarl.config.choices import AdvEstimator, Choice, DType, Engine, KLEstimator, PolicyLoss, ResumeMode

DEFAULTS: dict[str, Any] = {"rollout.free_cache_engine": True}
"""Where verl's defaults are others than ours and its quick start relies on them: actor, critic and engine share a GPU
of 24 GB. `python -m megarl.trainer.main_ppo` starts from these."""


def _filter_or_nothing(value: Any) -> Any:
    return "filter" if read_flag(value) else SAYS_NOTHING


def _zero_or_nothing(value: Any) -> Any:
    return SAYS_NOTHING if read_flag(value) else 0


def _unset_or_nothing(value: Any) -> Any:
    return SAYS_NOTHING if read_flag(value) else None


def _full_recompute(value: Any) -> str:
    return "full" if read_flag(value) else "none"


def _chunks_or_nothing(value: Any) -> Any:
    return SAYS_NOTHING if str(value) == "1" else value


def _count_or_nothing(value: Any) -> Any:
    return SAYS_NOTHING if str(value).startswith("-") else value


def _saves_hf(value: Any) -> bool:
    parts = {str(part) for part in (value if isinstance(value, list) else [value])}
    if not {"model", "optimizer", "extra"} <= parts <= {"model", "optimizer", "extra", "hf_model"}:
        raise ValueError("[model,optimizer,extra], and hf_model for a Hugging Face folder beside it")
    return "hf_model" in parts


_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_SECTIONS = {_ACTOR: "actor", _REF: "ref", "critic": "critic", "reward_model": "reward_model"}  # verl's -> our role
_FSDP = (f"{_ACTOR}.fsdp_config", f"{_REF}.fsdp_config", "critic.model.fsdp_config", "reward_model.model.fsdp_config")
_MODELS = (_MODEL, "critic.model", "reward_model.model")


def _list_roles() -> list[Alias]:
    """What all roles have: grids, what leaves the GPU, the learning rate."""
    rows: list[Alias] = []
    for section, role in _SECTIONS.items():
        megatron = f"{section}.megatron"
        rows += [
            Alias(f"{megatron}.tensor_model_parallel_size", f"parallel.{role}.tp"),
            Alias(f"{megatron}.pipeline_model_parallel_size", f"parallel.{role}.pp"),
            Alias(f"{megatron}.virtual_pipeline_model_parallel_size", "pipeline.virtual_stages", _chunks_or_nothing,
                  note="used where `pipeline.schedule` is `interleaved`, or `auto` finds that faster; 1 says nothing"),
        ]  # fmt: skip
    parts = {"param_offload": "params", "grad_offload": "grads", "optimizer_offload": "optimizer"}
    for role, backs in {
        "actor": (f"{_ACTOR}.fsdp_config", f"{_ACTOR}.megatron"),
        "critic": ("critic.model.fsdp_config", "critic.fsdp_config", "critic.megatron"),
    }.items():
        rows += [Alias(f"{back}.{name}", f"{role}.offload.{ours}") for back in backs for name, ours in parts.items()]
        recompute = f"{_ACTOR if role == 'actor' else 'critic'}.megatron.override_transformer_config"
        model = _MODEL if role == "actor" else "critic.model"
        rows += [
            Alias(f"{recompute}.recompute_granularity", f"{role}.recompute",
                  overrules=f"{model}.enable_gradient_checkpointing"),
            Alias(f"{model}.enable_gradient_checkpointing", f"{role}.recompute", _full_recompute,
                  note="True = full, False = none"),
        ]  # fmt: skip
    for section, role in ((_ACTOR, "actor"), ("critic", "critic")):
        for name in ("warmup_style", "lr_scheduler_type"):
            rows.append(Alias(f"{section}.optim.{name}", f"{role}.optim.lr_decay_style"))
    return rows


ROWS: tuple[Alias, ...] = (
    # data
    Alias("data.truncation", "data.overlong_prompts"),
    Alias("data.filter_overlong_prompts", "data.overlong_prompts", _filter_or_nothing, overrules="data.truncation",
          note="True = filter; False says nothing"),
    Alias("data.tokenizer", "actor.tokenizer_path"),
    # model
    Alias(f"{_MODEL}.path", "actor.model_path"),
    Alias(f"{_MODEL}.tokenizer_path", "actor.tokenizer_path"),
    Alias(f"{_MODEL}.custom_chat_template", "data.chat_template"),
    Alias("critic.model.path", "critic.model_path"),
    *_list_roles(),
    # actor
    Alias(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "actor.ppo_micro_batch_size",
          note="an upper limit: the token budget `actor.ppo_max_token_len` holds too"),
    Alias(f"{_ACTOR}.ppo_max_token_len_per_gpu", "actor.ppo_max_token_len"),
    Alias(f"{_ACTOR}.grad_clip", "actor.optim.clip_grad"),
    Alias(f"{_ACTOR}.optim.lr_warmup_steps", "actor.optim.lr_warmup_steps", _count_or_nothing,
          note="-1 says nothing"),
    Alias(f"{_ACTOR}.policy_loss.loss_mode", "algorithm.policy_loss"),
    Alias(f"{_ACTOR}.checkpoint.save_contents", "trainer.save_hf", _saves_hf, note="whether it names hf_model"),
    Alias(f"{_ACTOR}.checkpoint.contents", "trainer.save_hf", _saves_hf, note="whether it names hf_model"),
    Alias(f"{_ACTOR}.checkpoint.async_save", "trainer.async_save"),
    Alias(f"{_ACTOR}.*", "actor.*"),
    # reference
    Alias(f"{_REF}.log_prob_max_token_len_per_gpu", "ref.ppo_max_token_len"),
    Alias(f"{_REF}.model.path", "ref.model_path"),
    Alias(f"{_REF}.fsdp_config.param_offload", "ref.offload_params"),
    Alias(f"{_REF}.megatron.param_offload", "ref.offload_params"),
    Alias(f"{_REF}.param_offload", "ref.offload_params"),
    Alias(f"{_REF}.*", "ref.*"),
    # rollout
    Alias(f"{_ROLLOUT}.tensor_model_parallel_size", "parallel.rollout.tp"),
    Alias(f"{_ROLLOUT}.val_kwargs.do_sample", "rollout.val.n", _zero_or_nothing, f"{_ROLLOUT}.val_kwargs.n",
          note="False = 0, greedy only; True says nothing"),
    Alias(f"{_ROLLOUT}.val_kwargs.*", "rollout.val.*"),
    Alias(f"{_ROLLOUT}.prompt_length", "data.max_prompt_length"),
    Alias(f"{_ROLLOUT}.response_length", "data.max_response_length"),
    Alias(f"{_ROLLOUT}.update_weights_bucket_megabytes", "rollout.sync_bucket_mib"),
    Alias(f"{_ROLLOUT}.*", "rollout.*"),
    # critic
    Alias("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size",
          note="an upper limit: the token budget `critic.ppo_max_token_len` holds too"),
    Alias("critic.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len"),
    Alias("critic.grad_clip", "critic.optim.clip_grad"),
    # reward
    Alias("custom_reward_function.reward_kwargs", "reward.kwargs"),
    Alias("reward_model.model.path", "reward_model.model_path"),
    Alias("reward_model.enable", "reward_model.model_path", _unset_or_nothing, overrules="reward_model.model.path",
          note="False = no reward model, whatever its path; True says nothing"),
    Alias("reward_model.forward_max_token_len_per_gpu", "reward_model.ppo_max_token_len"),
    Alias("reward_model.overlong_buffer.len", "algorithm.overlong_buffer_len"),
    Alias("reward_model.overlong_buffer.penalty_factor", "algorithm.overlong_penalty"),
    Alias("reward_model.overlong_buffer.enable", "algorithm.overlong_buffer_len", _zero_or_nothing,
          overrules="reward_model.overlong_buffer.len", note="False = 0; True says nothing"),
    # algorithm, trainer
    Alias("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std"),
    Alias("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.level"),
    Alias("algorithm.rollout_correction.rollout_is_threshold", "algorithm.rollout_correction.upper"),
    Alias("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    Alias("trainer.max_critic_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    Alias("trainer.critic_warmup", "critic.warmup_steps"),
    Alias("trainer.log_val_generations", "trainer.num_samples_to_show"),
    Alias("actor_rollout_ref.nccl_timeout", "trainer.timeout_s"),
    Alias("critic.nccl_timeout", "trainer.timeout_s"),
)  # fmt: skip

REWARD_FILE, REWARD_NAME = "custom_reward_function.path", "custom_reward_function.name"
"""Two names that together are `reward.function`."""

_PACKED = always("there is no padding here: sequences are always packed", True)
_BUDGET = any_value("forward passes follow the token budget: actor.ppo_max_token_len, ref.ppo_max_token_len, "
                    "critic.ppo_max_token_len")  # fmt: skip
_NO_RAY = any_value("there is no Ray here")
_NO_LORA = always("all weights are trained: there is no LoRA here", 0)
_OWN_CODE = always("models are Megatron's, no code of a folder is run", False)
_FSDP_CUT = any_value("nothing here is cut as FSDP does; parallel.actor.tp and .pp cut a model")
_NO_PROFILER = no_value("the time line of updates is trainer.trace=true")

FOREIGN: dict[str, Foreign] = {
    # data
    "data.reward_fn_key": always("the column is data_source", "data_source"),
    "data.return_raw_chat": any_value("chats are kept beside their tokens where something reads them"),
    "data.return_raw_input_ids": any_value("ids are never padded, so there are no raw ones beside them"),
    "data.return_full_prompt": any_value("the whole prompt is always kept"),
    "data.return_multi_modal_inputs": any_value("only text is read"),
    "data.filter_overlong_prompts_workers": any_value("all prompts are encoded at once"),
    "data.dataloader_num_workers": any_value("the data is in memory, no worker loads it"),
    "data.validation_shuffle": always("held-out rows keep their order", False),
    "data.use_shm": any_value("files are read where they are"),
    "data.trust_remote_code": _OWN_CODE,
    "data.train_max_samples": always("all rows are used; data.val_max_samples limits held-out ones", -1),
    "data.custom_cls.*": no_value("data comes from files: parquet, jsonl, json, csv"),
    "data.sampler.*": no_value("the order of rows follows data.shuffle and data.seed"),
    "data.datagen.*": no_value("data comes from files; filter_groups draws new prompts for flat groups"),
    "data.image_key": no_value("only text is read"),
    "data.video_key": no_value("only text is read"),
    "data.apply_chat_template_kwargs.*": no_value("write what the template shall do into data.chat_template"),
    # models
    **{f"{model}.{name}": _PACKED for model in _MODELS for name in ("use_remove_padding", "use_rmpad")},
    **{f"{model}.trust_remote_code": _OWN_CODE for model in _MODELS},
    **{f"{model}.external_lib": no_value("models are those of megarl/models") for model in _MODELS},
    **{f"{model}.override_config.*": no_value("the model is what config.json in its folder says") for model in _MODELS},
    **{f"{model}.{name}": any_value("the kernels are megarl's own; algorithm.fused_logprob=false goes back to plain "
                                    "log-probs")
       for model in _MODELS for name in ("use_liger", "use_fused_kernels", "fused_kernel_options.*")},
    **{f"{model}.use_shm": any_value("weights are read by slices, each rank its own") for model in _MODELS},
    **{f"{model}.lora_rank": _NO_LORA for model in _MODELS},
    **{f"{model}.{name}": no_value(_NO_LORA.reason) for model in _MODELS
       for name in ("lora_alpha", "lora_adapter_path", "target_modules", "exclude_modules")},
    **{f"{model}.enable_activation_offload": always("activations are made again instead: actor.recompute", False)
       for model in _MODELS},
    f"{_MODEL}.hf_config_path": no_value("config.json is read from the model's folder"),
    "critic.model.tokenizer_path": any_value("actor.tokenizer_path serves all roles"),
    "reward_model.model.input_tokenizer": no_value(
        "a Megatron reward model reads the actor's tokens; reward_model.engine=transformers reads text with its own"
    ),
    # back ends
    **{f"{section}.strategy": always("every model here runs on Megatron-Core", "megatron") for section in _SECTIONS},
    "actor_rollout_ref.hybrid_engine": always("all roles live in one set of processes", True),
    "model_engine": always("every model here runs on Megatron-Core", "megatron", "mcore"),
    **{f"{fsdp}.fsdp_size": always(_FSDP_CUT.reason, -1, 1) for fsdp in _FSDP},
    **{f"{fsdp}.offload_policy": always("param_offload and optimizer_offload say what leaves the GPU", False)
       for fsdp in _FSDP},
    **{f"{fsdp}.model_dtype": always("masters are fp32; actor.dtype says what is computed in", "fp32", "float32")
       for fsdp in _FSDP},
    **{f"{fsdp}.{name}": _FSDP_CUT for fsdp in _FSDP
       for name in ("wrap_policy.*", "reshard_after_forward", "forward_prefetch", "use_orig_params")},
    **{f"reward_model.{name}param_offload": any_value(
        "a reward model stays where it is; parallel.reward_model.ranks or reward_model.device=cpu moves it"
    ) for name in ("model.fsdp_config.", "megatron.", "")},
    **{f"{section}.ulysses_sequence_parallel_size": always(
        "sequences are cut over the ranks of parallel.actor.tp, not by Ulysses", 1) for section in _SECTIONS},
    **{f"{section}.use_torch_compile": any_value("nothing of the trainer is compiled") for section in _SECTIONS},
    **{f"{section}.{name}": any_value("entropy is computed chunk by chunk") for section in _SECTIONS
       for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")},
    **{f"{section}.profiler.*": _NO_PROFILER for section in (*_SECTIONS, _ROLLOUT)},
    **{f"{section}.megatron.{name}": row for section in _SECTIONS for name, row in {
        "context_parallel_size": always("context parallelism does not exist here yet", 1),
        "expert_model_parallel_size": always("expert parallelism does not exist here yet", 1),
        "expert_tensor_parallel_size": always("expert parallelism does not exist here yet", 1),
        "sequence_parallel": any_value("sequence parallelism is on whenever tp > 1"),
        "use_distributed_optimizer": any_value("the optimizer is shared out wherever dp > 1"),
        "use_dist_checkpointing": always("actor.model_path may be a Megatron folder itself", False),
        "dist_checkpointing_path": no_value("actor.model_path may be a Megatron folder itself"),
        "use_mbridge": any_value("weights are read from Hugging Face folders by slices"),
        "seed": no_value("trainer.seed seeds everything"),
        "override_transformer_config.recompute_method": any_value("actor.recompute=full recomputes every layer"),
        "override_transformer_config.recompute_num_layers": any_value("actor.recompute=full recomputes every layer"),
        "override_transformer_config.recompute_modules": any_value("actor.recompute=selective recomputes attention"),
        "override_transformer_config.*": no_value("the model is what config.json in its folder says"),
        "override_ddp_config.*": no_value("gradients are fp32 and added up as the pipeline leaves them"),
        "override_mcore_model_config.*": no_value("the model is what config.json in its folder says"),
    }.items()},
    **{f"{section}.load_weight": always("weights are always read", True) for section in _SECTIONS},
    **{f"{section}.data_loader_seed": no_value("trainer.seed seeds everything") for section in _SECTIONS},
    # actor, critic, reference
    f"{_ACTOR}.use_dynamic_bsz": any_value("micro-batches always follow the token budget"),
    "critic.use_dynamic_bsz": any_value("micro-batches always follow the token budget"),
    **{f"{section}.optim.{name}": row for section in (_ACTOR, "critic") for name, row in {
        "total_training_steps": always("the run knows its steps; optim.lr_decay_steps sets others", -1),
        "min_lr_ratio": always("set optim.min_lr, the rate itself", 0, 0.0),
        "num_cycles": always("a cosine falls once; lr_decay_style", 0.5),
        "optimizer": always("the optimizer is AdamW", "adam", "adamw"),
        "type": always("the optimizer is AdamW", "adam", "adamw"),
    }.items()},
    f"{_ACTOR}.checkpoint.load_contents": any_value("a checkpoint is always read whole"),
    "critic.checkpoint.*": any_value("actor and critic are saved together"),
    f"{_ACTOR}.freeze_vision_tower": any_value("only text is read"),
    f"{_ACTOR}.tis_imp_ratio_cap": always(
        "set algorithm.rollout_correction.level=token and .upper", -1, "-1.0"
    ),
    "critic.enable": any_value("algorithm.adv_estimator says whether there is a critic"),
    "critic.rollout_n": any_value("the critic sees every answer; rollout.n says how many"),
    "critic.shuffle": any_value("the critic follows actor.shuffle"),
    **{f"{section}.{name}": _BUDGET for section, names in {
        _ROLLOUT: ("log_prob_micro_batch_size_per_gpu", "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz",
                   "log_prob_max_token_len_per_gpu", "micro_batch_size"),
        _REF: ("log_prob_micro_batch_size_per_gpu", "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz"),
        "critic": ("forward_micro_batch_size_per_gpu", "forward_micro_batch_size", "forward_max_token_len_per_gpu"),
        "reward_model": ("micro_batch_size_per_gpu", "micro_batch_size", "use_dynamic_bsz"),
    }.items() for name in names},
    # rollout
    f"{_ROLLOUT}.mode": any_value("an engine is given all prompts of a step at once, and no answer waits for another"),
    f"{_ROLLOUT}.do_sample": always("answers are sampled; a greedy one is validation's", True),
    f"{_ROLLOUT}.ignore_eos": always("an answer ends with its end token", False),
    f"{_ROLLOUT}.use_fire_sampling": always("answers are sampled at rollout.temperature", False),
    f"{_ROLLOUT}.calculate_log_probs": any_value("the engine's log-probs are always kept"),
    f"{_ROLLOUT}.load_format": any_value("the trainer sends the weights"),
    f"{_ROLLOUT}.layered_summon": any_value("each rank receives the slices that it lacks"),
    f"{_ROLLOUT}.max_model_len": any_value("it is data.max_prompt_length + data.max_response_length"),
    **{f"{_ROLLOUT}.{name}": any_value("vLLM's own choice is kept") for name in (
        "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching", "cudagraph_capture_sizes",
        "disable_log_stats", "swap_space", "multi_stage_wake_up", "skip_tokenizer_init", "engine_kwargs.*")},
    **{f"{_ROLLOUT}.{name}": always("an engine is parallel.rollout.tp ranks; what is left makes more engines", 1)
       for name in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size")},
    f"{_ROLLOUT}.over_sample_rate": always("every answer is waited for", 0, 0.0),
    f"{_ROLLOUT}.skip_rollout": always("answers are drawn in every step", False),
    f"{_ROLLOUT}.multi_turn.enable": always("rollout.multi_turn.environment names an environment", False),
    f"{_ROLLOUT}.multi_turn.format": any_value("an environment reads the answers itself"),
    f"{_ROLLOUT}.multi_turn.*": no_value("rollout.multi_turn.environment names an environment"),
    f"{_ROLLOUT}.agent.num_workers": any_value("the engine lives in the trainer's processes"),
    f"{_ROLLOUT}.agent.*": no_value("rollout.multi_turn.environment names an environment"),
    f"{_ROLLOUT}.chat_scheduler": no_value("rollout.multi_turn.environment names an environment"),
    # reward, algorithm
    "reward_model.reward_manager": always("reward.sources says where rewards come from", "naive", "dapo"),
    "reward_model.launch_reward_fn_async": any_value("reward models score while rank 0 asks the other sources"),
    "reward_model.max_length": no_value("prompt and answer are read whole"),
    "reward_model.enable_resource_pool": always("parallel.reward_model.ranks places the reward model", False),
    "reward_model.n_gpus_per_node": always("parallel.reward_model places the reward model", 0),
    "reward_model.nnodes": always("parallel.reward_model places the reward model", 0),
    "reward_model.sandbox_fusion.*": no_value("a service is one of reward.sources: {remote: http://...}"),
    "algorithm.filter_groups.metric": always("groups are compared by their scores", "score"),
    "algorithm.use_pf_ppo": always("algorithm.advantage=file.py:function is an advantage of your own", False),
    "algorithm.pf_ppo.*": no_value("algorithm.advantage=file.py:function is an advantage of your own"),
    # trainer
    "trainer.balance_batch": any_value("sequences are always balanced over data-parallel ranks"),
    "trainer.del_local_ckpt_after_load": any_value(
        "a checkpoint stays until trainer.max_ckpt_to_keep newer ones are complete"
    ),
    "trainer.default_hdfs_dir": no_value("a run is written to trainer.default_local_dir"),
    "trainer.device": any_value("the device is what the machine has: a GPU, else the CPU"),
    "trainer.use_legacy_worker_impl": any_value("there are no workers here"),
    "trainer.val_only": always("a run trains; trainer.val_before_train=true validates first", False),
    "trainer.esi_redundant_time": always("trainer.max_wall_time_s ends a run in time", 0),
    "trainer.rollout_data_dir": no_value("answers go to the run's folder every trainer.rollout_dump_freq steps"),
    "trainer.validation_data_dir": no_value("trainer.num_samples_to_show answers are printed at each validation"),
    "trainer.ray_wait_register_center_timeout": _NO_RAY,
    "trainer.ray_kwargs.*": _NO_RAY,
    "ray_init.*": _NO_RAY,
    "ray_kwargs.*": _NO_RAY,
    "global_profiler.*": _NO_PROFILER,
    # Hydra
    "hydra.config_name": always(
        "Hydra's files are not read; megarl train --config FILE reads one", "ppo_trainer", "ppo_megatron_trainer",
        "ppo_trainer.yaml", "ppo_megatron_trainer.yaml",
    ),
    "hydra.config_path": always(
        "Hydra's files are not read; megarl train --config FILE reads one", "config", "./config"
    ),
    "hydra.*": no_value("there is no Hydra here; trainer.default_local_dir is the folder of a run"),
}  # fmt: skip

SYNONYMS: dict[type[Choice], dict[str, Choice]] = {
    # other words for the values of a choice
    DType: {"bfloat16": DType.bf16, "float32": DType.fp32},
    KLEstimator: {"kl": KLEstimator.k1, "mse": KLEstimator.k2, "low_var_kl": KLEstimator.k3},
    ResumeMode: {"resume_path": ResumeMode.path},
    AdvEstimator: {
        **{f"AdvantageEstimator.{estimator.name.upper()}": estimator for estimator in AdvEstimator},
        "grpo_vectorized": AdvEstimator.grpo,
        "rloo_vectorized": AdvEstimator.rloo,
    },
    PolicyLoss: {"vanilla": PolicyLoss.clip, "gpg": PolicyLoss.pg, "geo_mean": PolicyLoss.gmpo},
    Engine: {"hf": Engine.naive},
}

REFUSED_VALUES: dict[str, dict[str, str]] = {
    # our key -> a value of verl's, and why it is not there
    "rollout.name": {
        name: "weights go straight into the parameters of vLLM, which runs in the trainer's own processes"
        for name in ("sglang", "trtllm")
    },
    "algorithm.policy_loss": {
        name: "write it as a function of your own, algorithm.loss=file.py:function" for name in ("clip_cov", "kl_cov")
    },
    "algorithm.adv_estimator": {
        name: "write it as a function of your own, algorithm.advantage=file.py:function"
        for name in ("grpo_passk", "gpg", "optimal_token_baseline")
    },
}
