"""What must hold between the algorithm's options: one line for each contradiction, with the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from megarl.algo.algorithms import ADVANTAGES, NEEDS
from megarl.config.needs import loss_needs_whole, score_needs
from megarl.config.schema import Config, CorrectionLevel, KLController, OffloadConfig, PreferenceLoss


def check_algorithm(config: Config) -> Iterator[str]:
    """Every contradiction in `algorithm`, and between it and the other sections."""
    yield from _check_functions(config)
    yield from _check_needs(config)
    yield from _check_numbers(config)


def _which(config: Config) -> str:
    algorithm = config.algorithm
    if algorithm.advantage is not None:
        return f"algorithm.advantage={algorithm.advantage}"
    return f"algorithm.adv_estimator={algorithm.adv_estimator}"


def _check_functions(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    for key in ("advantage", "loss"):
        spec = getattr(algorithm, key)
        file, colon, _ = (spec or "").rpartition(":")
        if spec is not None and not colon:
            yield f"algorithm.{key}={spec} names no function; write path/to/file.py:function"
        elif spec is not None and not Path(file).is_file():
            yield f"algorithm.{key}={spec}: the file {file} does not exist"
    if algorithm.advantage_needs and algorithm.advantage is None:
        yield (
            f"algorithm.advantage_needs={algorithm.advantage_needs} without algorithm.advantage: the advantages of "
            f"megarl know what they need; leave it out"
        )
    allowed = [need for need in NEEDS if need != "costs"]
    for need in algorithm.advantage_needs:
        if need not in allowed:
            near = difflib.get_close_matches(need, allowed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"algorithm.advantage_needs names {need!r}, which is not one of {', '.join(allowed)}{hint}"


def _check_needs(config: Config) -> Iterator[str]:
    algorithm, needs, which = config.algorithm, score_needs(config), _which(config)
    without_critic = ", ".join(name for name, facts in ADVANTAGES.items() if "siblings" not in facts.needs)
    if "siblings" in needs and config.rollout.n < 2:
        yield (
            f"rollout.n={config.rollout.n} with {which}: an answer is compared with its siblings; use rollout.n=2 or "
            f"more, or one of {without_critic}"
        )
    if "greedy" in needs and config.rollout.multi_turn.environment is not None:
        yield (
            f"{which} with rollout.multi_turn.environment={config.rollout.multi_turn.environment}: a greedy answer of "
            f"several turns is not drawn; use rloo, grpo or gae"
        )
    if algorithm.filter_groups.enable and config.rollout.n < 2:
        yield (
            f"rollout.n={config.rollout.n} with algorithm.filter_groups.enable=true: a single answer never differs "
            f"from its siblings; use rollout.n=2 or more"
        )
    for role, need in (("critic", "values"), ("cost_critic", "costs")):
        steps = getattr(config, role).warmup_steps
        if steps and need not in needs:
            yield f"{role}.warmup_steps={steps} with {which}, which has no {role}; use 0, or adv_estimator=gae"
    if "costs" in needs and config.cost is None:
        yield f"{which} needs a cost for each answer; set cost.function, cost.sources or cost_model.model_path"
    if "costs" not in needs and config.cost is not None:
        yield f"cost is set with {which}, which knows no cost; use algorithm.adv_estimator=gae_lagrangian"
    if algorithm.lam_alpha and "values" not in needs:
        yield f"algorithm.lam_alpha={algorithm.lam_alpha} with {which}: only gae has a trace decay; leave it out"
    if loss_needs_whole(config) and not algorithm.fused_logprob:
        name = algorithm.loss if algorithm.loss is not None else algorithm.policy_loss
        yield f"algorithm.fused_logprob=false with the policy loss {name}, which looks at whole answers; use true"


def _check_numbers(config: Config) -> Iterator[str]:
    algorithm, limit = config.algorithm, config.data.max_response_length
    if algorithm.overlong_buffer_len > limit:
        yield (
            f"algorithm.overlong_buffer_len={algorithm.overlong_buffer_len} is longer than "
            f"data.max_response_length={limit}; use {limit} or less"
        )
    correction = algorithm.rollout_correction
    if correction.level is not CorrectionLevel.none and not 0 <= correction.lower < 1 < correction.upper:
        yield (
            f"algorithm.rollout_correction.lower={correction.lower} and upper={correction.upper} must lie around 1; "
            f"use lower=0.5 and upper=2, for instance"
        )
    lagrange = algorithm.lagrange
    if not 0 < lagrange.min <= lagrange.init <= lagrange.max:
        yield (
            f"algorithm.lagrange.min={lagrange.min}, init={lagrange.init}, max={lagrange.max} must be positive and in "
            f"this order"
        )
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type is KLController.adaptive:
        for name in ("target_kl", "horizon"):
            if getattr(algorithm.kl_ctrl, name) <= 0:
                yield f"algorithm.kl_ctrl.{name}={getattr(algorithm.kl_ctrl, name)} must be more than 0"


def check_preference(config: Config) -> Iterator[str]:
    """What must hold for training on preferences."""
    preference, batch = config.preference, config.data.train_batch_size
    assert preference is not None, "this configuration trains on rewards"
    mini, epochs = config.actor.ppo_mini_batch_size, config.actor.ppo_epochs
    if mini not in (None, batch):
        yield (
            f"actor.ppo_mini_batch_size={mini} with preference.loss={preference.loss}: every batch is one optimizer "
            f"step; leave it out and set data.train_batch_size"
        )
    if epochs != 1:
        yield (
            f"actor.ppo_epochs={epochs} with preference.loss={preference.loss}: a batch is used once; use 1 and "
            f"trainer.total_epochs"
        )
    if config.rollout.n != 1:
        yield f"rollout.n={config.rollout.n} with preference.loss={preference.loss}: nothing is generated; leave it out"
    if config.actor.offload != OffloadConfig() or config.ref.offload_params:
        yield (
            f"actor.offload and ref.offload_params with preference.loss={preference.loss}: there is no engine to make "
            f"room for; leave them out"
        )
    smoothed = (PreferenceLoss.dpo, PreferenceLoss.simpo)
    if preference.label_smoothing and preference.loss not in smoothed:
        yield (
            f"preference.label_smoothing={preference.label_smoothing} with preference.loss={preference.loss}: only "
            f"{' and '.join(loss.value for loss in smoothed)} know it; use 0"
        )
