"""Where rewards and costs come from, as the configuration says it: short forms written out, and what is wrong in them.

reward.function=numeric                         sources: [{name: numeric, function: numeric}]
reward_model.model_path=rm                  ->  sources: [{name: reward_model, model: reward_model}]
both                                            both, with weight 1 each
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from megarl.config.schema import Config, ModelDevice, ModelEngine, RewardConfig, ScoringModelConfig, SourceConfig

MODEL_ROLES = {"reward": "reward_model", "cost": "cost_model"}  # section of the rewards -> section of its model
KINDS = ("function", "remote", "model", "environment", "given")


def pick_engine(model: ScoringModelConfig) -> ScoringModelConfig:
    """The section with its engine chosen: Megatron's ranks run where the actor does, a CPU beside them does not."""
    on_cpu = ModelEngine.transformers if model.device is ModelDevice.cpu else ModelEngine.megatron
    return dataclasses.replace(model, engine=on_cpu if model.engine is None else model.engine)


def list_costs(section: RewardConfig | None, model: ScoringModelConfig) -> RewardConfig | None:
    """As `list_sources`; None where answers have no cost."""
    if section is None and model.model_path is None:
        return None
    return list_sources(section or RewardConfig(), model, "cost_model", [])


def list_rewards(config: Config, model: ScoringModelConfig) -> RewardConfig:
    """As `list_sources`; where nothing is given, the environment judges its episodes, else `by_data_source`."""
    has_environment = config.rollout.multi_turn.environment is not None
    default = SourceConfig(environment=True) if has_environment else SourceConfig(function="by_data_source")
    return list_sources(config.reward, model, "reward_model", [default])


def list_sources(
    section: RewardConfig, model: ScoringModelConfig, role: str, default: list[SourceConfig]
) -> RewardConfig:
    """The section with its short form written out as sources, every source with a name.

    Args:
        role: the section of `model`.
        default: the sources where nothing is given at all.
    """
    put = dataclasses.replace
    if not section.sources:
        short = [SourceConfig(function=section.function, kwargs=section.kwargs)] if section.function else []
        short += [SourceConfig(model=role)] if model.model_path else []
        short = short or [put(source, kwargs=section.kwargs) for source in default]
        section = put(section, sources=short, function=None, kwargs={})
    named = [put(source, name=source.name or _name_source(source)) for source in section.sources]
    return put(section, sources=named)


def scoring_roles(config: Config) -> tuple[str, ...]:
    """Reward and cost models that are Megatron models on ranks of their own, as the (resolved) sources name them."""
    sections = [section for section in (config.reward, config.cost) if section is not None]
    used = {source.model for section in sections for source in section.sources}
    return tuple(
        role for role in MODEL_ROLES.values() if role in used and getattr(config, role).engine is ModelEngine.megatron
    )


def check_sources(written: Config, config: Config) -> Iterator[str]:
    """What is wrong with the sources; `written` is the configuration before it was resolved to `config`."""
    for name, role in MODEL_ROLES.items():
        section, model = getattr(config, name), getattr(config, role)
        if section is None:
            continue
        own = getattr(written, name)
        if own is not None and own.sources and own.function:
            yield f"{name}.function and {name}.sources are both set; list the function as one of the sources"
        if not section.sources:
            yield f"{name} is set, but names no source; set {name}.function, {name}.sources or {role}.model_path"
        if section.sources and all(source.weight == 0 for source in section.sources):
            yield f"every one of {name}.sources has weight=0, which only measures; give one of them another weight"
        names = [source.name for source in section.sources]
        for twice in sorted({str(each) for each in names if names.count(each) > 1}):
            yield f"{name}.sources holds two sources named {twice}; give each a name of its own"
        if name == "cost" and not (
            0 <= section.max_failure_share <= 1 and section.num_workers >= 0 and section.time_limit_s > 0
        ):
            yield "cost.max_failure_share must be between 0 and 1, num_workers 0 or more, time_limit_s more than 0"
        for number, source in enumerate(section.sources):
            yield from _check_source(config, f"{name}.sources[{number}]", source)
        if model.model_path and role not in {source.model for source in section.sources}:
            yield f"{role}.model_path={model.model_path} is not used; add {{model: {role}}} to {name}.sources"
        if model.engine is ModelEngine.megatron and model.device is ModelDevice.cpu:
            yield (
                f"{role}.device=cpu with {role}.engine=megatron: Megatron models run on the device of the job; use "
                f"engine=transformers, or leave device out"
            )


def _check_source(config: Config, where: str, source: SourceConfig) -> Iterator[str]:
    given = [kind for kind in KINDS if getattr(source, kind) not in (None, False)]
    if len(given) != 1:
        yield f"{where} names {', '.join(given) or 'none'} of {', '.join(KINDS)}; it must name exactly one"
    if not math.isfinite(source.weight):
        yield f"{where}.weight={source.weight} must be a finite number"
    for key, least in (("num_retries", 0), ("concurrency", 1), ("max_reply_bytes", 1)):
        if getattr(source, key) < least:
            yield f"{where}.{key}={getattr(source, key)} must be {least} or more"
    if not source.timeout_s > 0:
        yield f"{where}.timeout_s={source.timeout_s} must be more than 0"
    if source.environment and config.rollout.multi_turn.environment is None:
        yield f"{where}.environment=true, but rollout.multi_turn.environment is not set"
    file, colon, _ = (source.function or "").rpartition(":")
    if colon and not Path(file).is_file():
        yield f"{where}.function={source.function}: the file {file} does not exist"
    if source.model is not None and source.model in MODEL_ROLES.values():
        model = getattr(config, source.model)
        if model.model_path is None:
            yield f"{where}.model={source.model}, but {source.model}.model_path is not set; name its folder"
        elif model.engine is ModelEngine.transformers and not (Path(model.model_path) / "config.json").is_file():
            yield f"{source.model}.model_path={model.model_path} is no folder of a Hugging Face model (no config.json)"
    elif source.model is not None and not (Path(source.model) / "config.json").is_file():
        yield (
            f"{where}.model={source.model} is not the folder of a Hugging Face model, nor one of "
            f"{', '.join(MODEL_ROLES.values())}"
        )


def _name_source(source: SourceConfig) -> str | None:
    if source.function is not None:
        return source.function.rpartition(":")[2]
    if source.remote is not None:
        return source.remote.rpartition("://")[2].rpartition("@")[2].partition("/")[0]
    if source.environment or source.given:
        return "environment" if source.environment else "given"
    return None if source.model is None else Path(source.model).name
