"""Every option of megarl, its type and its default: plain dataclasses, nothing else.

The YAML file and the command line are merged over these defaults by `load.py`; `validate.py` checks what a type
cannot say. The names that users of verl type are aliases of these (see `verl_names.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megarl.config.choices import (
    AdvEstimator,
    AlgorithmName,
    CorrectionBound,
    CorrectionLevel,
    Decay,
    DType,
    Engine,
    GridOrder,
    KLController,
    KLEstimator,
    LossAggMode,
    ModelDevice,
    ModelEngine,
    Overlong,
    PipelineSchedule,
    PolicyLoss,
    PreferenceLoss,
    Recompute,
    RemoteStyle,
    ResumeMode,
    VerifySync,
)


@dataclass
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"  # the column with chat messages or a plain string
    train_batch_size: int = 1024  # prompts a step
    val_batch_size: int | None = None  # prompts per engine call in validation; unset = all at once
    val_max_samples: int | None = None  # unset = every row
    max_prompt_length: int = 512  # tokens, after the chat template
    max_response_length: int = 512  # tokens
    overlong_prompts: Overlong = Overlong.error
    shuffle: bool = True
    seed: int | None = None  # unset = trainer.seed
    chat_template: str | None = None  # a Jinja template, or the path of a file with one; unset = the tokenizer's own
    raw_prompt: bool = False  # a plain-string prompt is encoded as it is, without chat template
    length_bucketing: bool = False  # batches of prompts of like length


@dataclass
class OptimConfig:
    lr: float = 1e-6
    min_lr: float = 0.0
    lr_warmup_steps: int = 0  # optimizer steps
    lr_warmup_steps_ratio: float = 0.0  # the same as a share of all optimizer steps of the run; one of the two
    lr_decay_style: Decay = Decay.constant
    lr_decay_steps: int | None = None  # unset = all optimizer steps of the run
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass
class OffloadConfig:
    """What of a role leaves the GPU for host memory between its phases. On a CPU only gradients give memory back."""

    params: bool = False
    grads: bool = False
    optimizer: bool = False


@dataclass
class ActorConfig:
    model_path: str | None = None  # a Hugging Face folder, or a model's name on the hub
    tokenizer_path: str | None = None  # unset = model_path
    dtype: DType = DType.auto
    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_epochs: int = 1
    ppo_mini_batch_size: int | None = None  # prompts; unset = data.train_batch_size
    ppo_micro_batch_size: int | None = None  # sequences; unset = only the token budget counts
    ppo_max_token_len: int = 16384  # token budget of a micro-batch
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None  # unset = clip_ratio
    clip_ratio_high: float | None = None  # unset = clip_ratio
    clip_ratio_c: float = 3.0  # dual clip; 0 turns it off
    entropy_coeff: float = 0.0
    loss_agg_mode: LossAggMode = LossAggMode.token_mean
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: KLEstimator = KLEstimator.k3
    shuffle: bool = True  # shuffle sequences before they are cut into mini-batches
    recompute: Recompute = Recompute.none
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    uneven_stages: bool = False  # allow a pipeline size that does not divide the layers


@dataclass
class CriticConfig:
    model_path: str | None = None  # unset = actor.model_path; a policy folder or a saved critic
    dtype: DType = DType.auto
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    ppo_epochs: int | None = None  # unset = actor.ppo_epochs
    ppo_mini_batch_size: int | None = None  # unset = actor's
    ppo_micro_batch_size: int | None = None
    ppo_max_token_len: int = 16384
    cliprange_value: float = 0.5
    loss_agg_mode: LossAggMode = LossAggMode.token_mean
    warmup_steps: int = 0  # steps in which only the critic learns
    recompute: Recompute = Recompute.none
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    uneven_stages: bool = False


@dataclass
class RefConfig:
    model_path: str | None = None  # unset = actor.model_path
    ppo_max_token_len: int = 16384
    offload_params: bool = False
    uneven_stages: bool = False


@dataclass
class ValConfig:
    """Validation draws twice: greedily, and `n` times at `temperature` (n=0: greedy only)."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass
class MultiTurnConfig:
    """Answers of several turns with an environment between them."""

    environment: str | None = None  # path/to/file.py:name; unset = answers of one turn
    kwargs: dict[str, Any] = field(default_factory=dict)  # what it is built with
    max_turns: int = 4
    max_tokens_per_turn: int | None = None  # unset = data.max_response_length // max_turns
    allow_stripped_thinking: bool = False  # go on with a chat template that drops the thinking of earlier turns


@dataclass
class RolloutConfig:
    name: Engine = Engine.vllm
    n: int = 1  # answers per prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    dtype: DType = DType.auto
    gpu_memory_utilization: float = 0.5
    kv_cache_gib: float = 1.0  # vLLM's KV cache on CPU
    max_num_seqs: int = 256
    enforce_eager: bool = True
    verify_sync: VerifySync = VerifySync.first  # which weight transfers are proved by checksum before anything is drawn
    sync_bucket_mib: int = 64  # staging of the weight transfer on each rank
    free_cache_engine: bool = False  # the engine gives weights and KV cache back while the trainer works (GPU memory)
    share_weights: bool = False  # what a rank trains and its engine needs in the same layout exists once
    val: ValConfig = field(default_factory=ValConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)


@dataclass
class SourceConfig:
    """One part of the reward: one of function, remote, model, environment, given is set, the rest tunes it."""

    name: str | None = None  # in metrics; unset = the function's name, the service's host, the model's folder
    weight: float = 1.0  # in the sum; 0 = only measured
    function: str | None = None  # a rule of megarl (numeric, gsm8k, by_data_source), or path/to/file.py:function
    kwargs: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of the function
    remote: str | None = None  # the http(s) address of a scoring service
    model_name: str | None = None  # the name the service knows its model by
    style: RemoteStyle | None = None  # unset = what the last part of the address names, else json
    api_key_env: str | None = None  # the environment variable that holds the service's key
    timeout_s: float = 30.0  # for one request
    num_retries: int = 4  # of a request that failed in a way that may pass
    concurrency: int = 16  # requests at a time
    max_reply_bytes: int = 1048576
    fields: dict[str, Any] = field(default_factory=dict)  # further fields of each request
    environment: bool = False  # what the environment of rollout.multi_turn gave
    given: bool = False  # an object of the program that trains, see Trainer.set_reward_model
    model: str | None = None  # reward_model or cost_model (the section), or a folder for transformers on rank 0
    device: ModelDevice = ModelDevice.auto  # of such a folder's model


@dataclass
class RewardConfig:
    function: str | None = (
        None  # the short form of one source; unset = by_data_source, or the reward model alone if there is one
    )
    kwargs: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of the function
    sources: list[SourceConfig] = field(default_factory=list)  # several sources: the reward is their weighted sum
    max_failure_share: float = 0.5  # a step in which the reward failed on more of the answers than this ends the job
    num_workers: int = 2  # processes for functions in the user's own files; 0 = call them in rank 0 itself
    time_limit_s: float = 60.0  # for one answer in such a process, which is then killed


@dataclass
class ScoringModelConfig:
    """A model with a head of one number (`score.weight`): the reward model, or the cost model."""

    model_path: str | None = None  # a Hugging Face folder; unset = no such role
    engine: ModelEngine | None = None  # unset = transformers with device=cpu, else megatron
    device: ModelDevice = ModelDevice.auto  # of the transformers engine
    dtype: DType = DType.auto
    ppo_max_token_len: int = 16384
    uneven_stages: bool = False


@dataclass
class KLControlConfig:
    type: KLController = KLController.fixed
    kl_coef: float = 0.001
    target_kl: float = 0.1
    horizon: int = 10000


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling: prompts whose answers all score the same are replaced by others."""

    enable: bool = False
    max_num_gen_batches: int = 10  # batches drawn for one step at most; then it goes on with fewer prompts


@dataclass
class RolloutCorrectionConfig:
    """Weights on the policy loss for the gap between the engine's policy and the trainer's, which is always logged."""

    level: CorrectionLevel = CorrectionLevel.none
    bound: CorrectionBound = CorrectionBound.truncate
    lower: float = 0.0
    upper: float = 2.0


@dataclass
class LagrangeConfig:
    """The multiplier between reward and cost (gae_lagrangian)."""

    cost_limit: float = 0.0  # what the mean cost of the answers may be
    init: float = 1.0
    lr: float = 0.1
    min: float = 0.01
    max: float = 10.0
    delay_steps: int = 0  # steps before the multiplier moves for the first time


@dataclass
class AlgorithmConfig:
    name: AlgorithmName | None = None  # sets the options below (and some of the actor's) unless you write them yourself
    adv_estimator: AdvEstimator = AdvEstimator.gae
    advantage: str | None = None  # path/to/file.py:function, instead of adv_estimator
    advantage_needs: list[str] = field(default_factory=list)  # what that function needs: values, siblings, greedy
    policy_loss: PolicyLoss = PolicyLoss.clip
    loss: str | None = None  # path/to/file.py:function, instead of policy_loss
    gamma: float = 1.0
    lam: float = 1.0
    lam_critic: float | None = None  # the critic's targets with another decay; unset = lam
    lam_alpha: float = 0.0  # length-adaptive decay of the policy's advantages, 1 - 1/(lam_alpha · length); 0 = lam
    whiten_advantages: bool = True
    norm_adv_by_std: bool = True  # grpo: divide by the group's standard deviation
    use_kl_in_reward: bool = False
    kl_penalty: KLEstimator = KLEstimator.k1
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    overlong_buffer_len: int = 0  # answers in the last so many tokens below the limit lose score; 0 = off
    overlong_penalty: float = 1.0  # what an answer at the limit loses
    mask_truncated: bool = False  # answers cut at the limit do not count in the loss
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    lagrange: LagrangeConfig = field(default_factory=LagrangeConfig)
    fused_logprob: bool = True  # the head's logits exist for a chunk of tokens at a time; false = for a micro-batch


@dataclass
class PreferenceConfig:
    """Training on answers that somebody preferred, or on answers labelled good or bad, instead of on rewards."""

    loss: PreferenceLoss = PreferenceLoss.dpo
    beta: float = 0.1  # how much a step away from the reference counts; simpo: the scale of the margin
    label_smoothing: float = 0.0  # dpo, simpo: the share of labels that are wrong (cDPO)
    simpo_gamma: float = 0.5  # simpo: the margin that is asked for
    desirable_weight: float = 1.0  # kto
    undesirable_weight: float = 1.0  # kto
    center_coeff: float = 0.0  # reward_model: keeps the scores around 0
    chosen_key: str = "chosen"  # columns of a pair: text, or chat messages that end with the answer
    rejected_key: str = "rejected"
    completion_key: str = "completion"  # columns of a labelled answer (kto)
    label_key: str = "label"


@dataclass
class OpsConfig:
    require_extension: bool = False  # refuse to compute with plain torch where megarl._C is missing


@dataclass
class PipelineConfig:
    """How stages work through micro-batches, for roles with pp > 1."""

    schedule: PipelineSchedule = PipelineSchedule.auto
    virtual_stages: int = 2  # chunks a stage of `interleaved`
    max_live_micro_batches: float | None = None  # activations a stage may hold, in micro-batches; unset = pp + 1


@dataclass
class TrainerConfig:
    project_name: str = "megarl"
    experiment_name: str = "ppo"
    logger: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])  # also: wandb
    default_local_dir: str | None = None  # unset = runs/<project_name>/<experiment_name>
    total_epochs: int = 1
    total_training_steps: int | None = None  # unset = what the epochs hold
    n_gpus_per_node: int = 1  # processes on each node
    nnodes: int = 1
    val_before_train: bool = True
    test_freq: int = -1  # validate every so many steps; -1 = only before and after
    save_freq: int = -1  # a checkpoint every so many steps and after the last; -1 = only when asked to stop
    max_ckpt_to_keep: int | None = None  # unset = all
    async_save: bool = False  # write checkpoints on a thread, from a copy on the host
    max_failed_saves: int = 3  # stop after so many saves in a row that failed
    save_hf: bool = False  # with every checkpoint also the actor as a Hugging Face folder
    save_hf_at_end: bool = False
    resume_mode: ResumeMode = ResumeMode.auto
    resume_from_path: str | None = None  # with resume_mode=path: a checkpoint, or the folder of a run
    max_wall_time_s: int | None = None  # save and leave, with exit code 75, before this time is over
    seed: int = 1
    rollout_dump_freq: int = 1  # write the answers of every so many steps as jsonl; 0 = never
    timeout_s: int = 1800  # a collective that takes longer ends the job
    max_skipped_steps: int = 3  # stop after so many non-finite updates in a row
    num_samples_to_show: int = 3  # answers printed at each validation
    trace: bool = False  # write the time line of every update: a Chrome trace and a picture


@dataclass
class GridConfig:
    """The grid of one role: tp × pp × dp over `ranks`.

    Unset ranks are all ranks, or the first tp × pp × dp of them where dp is given; an unset dp is what the ranks give.
    """

    tp: int = 1
    pp: int = 1
    dp: int | None = None
    ranks: list[int] | None = None
    order: GridOrder = GridOrder.auto


@dataclass
class ParallelConfig:
    actor: GridConfig = field(default_factory=GridConfig)
    critic: GridConfig = field(default_factory=GridConfig)
    cost_critic: GridConfig = field(default_factory=GridConfig)
    ref: GridConfig | None = None  # unset = as the actor
    reward_model: GridConfig = field(default_factory=GridConfig)
    cost_model: GridConfig = field(default_factory=GridConfig)
    rollout: GridConfig = field(default_factory=GridConfig)


@dataclass
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    cost_critic: CriticConfig = field(default_factory=CriticConfig)  # the costs' own critic
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: ScoringModelConfig = field(default_factory=ScoringModelConfig)
    cost: RewardConfig | None = None  # where the cost of an answer comes from, in the same terms as its reward
    cost_model: ScoringModelConfig = field(default_factory=ScoringModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    preference: PreferenceConfig | None = None  # given = train on preferences, see PreferenceConfig
    ops: OpsConfig = field(default_factory=OpsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
