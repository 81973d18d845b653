"""`megarl check parity --config FILE`: one batch through every split the ranks allow; loss and gradients must agree.

    first one rank, the whole batch at once ──> loss, gradients
    then micro-batch budgets, TP, PP, virtual stages, DP, schedules ──> the same, or a line that says how far off

Weights come from the configuration's folders, tokens are random, everything is computed in fp32: what differs is the
splitting alone. Run it before trusting a grid; it needs as many ranks as the grids to be tried.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import device
from megarl.algo.objective import policy_objective, value_objective
from megarl.config.hub import load_run
from megarl.config.needs import score_needs
from megarl.config.schema import Config
from megarl.launch.failure import run_rank
from megarl.launch.local import resolve_world
from megarl.models.build import BuildOptions
from megarl.models.forward import compute_values, run_policy_head
from megarl.models.layout import HeadKind
from megarl.models.registry import read_model_spec
from megarl.obs.log import setup_logging
from megarl.parallel.groups import GroupCache, build_groups
from megarl.parallel.picker import Choice, plan_chunk_stages
from megarl.parallel.topology import Topology, plan_topology
from megarl.records import PackedBatch
from megarl.trainer.annotate import annotate_logprobs
from megarl.trainer.optim import AdamOptions, LRSchedule, gather_gradients
from megarl.trainer.roles import Role, build_role
from megarl.trainer.update import Objective, PipelineOptions, Task, compute_gradients_together
from megarl.weights.gather import gather_hf_tensors

NUM_SEQUENCES = 8
TOLERANCE = 1e-4  # largest relative difference of a tensor's gradient in fp32


@dataclass(frozen=True)
class Split:
    """One way to cut the work. `max_tokens`: of a micro-batch; `schedule` where pp > 1."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    max_tokens: int = 1 << 30
    schedule: Choice = "1f1b"
    together: bool = False

    def __str__(self) -> str:
        budget = "all at once" if self.max_tokens == 1 << 30 else f"{self.max_tokens} tokens"
        how = f", {self.schedule}" if self.pp > 1 else ""
        return f"tp{self.tp} pp{self.pp} dp{self.dp}, {budget}{how}"


@dataclass(frozen=True)
class Outcome:
    """Loss by role, and gradients by `role/Hugging Face name`."""

    losses: dict[str, float]
    gradients: dict[str, Tensor] = field(repr=False)

    @property
    def grad_norm(self) -> float:
        return float(sum(gradient.double().square().sum() for gradient in self.gradients.values()) ** 0.5)


def list_splits(
    world_size: int, num_kv_heads: int, num_heads: int, num_layers: int, budget: int, has_critic: bool
) -> Iterator[Split]:
    """The first split is one rank and one micro-batch; then all that these ranks and this model allow."""
    yield Split()
    yield Split(max_tokens=budget)
    sizes = range(1, world_size + 1)
    for tp, pp, dp in itertools.product(sizes, sizes, sizes):
        fits = tp * pp * dp <= world_size and not (num_kv_heads % tp or num_heads % tp) and pp <= num_layers
        if not fits or (tp, pp, dp) == (1, 1, 1):
            continue
        yield Split(tp, pp, dp, budget)
        if pp == 1:
            continue
        if num_layers >= 2 * pp:
            yield Split(tp, pp, dp, budget, "interleaved")
        yield Split(tp, pp, dp, budget, "zero_bubble")
        if has_critic:
            yield Split(tp, pp, dp, budget, "fused", together=True)


def build_parity_batch(config: Config, vocab_size: int) -> PackedBatch:
    """Random sequences within the configuration's lengths, one without an answer."""
    draw = random.Random(1)
    prompts = [draw.randint(1, min(48, config.data.max_prompt_length)) for _ in range(NUM_SEQUENCES)]
    answers = [draw.randint(1, min(96, config.data.max_response_length)) for _ in range(NUM_SEQUENCES - 1)] + [0]
    lengths = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    mask = torch.cat([torch.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)])
    generator = torch.Generator().manual_seed(1)
    return PackedBatch(
        tokens=torch.randint(vocab_size, (sum(lengths),), generator=generator),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        response_mask=mask,
        rollout_logprobs=torch.zeros(sum(lengths)),
        group=torch.arange(NUM_SEQUENCES),
        is_finished=torch.ones(NUM_SEQUENCES, dtype=torch.bool),
    )


def run_split(
    config: Config, split: Split, batch: PackedBatch, old_logprobs: Tensor | None, cache: GroupCache
) -> tuple[Outcome, Tensor]:
    """Loss and gradients of one split, on every rank; a collective of the world.

    Args:
        old_logprobs: [T] of the first split; None = this is the first.

    Returns:
        The outcome, and the old log-probs.
    """
    world_size = dist.get_world_size()
    names = ["actor", "critic"] if "values" in score_needs(config) else ["actor"]
    roles: dict[str, Role | None] = {}
    topologies: dict[str, Topology] = {}
    for name in names:
        path = _model_path(config, name)
        num_layers = read_model_spec(path)[1].num_layers
        is_reversed = split.together and name == "critic"
        ranks = list(range(split.tp * split.pp * split.dp))
        grid = plan_topology(name, world_size, split.tp, split.pp, split.dp, ranks)
        topologies[name] = replace(
            grid, chunk_stages=plan_chunk_stages(split.schedule, split.pp, num_layers, is_reversed)
        )
        options = BuildOptions(torch.float32, "value" if name == "critic" else "policy", splits_gradients=split.pp > 1)
        learns = AdamOptions(0.0, (0.9, 0.999), 1e-8, 0.0), LRSchedule(0.0, 0.0, 0, "constant", 1)
        groups = build_groups(topologies[name], cache)
        roles[name] = build_role(name, groups, path, options, max_tokens=split.max_tokens, learns=learns)
        _fill_value_head(roles[name])
    if old_logprobs is None:
        old_logprobs = annotate_logprobs(roles["actor"], batch, config.rollout.temperature)
    losses: list[dict[str, float]] = [{}]
    tasks = [
        Task(role, [list(range(NUM_SEQUENCES))], _build_objective(config, role, batch, old_logprobs), "token-mean", 0)
        for role in roles.values()
        if role is not None
    ]
    if tasks:
        for group in [tasks] if split.together else [[task] for task in tasks]:
            stats = compute_gradients_together(group, batch, batch.response_mask, PipelineOptions(split.schedule))
            losses[0] |= {
                name: own["actor/pg_loss" if name == "actor" else "critic/vf_loss"] for name, own in stats.items()
            }
    dist.broadcast_object_list(losses, src=0, device=torch.device("cpu"))
    return Outcome(losses[0], dict(_collect_gradients(config, roles, topologies))), old_logprobs


def _model_path(config: Config, name: str) -> str:
    path = config.critic.model_path if name == "critic" else config.actor.model_path
    assert path is not None
    return path


def _fill_value_head(role: Role | None) -> None:
    """A fresh value head is all zeros and would hide the gradient of everything below it."""
    if role is not None and role.name == "critic" and role.groups.is_last_stage:
        weight = role.weights()["output_layer.weight"]
        weight.copy_(torch.linspace(-0.2, 0.2, weight.numel()).view_as(weight))


def _collect_gradients(
    config: Config, roles: dict[str, Role | None], topologies: dict[str, Topology]
) -> Iterator[tuple[str, Tensor]]:
    heads: dict[str, HeadKind] = {"actor": "policy", "critic": "value"}
    for name, role in roles.items():
        family, spec = read_model_spec(_model_path(config, name))
        own = None
        if role is not None and role.training is not None:
            gather_gradients(role.training.chunks, role.groups)
            own = role.gradients()
        gathered = gather_hf_tensors(family, spec, topologies[name], own, torch.float32, device.device(), heads[name])
        for key, tensor in gathered:
            yield f"{name}/{key}", tensor.cpu().clone()


def _build_objective(config: Config, role: Role, batch: PackedBatch, old_logprobs: Tensor) -> Objective:
    """The configuration's losses on made-up advantages, old log-probs, values and returns."""
    generator = torch.Generator().manual_seed(2)
    noise, advantages, returns, values = (torch.randn(batch.num_tokens, generator=generator) for _ in range(4))
    old = old_logprobs + 0.3 * noise
    actor, temperature = config.actor, config.rollout.temperature

    def policy(hidden, micro, weights):
        pick = micro.token_index
        own = [each[pick].to(hidden.device) for each in (old, advantages, weights.loss, weights.mask)]

        def token_loss(logprobs, entropy, part):
            before, gain, weight, mask = (each[part] for each in own)
            return policy_objective(
                logprobs, entropy, before, gain, weight, mask, clip_low=actor.clip_ratio, clip_high=actor.clip_ratio,
                clip_c=actor.clip_ratio_c, entropy_coeff=actor.entropy_coeff,
            )  # fmt: skip

        return run_policy_head(role.model, hidden, micro, role.groups, temperature, role.num_ids, token_loss)

    def value(hidden, micro, weights):
        pick = micro.token_index
        own = [each[pick].to(hidden.device) for each in (values, returns, weights.loss, weights.mask)]
        predicted = compute_values(role.model, hidden, micro, role.groups)
        return value_objective(predicted, *own, clip_range=config.critic.cliprange_value)

    return value if role.name == "critic" else policy


def run_parity(config: Config, tolerance: float) -> bool:
    """Runs every split and prints a line for each on rank 0; a collective of the world. True when all agree."""
    from rich.console import Console
    from rich.table import Table

    _, spec = read_model_spec(_model_path(config, "actor"))
    batch = build_parity_batch(config, spec.vocab_size)
    has_critic = "values" in score_needs(config)
    budget = int(batch.lengths.max())
    splits = list_splits(dist.get_world_size(), spec.num_kv_heads, spec.num_heads, spec.num_layers, budget, has_critic)
    cache = GroupCache(config.trainer.timeout_s)
    table = Table(title=f"parity of {batch.num_tokens} tokens in fp32, against the first line", title_justify="left")
    for name in ("split", "loss", "grad norm", "largest gradient difference", ""):
        table.add_column(name, justify="left" if name == "split" else "right")
    first: Outcome | None = None
    old_logprobs: Tensor | None = None
    all_agree = True
    for split in splits:
        outcome, old_logprobs = run_split(config, split, batch, old_logprobs, cache)
        first = first or outcome
        apart, where = compare(outcome, first)
        agrees = apart <= tolerance
        all_agree &= agrees
        losses = ", ".join(f"{name} {loss:.6f}" for name, loss in outcome.losses.items())
        table.add_row(str(split), losses, f"{outcome.grad_norm:.6f}", f"{apart:.1e} {where}", "ok" if agrees else "OFF")
    if dist.get_rank() == 0:
        console = Console(width=None if sys.stdout.isatty() else 180)
        console.print(table)
        console.print("all agree" if all_agree else f"some differ by more than {tolerance:g}")
    return all_agree


def compare(outcome: Outcome, first: Outcome) -> tuple[float, str]:
    """The largest relative difference of loss or of a tensor's gradient, and where it is."""
    apart = {
        f"loss of {name}": abs(outcome.losses[name] - loss) / max(abs(loss), 1e-6)
        for name, loss in first.losses.items()
    }
    for name, expected in first.gradients.items():
        scale = max(float(expected.norm()), 1e-12)
        apart[name] = float((outcome.gradients[name] - expected).norm()) / scale
    worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else float("inf"))
    return apart[worst], worst


def main(words: Sequence[str]) -> None:
    """One rank's run: `python -m megarl.parity [--config FILE] [--tolerance X] [key=value ...]`."""
    options = parse_words(words)
    config, _ = load_run(options.config, options.overrides)
    world = resolve_world(None, None, os.environ)
    assert world is not None, "started without a launcher: use `megarl check parity`"
    os.environ |= world.environment()
    setup_logging(world.rank)
    device.bind_local_device(world.local_rank)
    timeout = datetime.timedelta(seconds=config.trainer.timeout_s)
    dist.init_process_group(device.backend(), rank=world.rank, world_size=world.world_size, timeout=timeout)
    agrees = run_parity(config, options.tolerance)
    dist.barrier()
    sys.stdout.flush()
    if not agrees and world.rank == 0:
        raise RuntimeError(f"some splits differ by more than {options.tolerance:g}; see the table")
    os._exit(0)  # communicators have threads of their own that may hang while they are torn down


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="megarl check parity", description="Loss and gradients of one batch, split every way."
    )
    parser.add_argument("--config", help="a YAML file; its values go over the defaults")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="largest relative difference allowed")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="go over the file's values")
    return parser.parse_args(list(words))


if __name__ == "__main__":
    run_rank(lambda: main(sys.argv[1:]))
