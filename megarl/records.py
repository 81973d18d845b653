"""What travels between the parts of megarl: prompts, rollouts, packed batches and per-token scores.

Everything here is frozen. A batch of B sequences is *packed*: the tokens of all sequences lie one after
the other in a vector of T tokens, and `cu_seqlens` says where each begins. There is no padding anywhere.

Scores are aligned with the token they speak of, never with the position that computes them:

    position      0   1   2   3   4   5        prompt = 4 tokens, response = 2 tokens
    tokens        p   p   p   p   a   b
    response_mask .   .   .   .   T   T
    logprobs[4] = log p(a | pppp)              read from the hidden state at position 3
    values[4]   = V(pppp), the state before a  read from the hidden state at position 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One row of the data as the model sees it.

    `row` is the position of the row in its data set: together with the sample number it names an answer for good.
    `token_ids` is what the engine is given and what the trainer trains on; nothing is re-encoded later.
    `text` is what `token_ids` say, chat template included; `messages` the chat they were rendered from, each with role
    and content, empty where the prompt is plain text without a template.
    """

    row: int
    token_ids: tuple[int, ...]
    text: str
    data_source: str = ""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn: `temperature=0` is greedy; `stop_token_ids` end an answer and belong to it.

    `with_greedy`: beside the `n` answers one greedy answer to each prompt, as its last sample (number `n`).
    """

    n: int
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    top_p: float = 1.0
    top_k: int = -1
    with_greedy: bool = False

    @property
    def num_answers(self) -> int:
        """Answers to each prompt, the greedy one included."""
        return self.n + self.with_greedy

    def temperature_of(self, sample: int) -> float:
        """The temperature that this sample of a prompt is drawn at."""
        return self.temperature if sample < self.n else 0.0


@dataclass(frozen=True)
class Turn:
    """One turn of a multi-turn answer: `end` is the number of the answer's tokens up to its last sampled one."""

    end: int
    reward: float


@dataclass(frozen=True)
class Episode:
    """What the environment of a multi-turn answer says of it. `failure`: why it has no reward; it is not zero."""

    turns: tuple[Turn, ...]
    failure: str | None = None

    @property
    def reward(self) -> float:
        """The sum over the turns."""
        return sum(turn.reward for turn in self.turns)


@dataclass(frozen=True)
class Rollout:
    """One sampled answer.

    `prompt_index` is the position of its prompt in the list given to the engine, `sample` counts its siblings.
    `token_ids` are the sampled tokens, the ending token included when one was sampled;
    `logprobs` the engine's log-probabilities of exactly these tokens at the sampling temperature;
    `is_finished` is False when the answer was cut at the length limit;
    `weights_version` is the number of the weight update that the engine served it with.

    An answer of several turns also holds what its environment said: `policy_mask` is True for the sampled tokens, None
    where all are; other tokens have the log-probability 0. `episode` is the environment's account of it.
    """

    prompt_index: int
    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_finished: bool
    weights_version: int
    policy_mask: tuple[bool, ...] | None = None
    episode: Episode | None = None


@dataclass(frozen=True)
class PackedBatch:
    """B sequences (prompt, then response) packed into T tokens, on the host.

    Attributes:
        tokens: [T] int64.
        cu_seqlens: [B+1] int64, first entry 0, last entry T; sequence b is `tokens[cu_seqlens[b]:cu_seqlens[b+1]]`.
        response_mask: [T] bool, True = produced by the policy.
        rollout_logprobs: [T] fp32, the engine's log-probabilities, 0 outside the mask.
        group: [B] int64, equal for answers to the same prompt.
        is_finished: [B] bool, False where the answer was cut at the length limit.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    group: Tensor
    is_finished: Tensor

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def lengths(self) -> Tensor:
        """[B] int64: tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def prefix_lengths(self) -> Tensor:
        """[B] int64: tokens before the first policy token; the whole sequence where there is none."""
        lengths = self.lengths
        position = torch.arange(self.num_tokens) - self.cu_seqlens[:-1].repeat_interleave(lengths)
        sequence = torch.arange(self.num_sequences).repeat_interleave(lengths)
        first = torch.where(self.response_mask, position, self.num_tokens)
        return lengths.scatter_reduce(0, sequence, first, "amin")

    def token_rows(self, rows: Sequence[int]) -> Tensor:
        """[T'] int64: the packed positions of the sequences `rows`, in the order given."""
        bounds = self.cu_seqlens.tolist()
        spans = [torch.arange(bounds[row], bounds[row + 1]) for row in rows]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    def select(self, rows: Sequence[int]) -> PackedBatch:
        """The batch that holds only the sequences `rows`, in the order given."""
        index = self.token_rows(rows)
        order = torch.as_tensor(list(rows), dtype=torch.int64)
        lengths = self.lengths[order]
        cu_seqlens = torch.zeros(len(order) + 1, dtype=torch.int64)
        cu_seqlens[1:] = lengths.cumsum(0)
        return PackedBatch(
            tokens=self.tokens[index],
            cu_seqlens=cu_seqlens,
            response_mask=self.response_mask[index],
            rollout_logprobs=self.rollout_logprobs[index],
            group=self.group[order],
            is_finished=self.is_finished[order],
        )


@dataclass(frozen=True)
class Scores:
    """What is known of every token of a `PackedBatch`; each field is [T] fp32 or absent, and means nothing where
    `response_mask` is False.

    `old_logprobs`: the actor before the update. `ref_logprobs`: the reference. `values`: the critic before the update.
    `cost_values`: the cost critic. `rewards`: token-level, KL penalty included. `advantages`, `returns`,
    `cost_returns`: what the losses use. `importance`: what a token's policy loss counts, for the gap between sampler
    and trainer.
    """

    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    cost_values: Tensor | None = None
    cost_returns: Tensor | None = None
    importance: Tensor | None = None


def pack_rollouts(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> PackedBatch:
    """Packs every answer behind its own prompt, in the order of `rollouts`.

    Args:
        prompts: the prompts that the engine was given.
        rollouts: B answers; `prompt_index` points into `prompts`. An answer may be empty.

    Returns:
        A `PackedBatch` of B sequences whose `group` is the prompt's position in `prompts`.
    """
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    bounds = [0]
    for rollout in rollouts:
        prompt_ids = prompts[rollout.prompt_index].token_ids
        assert len(rollout.token_ids) == len(rollout.logprobs), (
            f"answer {rollout.sample} to prompt {rollout.prompt_index} has {len(rollout.token_ids)} tokens "
            f"but {len(rollout.logprobs)} log-probabilities"
        )
        tokens += prompt_ids + rollout.token_ids
        policy_mask = (True,) * len(rollout.token_ids) if rollout.policy_mask is None else rollout.policy_mask
        assert len(policy_mask) == len(rollout.token_ids), (
            f"answer {rollout.sample} to prompt {rollout.prompt_index} has {len(rollout.token_ids)} tokens "
            f"but a mask of {len(policy_mask)}"
        )
        mask += [False] * len(prompt_ids) + list(policy_mask)
        logprobs += [0.0] * len(prompt_ids) + list(rollout.logprobs)
        bounds.append(len(tokens))
    return PackedBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        group=torch.tensor([rollout.prompt_index for rollout in rollouts], dtype=torch.int64),
        is_finished=torch.tensor([rollout.is_finished for rollout in rollouts], dtype=torch.bool),
    )
