"""The closed sets of values that options take; `schema.py` says which option takes which."""

from __future__ import annotations

from enum import Enum


class Choice(str, Enum):
    """A closed set of values: the configuration refuses every other and names these."""

    def __str__(self) -> str:
        return self.value


class DType(Choice):
    auto = "auto"  # bf16 where the machine computes it fast, else fp32; the choice is printed
    bf16 = "bf16"
    fp32 = "fp32"


class Overlong(Choice):
    error = "error"
    filter = "filter"
    left = "left"
    right = "right"


class Engine(Choice):
    vllm = "vllm"
    naive = "naive"


class AlgorithmName(Choice):
    """A set of defaults for other options: see `algo/algorithms.py` and docs/algorithms.md."""

    ppo = "ppo"
    vapo = "vapo"
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    dapo = "dapo"
    gspo = "gspo"
    cispo = "cispo"
    gmpo = "gmpo"
    rloo = "rloo"
    opo = "opo"
    remax = "remax"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"
    safe_rlhf = "safe_rlhf"
    dpo = "dpo"
    cdpo = "cdpo"
    ipo = "ipo"
    kto = "kto"
    simpo = "simpo"
    reward_model = "reward_model"


class AdvEstimator(Choice):
    gae = "gae"
    gae_lagrangian = "gae_lagrangian"
    grpo = "grpo"
    rloo = "rloo"
    opo = "opo"
    remax = "remax"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"


class PolicyLoss(Choice):
    clip = "clip"
    pg = "pg"
    cispo = "cispo"
    gspo = "gspo"
    gmpo = "gmpo"


class PreferenceLoss(Choice):
    dpo = "dpo"
    ipo = "ipo"
    kto = "kto"
    simpo = "simpo"
    reward_model = "reward_model"


class CorrectionLevel(Choice):
    none = "none"
    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class CorrectionBound(Choice):
    truncate = "truncate"
    mask = "mask"


class KLEstimator(Choice):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KLController(Choice):
    fixed = "fixed"
    adaptive = "adaptive"


class LossAggMode(Choice):
    token_mean = "token-mean"
    seq_mean_token_mean = "seq-mean-token-mean"
    seq_mean_token_sum = "seq-mean-token-sum"
    seq_mean_token_sum_norm = "seq-mean-token-sum-norm"  # over the constant data.max_response_length


class Decay(Choice):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class RemoteStyle(Choice):
    json = "json"
    score = "score"
    rerank = "rerank"
    classify = "classify"
    pooling = "pooling"


class ModelEngine(Choice):
    megatron = "megatron"  # a role on its own grid of ranks, reads the tokens of prompt and answer
    transformers = "transformers"  # held by rank 0, reads text


class ModelDevice(Choice):
    auto = "auto"
    cpu = "cpu"


class Recompute(Choice):
    none = "none"
    selective = "selective"
    full = "full"


class VerifySync(Choice):
    first = "first"
    always = "always"
    never = "never"


class GridOrder(Choice):
    """Which axis of a grid runs fastest over its ranks."""

    auto = "auto"  # the actor's: the one of the two that moves fewer weights into the engines; else as Megatron
    tp_dp_pp = "tp-dp-pp"
    dp_tp_pp = "dp-tp-pp"


class PipelineSchedule(Choice):
    auto = "auto"  # the fastest by simulation with measured costs, within the memory bound
    one_f_one_b = "1f1b"
    interleaved = "interleaved"
    zero_bubble = "zero_bubble"
    fused = "fused"  # actor and critic in one schedule, in opposite directions


class ResumeMode(Choice):
    auto = "auto"
    disable = "disable"
    path = "path"
