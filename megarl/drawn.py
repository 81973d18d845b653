"""Answers that were drawn, and what is being asked about them: rewards, and costs where answers have them.

ask_about ─> Drawn ─┬─ scoring_passes: Megatron reward models, to run beside other passes (annotate.py)
                    └─ join_rewards: waits for the sources   ─> Rewards by section, the same on every rank
judge_now            all of it at once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megarl.job import Job
from megarl.judging import Asked, ask_sources, join_answers
from megarl.records import PackedBatch, Prompt, Rollout, pack_rollouts
from megarl.reward.score import Rewards
from megarl.trainer.annotate import Pass, annotate, append_end_tokens, read_sequence_scores, value_pass


@dataclass(frozen=True)
class Drawn:
    """B answers.

    `texts` [B]: decoded, special tokens left out. `asked`: by section, "reward" and "cost". `longer`: all sequences as
    Megatron reward models read them; None where there is no such model.
    """

    prompts: list[Prompt]
    rollouts: list[Rollout]
    texts: list[str]
    asked: dict[str, Asked]
    longer: PackedBatch | None


def ask_about(job: Job, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], with_costs: bool = True) -> Drawn:
    """Asks the sources of a job about answers; those that wait elsewhere are still at it when this returns."""
    data, config = job.data, job.config
    texts = data.tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
    asked = {"reward": ask_sources(config.reward, data.reward, prompts, rollouts, texts, data.asker)}
    if with_costs and data.cost is not None:
        assert config.cost is not None
        asked["cost"] = ask_sources(config.cost, data.cost, prompts, rollouts, texts, data.asker, "cost")
    needs_model = any(each.roles for each in asked.values())
    longer = append_end_tokens(pack_rollouts(prompts, rollouts)) if needs_model else None
    return Drawn(list(prompts), list(rollouts), texts, asked, longer)


def scoring_passes(job: Job, drawn: Drawn) -> tuple[Pass, ...]:
    """The passes of the Megatron models among the sources, each over all of the answers."""
    roles = dict.fromkeys(role for asked in drawn.asked.values() for role in asked.roles)
    return tuple(value_pass(role, job.scoring[role], drawn.longer) for role in roles)


def join_rewards(drawn: Drawn, token_scores: Mapping[str, Tensor]) -> dict[str, Rewards]:
    """The rewards by section; waits for the sources. A collective of the world.

    Args:
        token_scores: what the `scoring_passes` found, by name.

    Raises:
        RuntimeError: on every rank, when too many answers could not be judged.
    """
    joined: dict[str, Rewards] = {}
    for section, asked in drawn.asked.items():
        scores: dict[str, Tensor] = {}
        for role in asked.roles:
            assert drawn.longer is not None
            scores[role] = read_sequence_scores(token_scores[role], drawn.longer)
        joined[section] = join_answers(asked, scores)
    return joined


def judge_now(
    job: Job, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], with_costs: bool = True
) -> tuple[Drawn, dict[str, Rewards]]:
    """Asks, scores and waits; a collective of the world."""
    drawn = ask_about(job, prompts, rollouts, with_costs)
    passes = scoring_passes(job, drawn)
    scores: dict[str, Tensor] = {}
    if drawn.longer is not None:
        scores, _ = annotate(passes, drawn.longer)
    return drawn, join_rewards(drawn, scores)
