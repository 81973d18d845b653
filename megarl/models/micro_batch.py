"""From sequences of a `PackedBatch` to what the model reads in one pass.

The score of token t comes from the hidden state at t - 1 of the same sequence. So a micro-batch notes, for every policy
token, which hidden state to read (`head_index`), the token itself (`targets`) and where its score belongs in the whole
batch (`token_index`). Answers to one prompt share the prompt's tokens, whose last hidden state is then read by each:

    batch        p q r a b   p q r c         packed       p q r a b c
    positions    0 1 2 3 4   0 1 2 3         positions    0 1 2 3 4 3
                                             head_index   2 3 2       targets  a b c

Under sequence parallelism the number of tokens must be a multiple of tp: the missing ones are a sequence of their own
at the end that no score ever reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl import device
from megarl.models.build import uses_transformer_engine
from megarl.models.segments import PackedSegments, Span, plan_segments
from megarl.parallel.partition import plan_dp_micro_batches
from megarl.records import PackedBatch

UNITS_PER_RANK = 4  # a group of answers is split rather than leave a data-parallel rank with fewer units of work


@dataclass(frozen=True)
class MicroBatch:
    """What the stages of one replica read in one pass; on the device.

    Attributes:
        input_ids, position_ids: [1, T'] int64, T' a multiple of tp.
        segments: the attention plan.
        head_index: [K] int64, the hidden states that scores are read from.
        targets: [K] int64, the policy tokens.
        token_index: [K] int64, on the host: positions of these tokens in the whole `PackedBatch`.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: PackedSegments
    head_index: Tensor
    targets: Tensor
    token_index: Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]


def can_share_prompts() -> bool:
    """Whether answers to one prompt share its tokens: with the attention of `segments.py`, not in the THD layout of
    Transformer Engine, which knows only sequences that lie in one piece."""
    return not uses_transformer_engine()


def plan_replicas(
    batch: PackedBatch,
    rows: Sequence[int],
    dp_size: int,
    max_tokens: int,
    max_sequences: int | None,
    together: int = 1,
) -> list[list[list[int]]]:
    """Spreads the sequences `rows` over data-parallel replicas and cuts each share into micro-batches.

    Answers to one prompt stay together, so that they can share it, unless a replica would go short of work.

    Args:
        together: so many neighbours of `rows` always share a micro-batch: 2 for a loss that compares pairs.

    Returns:
        For each replica the same number of micro-batches, each a list of rows of `batch`; an empty one is a dummy.

    Raises:
        ValueError: a sequence is longer than the budget `max_tokens`.
    """
    prefixes, lengths = batch.prefix_lengths.tolist(), batch.lengths.tolist()
    if together > 1:
        assert len(rows) % together == 0, f"{len(rows)} sequences are no whole number of groups of {together}"
        bound = [list(rows[first : first + together]) for first in range(0, len(rows), together)]
        limit = None if max_sequences is None else max(1, max_sequences // together)
        plans = plan_dp_micro_batches([sum(lengths[row] for row in unit) for unit in bound], dp_size, max_tokens, limit)
        return [[[row for unit in part for row in bound[unit]] for part in plan] for plan in plans]
    units: list[list[int]] = [[row] for row in rows]
    costs = [lengths[row] for row in rows]
    if can_share_prompts() and max_sequences is None:
        groups: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            groups.setdefault((int(batch.group[row]), prefixes[row]), []).append(row)
        total = sum(prefix + sum(lengths[row] - prefix for row in members) for (_, prefix), members in groups.items())
        limit = min(max_tokens, -(-total // (UNITS_PER_RANK * dp_size)))
        units, costs = [], []
        for (_, prefix), members in groups.items():
            for row in members:
                own = lengths[row] - prefix
                if row != members[0] and costs[-1] + own <= limit:
                    units[-1].append(row)
                    costs[-1] += own
                else:
                    units.append([row])
                    costs.append(lengths[row])
    plans = plan_dp_micro_batches(costs, dp_size, max_tokens, max_sequences)
    return [[[row for unit in part for row in units[unit]] for part in plan] for plan in plans]


def build_micro_batch(batch: PackedBatch, rows: Sequence[int], tp_size: int) -> MicroBatch:
    """Packs the sequences `rows`; no rows give a dummy of one filler sequence, with nothing to score."""
    bounds, groups, prefixes = batch.cu_seqlens.tolist(), batch.group.tolist(), batch.prefix_lengths.tolist()
    spans: list[Span] = []
    sources: list[Tensor] = []  # of each packed token, its position in the batch
    positions: list[Tensor] = []
    shared: dict[tuple[int, int], range] = {}
    joints: list[tuple[int, int]] = []  # (first own token, last prefix token) of sequences that share a prompt
    at = 0
    for row in rows:
        start, end, prefix = bounds[row], bounds[row + 1], prefixes[row]
        key = (groups[row], prefix)
        skipped = prefix if key in shared and can_share_prompts() else 0
        own = range(at, at + end - start - skipped)
        spans.append(Span(shared[key] if skipped else range(0), own))
        if skipped and own:
            joints.append((own.start, shared[key][-1]))
        shared.setdefault(key, range(at, at + prefix))
        sources.append(torch.arange(start + skipped, end))
        positions.append(torch.arange(skipped, end - start))
        at = own.stop
    filler = -at % tp_size if at else tp_size
    if filler:
        spans.append(Span(range(0), range(at, at + filler)))
        positions.append(torch.arange(filler))
    source = torch.cat([*sources, torch.empty(0, dtype=torch.int64)])
    position = torch.cat(positions)
    policy = batch.response_mask[source].nonzero().flatten()
    before = torch.arange(-1, at - 1)
    for first, last in joints:
        before[first] = last
    assert bool((position[policy] > 0).all()), "a sequence begins with a policy token: prompts must not be empty"
    tokens = batch.tokens[source]
    where = device.device()
    return MicroBatch(
        input_ids=torch.cat((tokens, tokens.new_zeros(filler)))[None].to(where),
        position_ids=position[None].to(where),
        segments=build_segments(spans, at + filler),
        head_index=before[policy].to(where),
        targets=tokens[policy].to(where),
        token_index=source[policy],
    )


def build_segments(spans: Sequence[Span], num_tokens: int) -> PackedSegments:
    """The attention plan for these sequences."""
    where = device.device()
    if not uses_transformer_engine():
        return PackedSegments(qkv_format="segments", blocks=plan_segments(spans, num_tokens, where))
    lengths = [len(span.own) for span in spans]
    assert not any(span.prefix for span in spans), "THD knows no shared prompts"
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths).cumsum(0)
    bounds = bounds.to(where)
    longest = max(lengths)
    return PackedSegments(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
