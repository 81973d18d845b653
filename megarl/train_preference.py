"""The training program on preferences: what `megarl train` runs when the configuration has a section `preference`.

One step, and who waits for whom:

    answers     = next batch                  every rank, the same
    ref         = annotate(answers)           the reference: forward only, on its own grid          dpo, ipo, kto
    baseline    = annotate(mismatched)        policy and reference, of answers to other prompts     kto
    update                                    the policy, or the reward model: one optimizer step

There is no engine and no reward. Held-out pairs are judged by the same loss, forward only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl import device
from megarl.algo.algorithms import PREFERENCES, PreferenceFacts
from megarl.config.load import ConfigError
from megarl.config.needs import needs_reference
from megarl.config.schema import Config, PreferenceConfig
from megarl.job import build_optimizer_options, plan_topologies, splits_gradients
from megarl.keeper import Keeper, Kept, choose_checkpoint, open_report
from megarl.launch.stop import StopRequest
from megarl.models.build import BuildOptions
from megarl.models.registry import read_model_spec
from megarl.obs.metrics import PhaseTimer
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.topology import Topology
from megarl.report import Exported, RunReport
from megarl.rollout.pairs import Columns, Example, build_examples, mismatch_examples, pack_examples
from megarl.rollout.prompts import PromptStream
from megarl.rollout.rows import load_rows
from megarl.rollout.tokenizer import check_tokenizer_fits, count_token_ids, load_tokenizer
from megarl.trainer.annotate import annotate_logprobs, append_end_tokens
from megarl.trainer.measured_costs import Profile
from megarl.trainer.preference import (
    Preferences,
    estimate_baseline,
    evaluate_preferences,
    update_on_preferences,
)
from megarl.trainer.roles import Role, build_role
from megarl.trainer.run_state import finish_step
from megarl.trainer.update import PipelineOptions, UpdateResult

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreferenceJob:
    """Everything one rank holds; a role that this rank is not part of is None."""

    config: Config
    options: PreferenceConfig
    facts: PreferenceFacts
    examples: dict[int, Example]  # by row
    held_out: list[Example]
    stream: PromptStream
    topologies: dict[str, Topology]
    actor: Role | None
    ref: Role | None
    total_steps: int


def open_preference_job(config: Config, check_data: Callable[[PromptStream], None] | None = None) -> PreferenceJob:
    """Reads the data, then builds the roles. A collective of the world.

    Args:
        check_data: called with the training examples' prompts, before any model is built; raises ConfigError.

    Raises:
        ConfigError: something about the user's files that only shows when they are read.
    """
    options = config.preference
    assert options is not None and config.actor.model_path is not None and config.actor.tokenizer_path is not None
    facts = PREFERENCES[options.loss.value]
    try:
        tokenizer = load_tokenizer(config.actor.tokenizer_path)
        _, spec = read_model_spec(config.actor.model_path)
        num_ids = count_token_ids(tokenizer)
        check_tokenizer_fits(num_ids, spec.vocab_size)
        train = read_examples(config, facts, tokenizer, config.data.train_files, None)
        held_out = read_examples(config, facts, tokenizer, config.data.val_files, config.data.val_max_samples)
        assert config.data.seed is not None
        stream = PromptStream(
            [example.prompt for example in train],
            config.data.train_batch_size,
            config.data.seed,
            shuffle=config.data.shuffle,
            length_bucketing=config.data.length_bucketing,
            origin=", ".join(config.data.train_files),
            answers=repr([(example.answers, example.is_desirable) for example in train]).encode(),
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if check_data is not None:
        check_data(stream)
    steps = stream.steps_per_epoch * config.trainer.total_epochs
    total_steps = steps if config.trainer.total_training_steps is None else config.trainer.total_training_steps
    topologies = plan_topologies(config, dist.get_world_size())
    cache = GroupCache(config.trainer.timeout_s)

    def open_role(name: str, model_path: str, max_tokens: int, learns: bool) -> Role | None:
        return build_role(
            name,
            build_groups(topologies[name], cache),
            model_path,
            BuildOptions(
                dtype=device.pick_dtype(config.actor.dtype.value),
                head=facts.head if learns else "policy",
                recompute=config.actor.recompute.value if learns else "none",
                seed=config.trainer.seed,
                splits_gradients=learns and splits_gradients(config, topologies[name]),
            ),
            max_tokens=max_tokens,
            max_sequences=config.actor.ppo_micro_batch_size if learns else None,
            num_ids=num_ids,
            learns=build_optimizer_options(config.actor.optim, total_steps) if learns else None,
        )

    actor = open_role("actor", config.actor.model_path, config.actor.ppo_max_token_len, learns=True)
    ref = None
    if needs_reference(config):
        assert config.ref.model_path is not None
        ref = open_role("ref", config.ref.model_path, config.ref.ppo_max_token_len, learns=False)
    by_row = {example.prompt.row: example for example in train}
    return PreferenceJob(config, options, facts, by_row, held_out, stream, topologies, actor, ref, total_steps)


def read_examples(
    config: Config, facts: PreferenceFacts, tokenizer: Any, files: list[str], limit: int | None
) -> list[Example]:
    """The examples of some files; none for no files."""
    data, options = config.data, config.preference
    assert options is not None
    if not files:
        return []
    examples = build_examples(
        load_rows(files)[:limit],
        tokenizer,
        Columns(data.prompt_key, options.chosen_key, options.rejected_key, options.completion_key, options.label_key),
        is_pairwise=facts.is_pairwise,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        overlong=data.overlong_prompts.value,
        chat_template=data.chat_template,
        raw_prompt=data.raw_prompt,
        origin=", ".join(files),
    )
    log.info("%s: %d examples", ", ".join(files), len(examples))
    return examples


def open_preference_run(config: Config, stop: StopRequest) -> tuple[PreferenceJob, RunReport, Keeper]:
    """Sets a run up, from the checkpoint that `trainer.resume_mode` leads to if there is one; a collective.

    Args:
        stop: what may ask this rank to stop.

    Raises:
        ConfigError: something about the user's files or options that only shows when they are read.
    """
    resume = choose_checkpoint(config)
    job = open_preference_job(config, None if resume is None else resume.check_data)
    report = open_report(config, job.total_steps, resume)
    kept = Kept(
        config=config,
        roles={"actor": job.actor},
        stream=job.stream,
        total_steps=job.total_steps,
        offloads={},
        sync_weights=lambda version: {},  # there is no engine
        list_exports=lambda is_last: [exported_role(job)],
    )
    return job, report, Keeper(kept, report, resume, stop)


def exported_role(job: PreferenceJob) -> Exported:
    """The policy, or the reward model with its head."""
    name = "reward_model" if job.facts.head == "value" else "actor"
    return Exported(name, job.actor, job.topologies["actor"], job.config.actor, job.facts.head)


def train_preference(job: PreferenceJob, report: RunReport, keeper: Keeper) -> None:
    """Runs the whole job on this rank, from where a checkpoint left it."""
    config, timer = job.config, PhaseTimer(device.synchronize)
    state, _ = keeper.start()
    if state.step == 0 and config.trainer.val_before_train and job.held_out:
        report.log(0, 1, validate(job, timer))
    for step in range(state.step + 1, job.total_steps + 1):
        started = time.perf_counter()
        epoch = job.stream.position.epoch + 1
        examples = [job.examples[prompt.row] for prompt in job.stream.next_batch()]
        data = prepare(job, examples, timer)
        with timer.phase("update_actor"):
            result = update(job, data, state.updates["actor"])
        state.updates["actor"] += 1
        report.warn(result.sources)
        metrics = dict(result.stats) | {"training/skipped_updates": float(result.num_skipped)}
        is_last = step == job.total_steps
        if job.held_out and (is_last or (config.trainer.test_freq > 0 and step % config.trainer.test_freq == 0)):
            metrics |= validate(job, timer)
        report.step(step, epoch, metrics, timer, time.perf_counter() - started, data.batch)
        finish_step(state, result.num_skipped, config.trainer.max_skipped_steps)
        if keeper.after_step(state, timer):
            break
    keeper.close()
    report.finish()


def update(job: PreferenceJob, data: Preferences, num_updates: int) -> UpdateResult:
    """One optimizer step, after `num_updates` before it; every rank of the job gets its statistics."""
    done: list[UpdateResult | None] = [None]
    if job.actor is not None:
        choice = job.config.pipeline.schedule.value
        options = PipelineOptions("auto" if choice == "fused" else choice, job.config.pipeline.max_live_micro_batches)
        done[0], _ = update_on_preferences(job.actor, job.options, data, num_updates, options, Profile())
    dist.broadcast_object_list(done, src=job.topologies["actor"].ranks[0], device=torch.device("cpu"))
    assert done[0] is not None
    return done[0]


def prepare(job: PreferenceJob, examples: list[Example], timer: PhaseTimer) -> Preferences:
    """Packs examples and finds out what their loss needs; a collective of the world."""
    batch = pack_examples(examples)
    desirable = torch.tensor([good for example in examples for good in example.is_desirable])
    if job.facts.head == "value":
        return Preferences(append_end_tokens(batch), desirable)
    ref_logprobs, baseline = None, 0.0
    if job.facts.needs_reference:
        with timer.phase("ref"):
            ref_logprobs = annotate_logprobs(job.ref, batch, 1.0)
    if not job.facts.is_pairwise:
        with timer.phase("baseline"):
            baseline = estimate_baseline(job.actor, job.ref, pack_examples(mismatch_examples(examples)))
    return Preferences(batch, desirable, ref_logprobs, baseline)


def validate(job: PreferenceJob, timer: PhaseTimer) -> dict[str, float]:
    """Loss, accuracy and margin on the held-out examples."""
    data = prepare(job, job.held_out, timer)
    with timer.phase("testing"):
        stats = evaluate_preferences(job.actor, job.options, data)
    return {f"val/{name.removeprefix('preference/')}": value for name, value in stats.items()}
