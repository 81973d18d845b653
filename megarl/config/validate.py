"""What the types of the schema cannot say: `find_problems` names every contradiction at once, before anything heavy.

    config, number of ranks, facts of the model  ->  one line for each problem: key, value, rule, way out

Pure apart from looking at files: whether they exist, and the `config.json` of a model.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.check_algorithm import check_algorithm, check_preference
from megarl.config.load import resolve_config
from megarl.config.model_facts import ModelFacts, read_model_facts
from megarl.config.needs import count_together, model_roles, trained_roles
from megarl.config.schema import Config, Engine, GridConfig, PipelineSchedule, PreferenceLoss, ResumeMode
from megarl.config.sources import MODEL_ROLES, check_sources
from megarl.parallel.topology import Topology, plan_topology

LOGGERS = ("console", "jsonl", "tensorboard", "wandb")
DATA_KINDS = (".parquet", ".jsonl", ".json", ".csv")

_Rule = tuple[str, Callable[[Any], bool]]
_AT_LEAST_1: _Rule = ("1 or more", lambda x: x >= 1)
_AT_LEAST_0: _Rule = ("0 or more", lambda x: x >= 0)
_POSITIVE: _Rule = ("more than 0", lambda x: x > 0)
_FRACTION: _Rule = ("between 0 and 1", lambda x: 0 <= x <= 1)
_INSIDE: _Rule = ("more than 0 and less than 1", lambda x: 0 < x < 1)
_EVERY: _Rule = ("-1 (never) or 1 or more", lambda x: x == -1 or x >= 1)
_TOP_P: _Rule = ("more than 0 and at most 1", lambda x: 0 < x <= 1)
_TOP_K: _Rule = ("-1 (all) or more", lambda x: x >= -1)

_OPTIM: dict[str, _Rule] = {
    "optim.lr": _POSITIVE,
    "optim.min_lr": _AT_LEAST_0,
    "optim.lr_warmup_steps": _AT_LEAST_0,
    "optim.lr_warmup_steps_ratio": _FRACTION,
    "optim.lr_decay_steps": _AT_LEAST_1,
    "optim.weight_decay": _AT_LEAST_0,
    "optim.eps": _POSITIVE,
    "optim.clip_grad": _AT_LEAST_0,
}

_CRITIC: dict[str, _Rule] = {
    "ppo_epochs": _AT_LEAST_1,
    "ppo_mini_batch_size": _AT_LEAST_1,
    "ppo_micro_batch_size": _AT_LEAST_1,
    "cliprange_value": _POSITIVE,
    "warmup_steps": _AT_LEAST_0,
}

RANGES: dict[str, _Rule] = {
    **{f"{role}.{name}": rule for role in ("actor", "critic", "cost_critic") for name, rule in _OPTIM.items()},
    **{f"{role}.{name}": rule for role in ("critic", "cost_critic") for name, rule in _CRITIC.items()},
    "data.train_batch_size": _AT_LEAST_1,
    "data.val_batch_size": _AT_LEAST_1,
    "data.val_max_samples": _AT_LEAST_1,
    "data.max_prompt_length": _AT_LEAST_1,
    "data.max_response_length": _AT_LEAST_1,
    "data.seed": _AT_LEAST_0,
    "actor.ppo_epochs": _AT_LEAST_1,
    "actor.ppo_mini_batch_size": _AT_LEAST_1,
    "actor.ppo_micro_batch_size": _AT_LEAST_1,
    "actor.clip_ratio": _INSIDE,
    "actor.clip_ratio_low": _TOP_P,
    "actor.clip_ratio_high": _POSITIVE,
    "actor.clip_ratio_c": ("0 (off) or more than 1", lambda x: x == 0 or x > 1),
    "actor.entropy_coeff": _AT_LEAST_0,
    "actor.kl_loss_coef": _AT_LEAST_0,
    "rollout.n": _AT_LEAST_1,
    "rollout.gpu_memory_utilization": _TOP_P,
    "rollout.kv_cache_gib": _POSITIVE,
    "rollout.max_num_seqs": _AT_LEAST_1,
    "rollout.sync_bucket_mib": _AT_LEAST_1,
    "rollout.val.n": _AT_LEAST_0,
    "rollout.multi_turn.max_turns": _AT_LEAST_1,
    "rollout.multi_turn.max_tokens_per_turn": _AT_LEAST_1,
    "rollout.val.top_p": _TOP_P,
    "rollout.val.top_k": _TOP_K,
    "reward.max_failure_share": _FRACTION,
    "reward.num_workers": _AT_LEAST_0,
    "reward.time_limit_s": _POSITIVE,
    "algorithm.gamma": _FRACTION,
    "algorithm.lam": _FRACTION,
    "algorithm.lam_critic": _FRACTION,
    "algorithm.lam_alpha": _AT_LEAST_0,
    "algorithm.kl_ctrl.kl_coef": _AT_LEAST_0,
    "pipeline.virtual_stages": ("2 or more", lambda x: x >= 2),
    "pipeline.max_live_micro_batches": _AT_LEAST_1,
    "algorithm.overlong_buffer_len": _AT_LEAST_0,
    "algorithm.overlong_penalty": _AT_LEAST_0,
    "algorithm.filter_groups.max_num_gen_batches": _AT_LEAST_1,
    "algorithm.lagrange.lr": _AT_LEAST_0,
    "algorithm.lagrange.delay_steps": _AT_LEAST_0,
    "preference.beta": _POSITIVE,
    "preference.label_smoothing": ("0 or more and less than 0.5", lambda x: 0 <= x < 0.5),
    "preference.simpo_gamma": _AT_LEAST_0,
    "preference.desirable_weight": _AT_LEAST_0,
    "preference.undesirable_weight": _AT_LEAST_0,
    "preference.center_coeff": _AT_LEAST_0,
    "trainer.total_epochs": _AT_LEAST_1,
    "trainer.total_training_steps": _AT_LEAST_1,
    "trainer.n_gpus_per_node": _AT_LEAST_1,
    "trainer.nnodes": _AT_LEAST_1,
    "trainer.test_freq": _EVERY,
    "trainer.save_freq": _EVERY,
    "trainer.max_ckpt_to_keep": _AT_LEAST_1,
    "trainer.max_failed_saves": _AT_LEAST_0,
    "trainer.max_wall_time_s": _AT_LEAST_1,
    "trainer.seed": _AT_LEAST_0,
    "trainer.rollout_dump_freq": _AT_LEAST_0,
    "trainer.timeout_s": _AT_LEAST_1,
    "trainer.max_skipped_steps": _AT_LEAST_1,
    "trainer.num_samples_to_show": _AT_LEAST_0,
}
_SIZES = [key for key in RANGES if key.endswith("batch_size") or key == "rollout.n"]


def find_problems(
    config: Config, world_size: int, model: ModelFacts | None = None, not_found: Mapping[str, str] | None = None
) -> list[str]:
    """Everything that stops this configuration from running; empty when it can.

    Args:
        config: resolved or not.
        world_size: ranks of the job.
        model: the actor's model, or None = read it from `actor.model_path`. Other roles with a folder of their own
            are read from there.
        not_found: for models that `load_run` looked for in vain, why.
    """
    written, config = config, resolve_config(config)
    problems = list(_check_ranges(written))
    models = _read_models(config, model, problems, not_found or {})
    grids = _plan_grids(config, world_size, problems)
    problems += _check_files(config)
    if config.preference is None:
        problems += check_sources(written, config)
        problems += _check_sampling(config)
        problems += check_algorithm(config)
    else:
        problems += check_preference(config)
    problems += _check_pipeline(config, grids)
    if all(_get(config, key) is None or _get(config, key) >= 1 for key in _SIZES):
        problems += _check_batches(config, {role: grid.dp_size for role, grid in grids.items()})
    problems += _check_lengths(config, models.get("actor"))
    for role, topology in grids.items():
        is_like_actor = role == "ref" and written.parallel.ref is None and models.get("ref") == models.get("actor")
        if role in models and not is_like_actor:
            problems += _check_model_fits(config, role, topology, models[role])
    return problems


def _get(config: object, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _check_ranges(config: Config) -> Iterator[str]:
    for key, (rule, holds) in RANGES.items():
        if key.startswith("preference.") and config.preference is None:
            continue
        value = _get(config, key)
        if value is not None and not holds(value):
            yield f"{key}={value} must be {rule}"
    for role in ("actor", "critic", "cost_critic"):
        optim = _get(config, role).optim
        if optim.min_lr > optim.lr > 0:
            yield f"{role}.optim.min_lr={optim.min_lr} is above {role}.optim.lr={optim.lr}; lower it"
        if optim.lr_warmup_steps and optim.lr_warmup_steps_ratio:
            yield f"{role}.optim.lr_warmup_steps and {role}.optim.lr_warmup_steps_ratio are both set; keep one"
        if not all(0 <= beta < 1 for beta in optim.betas):
            yield f"{role}.optim.betas={list(optim.betas)} must be two numbers from 0 up to, not including, 1"
    for name in config.trainer.logger:
        if name not in LOGGERS:
            near = difflib.get_close_matches(name, LOGGERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"trainer.logger names {name!r}, which is not one of {', '.join(LOGGERS)}{hint}"


def _read_models(
    config: Config, model: ModelFacts | None, problems: list[str], not_found: Mapping[str, str]
) -> dict[str, ModelFacts]:
    """The facts of each role's model, by role; what cannot be read becomes a problem."""
    actor_path = config.actor.model_path
    if actor_path is None:
        problems.append("actor.model_path is not set; give it the folder of a Hugging Face model")
    facts: dict[str, ModelFacts] = {} if model is None else {"actor": model}
    for role in model_roles(config):
        path = _get(config, role).model_path
        if role in facts or path is None:
            continue
        if path == actor_path and role != "actor":
            facts |= {role: facts["actor"]} if "actor" in facts else {}
            continue
        try:
            facts[role] = read_model_facts(path)
        except ValueError as error:
            problems.append(f"{role}.model_path={path}: {not_found.get(path, error)}")
    for role in model_roles(config):
        if role in facts and "actor" in facts and facts[role].vocab_size != facts["actor"].vocab_size:
            problems.append(
                f"{role}.model_path={_get(config, role).model_path} has a vocabulary of {facts[role].vocab_size}, the "
                f"actor one of {facts['actor'].vocab_size}; they must share one tokenizer, choose a model of one family"
            )
    if "actor" in facts:
        facts["rollout"] = facts["actor"]
    return facts


def _plan_grids(config: Config, world_size: int, problems: list[str]) -> dict[str, Topology]:
    """The grid of each role that can be built; the others become problems."""
    grids: dict[str, Topology] = {}
    roles = model_roles(config)
    generates = config.preference is None
    if generates and config.rollout.name is Engine.vllm:
        roles = (*roles, "rollout")
        if config.parallel.rollout.pp != 1:
            problems.append(
                f"parallel.rollout.pp={config.parallel.rollout.pp}: the vllm engine has no pipeline; "
                f"use 1 and a larger parallel.rollout.tp"
            )
        if config.rollout.share_weights and (config.rollout.free_cache_engine or not config.rollout.enforce_eager):
            problems.append(
                "rollout.share_weights=true needs parameters that stay where they are; set rollout.enforce_eager=true "
                "and rollout.free_cache_engine=false, or rollout.share_weights=false"
            )
        if config.rollout.share_weights and config.actor.offload.params:
            problems.append(
                "rollout.share_weights=true: the engine reads the actor's weights; set actor.offload.params=false"
            )
    elif generates and config.parallel.rollout not in (GridConfig(), config.parallel.actor):
        problems.append(
            "parallel.rollout is set, but rollout.name=naive generates with the actor's own grid; leave it out"
        )
    for role in roles:
        grid = _get(config.parallel, role)
        if role == "ref" and grid == config.parallel.actor and "actor" not in grids:
            continue  # the actor's problem is the reference's too
        try:
            grids[role] = plan_topology(role, world_size, grid.tp, grid.pp, grid.dp, grid.ranks)
        except ValueError as error:
            problems.append(str(error))
    return grids


def _check_files(config: Config) -> Iterator[str]:
    if not config.data.train_files:
        yield "data.train_files is empty; name at least one file"
    for key in ("train_files", "val_files"):
        for path in _get(config.data, key):
            if not Path(path).exists():
                yield f"data.{key}: {path} does not exist"
            elif Path(path).is_file() and Path(path).suffix not in DATA_KINDS:
                yield f"data.{key}: {path} is of an unknown kind; use {', '.join(DATA_KINDS)} or a saved data set"
    if config.trainer.test_freq > 0 and not config.data.val_files:
        yield f"trainer.test_freq={config.trainer.test_freq} needs data.val_files; set them, or test_freq=-1"
    environment = config.rollout.multi_turn.environment
    if environment is not None and not Path(environment.rpartition(":")[0]).is_file():
        yield f"rollout.multi_turn.environment={environment}: no such file; write path/to/file.py:name"
    tokenizer = config.actor.tokenizer_path
    if tokenizer is not None and tokenizer != config.actor.model_path and not Path(tokenizer).is_dir():
        yield f"actor.tokenizer_path={tokenizer} is not a folder; download the tokenizer and name its folder"
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode is ResumeMode.path and path is None:
        yield "trainer.resume_mode=path needs trainer.resume_from_path; name a checkpoint, or use auto"
    elif mode is not ResumeMode.path and path is not None:
        yield f"trainer.resume_from_path={path} is not read with trainer.resume_mode={mode}; use resume_mode=path"
    elif path is not None and not Path(path).is_dir():
        yield f"trainer.resume_from_path={path} is not a folder; name a checkpoint, such as RUN/checkpoints/step_000010"


def _check_sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.temperature <= 0:
        yield (
            f"rollout.temperature={rollout.temperature} must be more than 0 in training: every greedy answer to a "
            f"prompt is the same; use 1.0 (validation draws greedily anyway)"
        )
    if rollout.top_p != 1.0:
        yield (
            f"rollout.top_p={rollout.top_p} cuts the distribution that the trainer's log-probabilities are taken from; "
            f"use 1.0 in training (rollout.val.top_p is free)"
        )
    if rollout.top_k not in (-1, 0):
        yield (
            f"rollout.top_k={rollout.top_k} cuts the distribution that the trainer's log-probabilities are taken from; "
            f"use -1 in training (rollout.val.top_k is free)"
        )
    if rollout.val.n > 0 and rollout.val.temperature <= 0:
        yield (
            f"rollout.val.temperature={rollout.val.temperature} with rollout.val.n={rollout.val.n}: validation draws "
            f"greedily anyway; set rollout.val.n=0, or a temperature above 0"
        )


def _check_pipeline(config: Config, grids: dict[str, Topology]) -> Iterator[str]:
    if config.pipeline.schedule is not PipelineSchedule.fused or "actor" not in grids:
        return
    if "critic" not in trained_roles(config):
        yield (
            f"pipeline.schedule=fused trains an actor and a critic together, and "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic; use auto or zero_bubble"
        )
    elif "critic" in grids and not can_fuse(grids["actor"], grids["critic"]):
        yield (
            "pipeline.schedule=fused needs actor and critic on the same ranks with the same pp of 2 or more; make "
            "parallel.critic like parallel.actor, or use pipeline.schedule=auto"
        )


def can_fuse(actor: Topology, critic: Topology) -> bool:
    """Whether two roles can train in one schedule."""
    return actor.ranks == critic.ranks and actor.pp_size == critic.pp_size > 1


def _check_batches(config: Config, dp_sizes: dict[str, int]) -> Iterator[str]:
    """Batch, mini-batches and micro-batches; all sizes are positive here.

    A value that is wrong for several roles is named once, and the values offered suit all of them.
    """
    batch, n = config.data.train_batch_size, config.rollout.n
    roles = [role for role in trained_roles(config) if role in dp_sizes]
    all_ranks = math.lcm(*(dp_sizes[role] for role in roles))

    def suits_all(prompts: int) -> bool:
        return prompts * n % all_ranks == 0

    crowded = [f"{dp_sizes[role]} data-parallel ranks of the {role}" for role in roles if batch * n % dp_sizes[role]]
    if crowded:
        yield (
            f"data.train_batch_size={batch} × rollout.n={n} = {batch * n} sequences do not divide over the "
            f"{' and the '.join(crowded)}; use a batch of {_nearest(batch, suits_all)}"
        )
        return
    refused: set[int] = set()
    for role in roles:
        part, dp = _get(config, role), dp_sizes[role]
        mini, micro = part.ppo_mini_batch_size, part.ppo_micro_batch_size
        if mini in refused:
            continue
        rule = None
        if mini > batch:
            rule = f"is larger than data.train_batch_size={batch}"
        elif batch % mini:
            rule = f"does not divide data.train_batch_size={batch}"
        elif mini * n % dp:
            rule = (
                f"× rollout.n={n} = {mini * n} sequences do not divide over the {dp} data-parallel ranks of the {role}"
            )
        if rule is not None:
            refused.add(mini)
            near = _nearest(mini, lambda size: batch % size == 0 and suits_all(size), up_to=batch)
            yield f"{role}.ppo_mini_batch_size={mini} {rule}; use {near}"
        elif micro is not None and micro > mini * n // dp:
            yield (
                f"{role}.ppo_micro_batch_size={micro} is larger than what a data-parallel rank holds of a mini-batch: "
                f"ppo_mini_batch_size={mini} × rollout.n={n} / dp={dp} = {mini * n // dp} sequences; "
                f"use {mini * n // dp} or less, or leave it out and let the token budget decide"
            )


def _nearest(value: int, is_valid: Callable[[int], bool], up_to: int | None = None) -> str:
    """The valid sizes next to `value`, below and above, in words."""
    below = next((size for size in range(value, 0, -1) if is_valid(size)), None)
    above = next((size for size in range(value + 1, (up_to or 2 * value + 4096) + 1) if is_valid(size)), None)
    return " or ".join(str(size) for size in (below, above) if size is not None)


def _check_lengths(config: Config, model: ModelFacts | None) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    longest = prompt + response
    turns = config.rollout.multi_turn
    if turns.environment is not None:
        each = turns.max_tokens_per_turn or response // max(1, turns.max_turns)
        if not 1 <= each <= response:
            yield (
                f"rollout.multi_turn.max_tokens_per_turn={each} must be between 1 and "
                f"data.max_response_length={response}, which holds all turns and what the environment says"
            )
    spelled = f"data.max_prompt_length={prompt} + data.max_response_length={response} = {longest}"
    pair = longest * count_together(config)
    if config.preference is not None and config.preference.loss is PreferenceLoss.reward_model:
        pair += 2  # the score of a whole sequence is read one token after its end
    for role in model_roles(config):
        budget, least = _get(config, role).ppo_max_token_len, longest + (role in MODEL_ROLES.values())
        if budget < least:  # the score of a whole sequence is read one token after its end
            yield f"{role}.ppo_max_token_len={budget} cannot hold one sequence: {spelled}; use {least} or more"
        elif budget < pair and role == "actor":
            yield f"{role}.ppo_max_token_len={budget} cannot hold a pair of answers: 2 × {spelled}; use {pair} or more"
    if model is not None and longest > model.max_position_embeddings:
        yield (
            f"{spelled} tokens, but the model reads at most max_position_embeddings={model.max_position_embeddings}; "
            f"shorten one of them"
        )


def _check_model_fits(config: Config, role: str, topology: Topology, model: ModelFacts) -> Iterator[str]:
    """Whether heads and layers of the model divide as the grid of the role asks."""
    tp, pp = topology.tp_size, topology.pp_size
    key = f"parallel.{role}.tp={tp}"
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads % tp:
        yield f"{key} does not divide the {heads} attention heads; use {_in_words(_divisors(heads))}"
    elif role == "rollout":
        if max(tp, kv_heads) % min(tp, kv_heads):
            yield f"{key} neither divides the {kv_heads} kv heads nor is a multiple of them; use another tp"
    elif kv_heads % tp:
        yield f"{key} does not divide the {kv_heads} kv heads; use {_in_words(_joint(heads, kv_heads))}"
    if role == "rollout" or pp == 1:
        return
    layers = model.num_layers
    if pp > layers:
        yield f"parallel.{role}.pp={pp} is more than the model's {layers} layers; use {layers} or less"
    elif config.pipeline.schedule is PipelineSchedule.interleaved and layers < pp * config.pipeline.virtual_stages:
        yield (
            f"pipeline.virtual_stages={config.pipeline.virtual_stages} × parallel.{role}.pp={pp} are more chunks than "
            f"the model's {layers} layers; use fewer, or pipeline.schedule=1f1b"
        )
    elif layers % pp and not _get(config, role).uneven_stages:
        yield (
            f"parallel.{role}.pp={pp} does not divide the model's {layers} layers; use {_in_words(_divisors(layers))}, "
            f"or set {role}.uneven_stages=true"
        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _joint(one: int, other: int) -> list[int]:
    return [size for size in _divisors(one) if other % size == 0]


def _in_words(sizes: list[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last
