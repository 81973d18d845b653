"""Prompts out to the engines, answers back to every rank of the job.

Prompt i goes to engine i modulo the number of engines. The first rank of each engine speaks for it: its answers travel
as two vectors (numbers and log-probs) to all ranks, so that every rank goes on with the same list, ordered by prompt,
then by sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.topology import Topology
from megarl.parallel.transfer import share_ragged
from megarl.records import Prompt, Rollout, Sampling
from megarl.rollout.engine import RolloutEngine

HEADER = 5  # numbers before an answer's tokens: prompt, sample, is_finished, weights_version, number of tokens


def generate_everywhere(
    engine: RolloutEngine | None, topology: Topology, prompts: Sequence[Prompt], sampling: Sampling
) -> list[Rollout]:
    """Draws answers to `prompts` on all engines; a collective of the world.

    Args:
        engine: this rank's engine, or None outside the rollout role.
        topology: the rollout grid; each of its data-parallel replicas is one engine.

    Returns:
        `len(prompts) * sampling.num_answers` rollouts, the same on every rank; `prompt_index` points into `prompts`.
    """
    own: list[Rollout] = []
    rank = dist.get_rank()
    if engine is not None:
        at = topology.coordinates(rank)
        mine = range(at.dp, len(prompts), topology.dp_size)
        answers = engine.generate([prompts[i] for i in mine], sampling) if mine else []
        if at.tp == 0 and at.pp == 0:
            own = [dataclasses.replace(answer, prompt_index=mine[answer.prompt_index]) for answer in answers]
    numbers, logprobs = _encode(own)
    shared = zip(share_ragged(numbers), share_ragged(logprobs), strict=True)
    rollouts = [rollout for parts in shared for rollout in _decode(*parts)]
    rollouts.sort(key=lambda rollout: (rollout.prompt_index, rollout.sample))
    expected = [(i, sample) for i in range(len(prompts)) for sample in range(sampling.num_answers)]
    assert [(rollout.prompt_index, rollout.sample) for rollout in rollouts] == expected, (
        f"{len(rollouts)} answers came back for {len(prompts)} prompts × {sampling.num_answers}"
    )
    return rollouts


def _encode(rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    numbers: list[int] = []
    logprobs: list[float] = []
    for rollout in rollouts:
        count = len(rollout.token_ids)
        numbers += [rollout.prompt_index, rollout.sample, int(rollout.is_finished), rollout.weights_version, count]
        numbers += rollout.token_ids
        logprobs += rollout.logprobs
    return torch.tensor(numbers, dtype=torch.int64), torch.tensor(logprobs, dtype=torch.float32)


def _decode(numbers: Tensor, logprobs: Tensor) -> list[Rollout]:
    values, probs = numbers.tolist(), logprobs.tolist()
    rollouts: list[Rollout] = []
    at = used = 0
    while at < len(values):
        prompt_index, sample, is_finished, version, count = values[at : at + HEADER]
        at += HEADER
        rollouts.append(
            Rollout(
                prompt_index=prompt_index,
                sample=sample,
                token_ids=tuple(values[at : at + count]),
                logprobs=tuple(probs[used : used + count]),
                is_finished=bool(is_finished),
                weights_version=version,
            )
        )
        at, used = at + count, used + count
    return rollouts
