"""Answers of several turns: the policy speaks, its environment replies, and so on, on all engines at once.

    contexts of the open episodes ─> engines ─> one turn each ─> rank 0: environments ─> observations, as tokens
          ^                                                                                      │
          └───────────── context + turn + observation, where the episode goes on ────────────────┘

    prompt      turn 1      observation   turn 2               one answer, one sequence in training
    p p p p     a b c       o o           d e
    . . . .     T T T       . .           T T                  policy_mask: only what the policy sampled is learned

Every rank runs this loop and holds the same episodes; environments live on rank 0, whose observations travel to all.
An answer always ends with a token of the policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megarl.parallel.topology import Topology
from megarl.records import Episode, Prompt, Rollout, Sampling, Turn
from megarl.rollout.chat_turns import ChatTurns
from megarl.rollout.collect import generate_everywhere
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.environment import Environment, read_step

MAX_SAMPLES = 1 << 20  # answers to one prompt; keeps the seeds of different rows apart


@dataclass(frozen=True)
class TurnLimits:
    """Bounds of an episode: its turns, tokens the policy may say in one, and tokens of everything after the prompt."""

    max_turns: int
    max_tokens_per_turn: int
    max_response_tokens: int


@dataclass(frozen=True)
class Reply:
    """What rank 0 tells of one turn: tokens to read (none when the episode is over), its reward, or what failed."""

    token_ids: tuple[int, ...] = ()
    reward: float = 0.0
    is_done: bool = False
    failure: str | None = None


@dataclass
class _Draft:
    """An answer in the making; the same on every rank, but for the environment, which only rank 0 has."""

    prompt: Prompt
    prompt_index: int
    sample: int
    environment: Environment | None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    mask: tuple[bool, ...] = ()
    turns: tuple[Turn, ...] = ()
    failure: str | None = None
    is_finished: bool = False
    is_over: bool = False
    version: int = 0

    def ask(self) -> Prompt:
        """What the engine answers next; the row names the episode, so that no two share their random numbers."""
        row = self.prompt.row * MAX_SAMPLES + self.sample
        return Prompt(row=row, token_ids=self.prompt.token_ids + self.token_ids, text="")

    def add(self, turn: Rollout, reply: Reply, limits: TurnLimits) -> None:
        """Takes the policy's turn and the environment's reply to it."""
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.mask += (True,) * len(turn.token_ids)
        self.turns += (Turn(len(self.token_ids), reply.reward),)
        self.version = turn.weights_version
        self.failure = reply.failure
        self.is_finished = reply.is_done
        room = limits.max_response_tokens - len(self.token_ids) - len(reply.token_ids)
        can_go_on = turn.is_finished and len(self.turns) < limits.max_turns and room >= limits.max_tokens_per_turn
        self.is_over = reply.is_done or reply.failure is not None or not can_go_on
        if not self.is_over:
            self.token_ids += reply.token_ids
            self.logprobs += (0.0,) * len(reply.token_ids)
            self.mask += (False,) * len(reply.token_ids)

    def to_rollout(self) -> Rollout:
        return Rollout(
            prompt_index=self.prompt_index,
            sample=self.sample,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            is_finished=self.is_finished,
            weights_version=self.version,
            policy_mask=self.mask,
            episode=Episode(self.turns, self.failure),
        )


def generate_episodes(
    engine: RolloutEngine | None,
    topology: Topology,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    chat: ChatTurns,
    build_environment: Callable[[], Environment],
    limits: TurnLimits,
) -> list[Rollout]:
    """Plays `sampling.num_answers` episodes for each prompt; a collective of the world.

    Args:
        engine: this rank's engine, or None outside the rollout role.
        topology: the rollout grid.
        sampling: how each turn is drawn; `max_tokens` is left to `limits`.
        chat: the tokenizer and its template.
        build_environment: makes one environment; called on rank 0 only.

    Returns:
        `len(prompts) * sampling.num_answers` rollouts by prompt, then by sample, the same on every rank.
    """
    drafts = [
        _Draft(prompt, index, sample, build_environment() if dist.get_rank() == 0 else None)
        for index, prompt in enumerate(prompts)
        for sample in range(sampling.num_answers)
    ]
    for number in range(limits.max_turns):
        open_drafts = [draft for draft in drafts if not draft.is_over]
        if not open_drafts:
            break
        turns = _ask_everywhere(engine, topology, open_drafts, sampling, limits.max_tokens_per_turn, number)
        replies = _reply_everywhere(open_drafts, turns, chat, is_first=number == 0)
        for draft, turn, reply in zip(open_drafts, turns, replies, strict=True):
            draft.add(turn, reply, limits)
    return [draft.to_rollout() for draft in drafts]


def _ask_everywhere(
    engine: RolloutEngine | None,
    topology: Topology,
    drafts: Sequence[_Draft],
    sampling: Sampling,
    max_tokens: int,
    number: int,
) -> list[Rollout]:
    """Turn `number` of each draft, drawn as its sample is: a greedy answer is greedy in every turn. A collective."""
    turns: dict[int, Rollout] = {}
    for temperature in sorted({sampling.temperature_of(draft.sample) for draft in drafts}):
        asked = [i for i, draft in enumerate(drafts) if sampling.temperature_of(draft.sample) == temperature]
        once = replace(
            sampling,
            n=1,
            with_greedy=False,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=_derive_seed(sampling.seed, number),
        )
        turns |= zip(asked, generate_everywhere(engine, topology, [drafts[i].ask() for i in asked], once), strict=True)
    return [turns[i] for i in range(len(drafts))]


def _reply_everywhere(
    drafts: Sequence[_Draft], turns: Sequence[Rollout], chat: ChatTurns, is_first: bool
) -> list[Reply]:
    """What the environments say, found on rank 0; a collective of the world."""
    box: list[list[Reply]] = [[]]
    if dist.get_rank() == 0:
        texts = chat.tokenizer.batch_decode([turn.token_ids for turn in turns], skip_special_tokens=True)
        box[0] = [
            _reply(draft, turn, text, chat, is_first) for draft, turn, text in zip(drafts, turns, texts, strict=True)
        ]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def _reply(draft: _Draft, turn: Rollout, text: str, chat: ChatTurns, is_first: bool) -> Reply:
    assert draft.environment is not None, "environments live on rank 0"
    try:
        if is_first:
            draft.environment.reset(draft.prompt)
        messages, reward, is_done = read_step(draft.environment.step(text))
        token_ids = () if is_done else chat.encode_observation(messages, turn.token_ids)
    except Exception as error:  # noqa: BLE001 - a user's code: its episode is marked as failed, the share is capped
        return Reply(failure=f"turn {len(draft.turns) + 1}: {type(error).__name__}: {error}")
    return Reply(token_ids, reward, is_done)


def _derive_seed(seed: int, turn: int) -> int:
    digest = hashlib.blake2b(f"{seed} turn {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
