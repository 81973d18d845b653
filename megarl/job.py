"""Sets a job up: from a checked configuration to data, reward, roles and engine, each on its own grid.

`open_job` is called on every rank with the same configuration, after the process group exists. What can be wrong with
the user's files is found before any model is built.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch.distributed as dist

from megarl import device
from megarl.config.load import ConfigError
from megarl.config.model_facts import read_model_facts
from megarl.config.needs import critic_roles, model_roles
from megarl.config.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    Engine,
    GridConfig,
    GridOrder,
    OptimConfig,
    RefConfig,
    ScoringModelConfig,
)
from megarl.config.validate import can_fuse
from megarl.generation import generate
from megarl.job_data import Data, open_data
from megarl.models.build import BuildOptions, uses_transformer_engine
from megarl.models.registry import read_model_spec
from megarl.ops import dispatch
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.picker import plan_chunk_stages
from megarl.parallel.topology import Topology, plan_topology
from megarl.records import Prompt, Rollout, Sampling
from megarl.residents import make_room_for_engines, open_offloads
from megarl.reward.verdict import Scorer
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.naive_engine import NaiveEngine
from megarl.rollout.prompts import PromptStream
from megarl.trainer.next_token import build_next_logits
from megarl.trainer.offload import Offload
from megarl.trainer.optim import AdamOptions, LRSchedule
from megarl.trainer.roles import Role, build_role
from megarl.weights.order import choose_order
from megarl.weights.sync import WeightSync, open_weight_sync

log = logging.getLogger(__name__)

SPLITTING = ("auto", "zero_bubble", "fused")  # schedules that may compute weight gradients later


@dataclass(frozen=True)
class Job:
    """Everything one rank holds. A role that this rank is not part of is None here.

    `scoring`: reward and cost models that are Megatron models, by name.
    """

    config: Config
    data: Data
    topologies: dict[str, Topology]
    actor: Role | None
    critics: dict[str, Role | None]
    ref: Role | None
    scoring: dict[str, Role | None]
    engine: RolloutEngine | None
    weight_sync: WeightSync | None
    offloads: dict[str, Offload]
    total_steps: int

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        """Answers to `prompts`, the same on every rank; a collective of the world."""
        return generate(self.engine, self.topologies["rollout"], self.data.conversation, prompts, sampling)

    def rest_engine(self) -> None:
        """After answers are drawn: with `rollout.free_cache_engine` the engine gives its memory back."""
        if self.config.rollout.free_cache_engine and self.engine is not None and self.weight_sync is not None:
            self.engine.discard_weights()

    def role(self, name: str) -> Role | None:
        """The actor or a critic, by name."""
        return self.actor if name == "actor" else self.critics[name]

    def settings(self, name: str) -> ActorConfig | CriticConfig:
        """The section of the actor or of a critic."""
        return self.config.actor if name == "actor" else critic_roles(self.config)[name]

    def sync_weights(self, version: int) -> dict[str, float]:
        """Hands the actor's weights to the engines; a collective of the world. Returns `sync/*` metrics.

        Raises:
            RuntimeError: an engine holds other values than the actor; it refuses to answer.
        """
        metrics: dict[str, float] = {}
        if self.weight_sync is not None:
            assert self.engine is not None
            make_room_for_engines(self.offloads, keeps_actor=True)
            if "actor" in self.offloads:
                self.offloads["actor"].return_params()
            weights = {} if self.actor is None else self.actor.weights()
            metrics = self.weight_sync.run(weights, self.engine.open_weights(), self.engine.checksums)
            make_room_for_engines(self.offloads)
        if self.engine is not None:
            self.engine.publish_weights(version)
        return metrics


def plan_topologies(config: Config, world_size: int) -> dict[str, Topology]:
    """The grid of every role that this configuration uses, the rollout's last."""
    grids: dict[str, GridConfig | None] = {
        "actor": config.parallel.actor,
        "critic": config.parallel.critic,
        "cost_critic": config.parallel.cost_critic,
        "ref": config.parallel.ref or config.parallel.actor,
        "reward_model": config.parallel.reward_model,
        "cost_model": config.parallel.cost_model,
    }
    chosen = {role: grids[role] for role in model_roles(config)}
    if config.preference is None:
        chosen["rollout"] = config.parallel.actor if config.rollout.name is Engine.naive else config.parallel.rollout
    planned: dict[str, Topology] = {}
    for role, grid in chosen.items():
        assert grid is not None
        order = "dp-tp-pp" if grid.order is GridOrder.dp_tp_pp else "tp-dp-pp"
        planned[role] = plan_topology(role, world_size, grid.tp, grid.pp, grid.dp, grid.ranks, order)
    generates_elsewhere = config.preference is None and config.rollout.name is Engine.vllm
    if config.parallel.actor.order is GridOrder.auto and generates_elsewhere:
        planned["actor"] = _choose_actor_order(config, planned["actor"], planned["rollout"])
    for role in model_roles(config):
        planned[role] = _place_chunks(config, role, planned)
    return planned


def _choose_actor_order(config: Config, actor: Topology, rollout: Topology) -> Topology:
    """The actor's grid with the ranks where they need least of the others' weights; says so when that is a gain."""
    assert config.actor.model_path is not None
    family, spec = read_model_spec(config.actor.model_path)
    try:
        chosen, received = choose_order(family, spec, actor, rollout, local_world_size(config))
    except ValueError as error:
        raise ConfigError([f"parallel.rollout: {error}"]) from error
    if chosen.order != actor.order:
        log.info(
            "parallel.actor.order=%s: engines receive %.1f %% less at each weight transfer than in order %s",
            chosen.order,
            100 - 100 * received[chosen.order] / received[actor.order],
            actor.order,
        )
    return chosen


def local_world_size(config: Config) -> int:
    """Ranks on each node: what the launcher says, else what the configuration would start."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", config.trainer.n_gpus_per_node))


def _place_chunks(config: Config, role: str, planned: Mapping[str, Topology]) -> Topology:
    """The role's grid with its chunks placed as the schedule wants them: the critic against the actor it runs with."""
    topology = planned[role]
    path = getattr(config, role).model_path
    assert path is not None
    num_layers = read_model_facts(path).num_layers
    is_reversed = role == "critic" and can_fuse(planned["actor"], topology)
    choice = config.pipeline.schedule.value
    stages = plan_chunk_stages(choice, topology.pp_size, num_layers, is_reversed, config.pipeline.virtual_stages)
    return dataclasses.replace(topology, chunk_stages=stages)


def splits_gradients(config: Config, topology: Topology) -> bool:
    """Whether a role on this grid may compute weight gradients later than the others."""
    return topology.pp_size > 1 and config.pipeline.schedule.value in SPLITTING


def can_update_together(config: Config, topologies: Mapping[str, Topology]) -> bool:
    """Whether actor and critic train in one schedule."""
    sequential = config.pipeline.schedule.value in ("1f1b", "interleaved", "zero_bubble")
    return not sequential and "critic" in topologies and can_fuse(topologies["actor"], topologies["critic"])


def open_job(
    config: Config,
    check_data: Callable[[PromptStream], None] | None = None,
    given: Mapping[str, Scorer] = MappingProxyType({}),
) -> Job:
    """Reads the data and builds every role and engine. A collective of the world.

    Args:
        check_data: called with the training prompts, before any model is built; raises ConfigError.
        given: the object behind a source with `given=true`, by section ("reward", "cost").

    Raises:
        ConfigError: something about the user's files or options that only shows when they are read.
    """
    data = open_data(config, given)
    if check_data is not None:
        check_data(data.stream)
    steps = data.stream.steps_per_epoch * config.trainer.total_epochs
    total_steps = steps if config.trainer.total_training_steps is None else config.trainer.total_training_steps
    topologies = plan_topologies(config, dist.get_world_size())
    cache = GroupCache(config.trainer.timeout_s)
    layers = "Transformer Engine" if uses_transformer_engine() else "torch"
    try:
        implementation = dispatch.choose_implementation(config.ops.require_extension)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    log.info("%s; layers: %s; ops: %s", device.describe(), layers, implementation)

    def open_role(name: str, settings: ActorConfig | CriticConfig | RefConfig | ScoringModelConfig) -> Role | None:
        if name not in topologies:
            return None
        start = time.perf_counter()
        groups = build_groups(topologies[name], cache)
        learns = None
        if isinstance(settings, ActorConfig | CriticConfig):
            num_updates = total_steps * count_updates(config, name)
            learns = build_optimizer_options(settings.optim, num_updates)
        requested = config.actor.dtype if isinstance(settings, RefConfig) else settings.dtype
        options = BuildOptions(
            dtype=device.pick_dtype(requested.value),
            head="value" if isinstance(settings, CriticConfig | ScoringModelConfig) else "policy",
            recompute=settings.recompute.value if isinstance(settings, ActorConfig | CriticConfig) else "none",
            seed=config.trainer.seed,
            splits_gradients=splits_gradients(config, topologies[name]),
        )
        assert settings.model_path is not None
        role = build_role(
            name,
            groups,
            settings.model_path,
            options,
            max_tokens=settings.ppo_max_token_len,
            max_sequences=settings.ppo_micro_batch_size if isinstance(settings, ActorConfig | CriticConfig) else None,
            num_ids=data.num_ids,
            learns=learns,
        )
        if role is not None:
            log.info("%s: %s, %s, built in %.1f s", name, role.groups.at, role.dtype, time.perf_counter() - start)
        return role

    actor = open_role("actor", config.actor)
    critics = {name: open_role(name, settings) for name, settings in critic_roles(config).items()}
    ref = open_role("ref", config.ref)
    scoring = {name: open_role(name, getattr(config, name)) for name in ("reward_model", "cost_model")}
    engine = open_engine(config, data, topologies["rollout"], actor)
    weight_sync = open_sync(config, topologies, cache, actor, engine)
    offloads = open_offloads(config, {"actor": actor, **critics, "ref": ref})
    return Job(config, data, topologies, actor, critics, ref, scoring, engine, weight_sync, offloads, total_steps)


def open_engine(config: Config, data: Data, topology: Topology, actor: Role | None) -> RolloutEngine | None:
    """Builds this rank's part of a rollout engine. A collective of the world."""
    start = time.perf_counter()
    max_model_len = config.data.max_prompt_length + config.data.max_response_length
    if config.rollout.name is Engine.naive:
        return None if actor is None else NaiveEngine(build_next_logits(actor), max_model_len)
    from megarl.rollout.vllm_engine import build_vllm_engine

    assert config.actor.model_path is not None
    _, spec = read_model_spec(config.actor.model_path)
    try:
        engine = build_vllm_engine(
            config.actor.model_path,
            topology,
            dist.get_rank(),
            dtype=device.pick_dtype(config.rollout.dtype.value),
            max_model_len=max_model_len,
            max_num_seqs=config.rollout.max_num_seqs,
            kv_cache_gib=config.rollout.kv_cache_gib,
            gpu_memory_utilization=config.rollout.gpu_memory_utilization,
            enforce_eager=config.rollout.enforce_eager,
            seed=config.trainer.seed,
            vocab_limit=data.num_ids if data.num_ids < spec.vocab_size else None,
            can_sleep=config.rollout.free_cache_engine,
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    log.info(
        "%d vLLM engines of tp=%d, built in %.1f s", topology.dp_size, topology.tp_size, time.perf_counter() - start
    )
    return engine


def open_sync(
    config: Config,
    topologies: Mapping[str, Topology],
    cache: GroupCache,
    actor_role: Role | None,
    engine: RolloutEngine | None,
) -> WeightSync | None:
    """Plans how the actor's weights get into the engines; None where the engine is the actor. A collective."""
    if config.rollout.name is Engine.naive:
        return None
    start = time.perf_counter()
    assert config.actor.model_path is not None
    family, spec = read_model_spec(config.actor.model_path)
    actor, rollout = topologies["actor"], topologies["rollout"]
    group = cache.get(tuple(sorted({*actor.ranks, *rollout.ranks})), "weights")
    assert group is not None, "vLLM's engines live on all ranks of the job"
    try:
        sync = open_weight_sync(
            family,
            spec,
            actor,
            rollout,
            dist.get_rank(),
            group,
            trainer_dtype=device.pick_dtype(config.actor.dtype.value),
            engine_dtype=device.pick_dtype(config.rollout.dtype.value),
            ranks_per_node=local_world_size(config),
            verify=config.rollout.verify_sync.value,
            bucket_bytes=config.rollout.sync_bucket_mib << 20,
            shares=config.rollout.share_weights,
        )
        if config.rollout.share_weights:
            assert engine is not None
            weights = {} if actor_role is None else actor_role.weights()
            freed = engine.share_weights({name: weights[source] for name, source in sync.resharder.shared.items()})
            log.info("rollout.share_weights: %.1f MB of the engine are the trainer's own now", freed / 1e6)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    stats = sync.resharder.stats
    log.info(
        "weight transfer planned in %.1f s: this rank receives %.1f MB, keeps %.1f; %d rounds, %.0f MiB staging",
        time.perf_counter() - start,
        stats.received_bytes / 1e6,
        stats.kept_bytes / 1e6,
        stats.num_rounds,
        sync.resharder.staging_bytes / 2**20,
    )
    return sync


def build_optimizer_options(optim: OptimConfig, num_updates: int) -> tuple[AdamOptions, LRSchedule]:
    """Adam's options and the learning rate over `num_updates` optimizer steps."""
    adam = AdamOptions(optim.weight_decay, (optim.betas[0], optim.betas[1]), optim.eps, optim.clip_grad)
    decay_steps = num_updates if optim.lr_decay_steps is None else optim.lr_decay_steps
    warmup_steps = optim.lr_warmup_steps or int(optim.lr_warmup_steps_ratio * num_updates)
    return adam, LRSchedule(optim.lr, optim.min_lr, warmup_steps, optim.lr_decay_style.value, decay_steps)


def count_updates(config: Config, role: str) -> int:
    """Optimizer steps that one training step holds for `role`."""
    settings = {"actor": config.actor, **critic_roles(config)}[role]
    assert settings.ppo_mini_batch_size is not None and settings.ppo_epochs is not None
    return settings.ppo_epochs * -(-config.data.train_batch_size // settings.ppo_mini_batch_size)


def derive_seed(seed: int, purpose: str, step: int) -> int:
    """A seed in [0, 2**63) that depends on these three only."""
    digest = hashlib.blake2b(f"{seed} {purpose} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
