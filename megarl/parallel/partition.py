"""Who computes what: layers to stages, sequences to data-parallel ranks, sequences to mini- and micro-batches.

Pure and deterministic: every rank computes the same plan from the same lengths. Rows index the given `lengths`.

    step's batch ──plan_mini_batches──> rows per optimizer step
    a mini-batch ──assign_sequences───> rows per data-parallel rank ──plan_micro_batches──> rows per forward/backward
                  └──────────────────── plan_dp_micro_batches does both ───────────────────┘

Invariants (the tests hold them):
1. Every sequence is in exactly one place: one rank, one micro-batch, and one mini-batch of each epoch.
2. No micro-batch holds more than `max_tokens` tokens or `max_sequences` sequences.
3. Every data-parallel rank gets the same number of micro-batches, so that all join the same collectives; a rank that
   has fewer sequences than that runs empty ones, which come last.
4. A rank is without sequences only when there are fewer sequences than ranks.
5. Micro-batches are never more than first-fit decreasing needs, unless `min_batches` asks for more.

A worked example: lengths 8 7 6 5 4 on two ranks, quadratic_cost=0. 8 against 7 leaves 1, 6 against 5 leaves 1, 4
against the first 1 leaves 3, 3 against the other 1 leaves 2: the ranks get 8+6 and 7+5+4.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

Bins = list[list[int]]
Partial = list[tuple[float, tuple[int, ...]]]  # non-empty bins as (load, rows), heaviest first

# A layer spends about 24·H² FLOPs a token and 4·H for each pair of tokens: 6·H to 1. This is H = 4096.
LINEAR_COST = 24576.0
QUADRATIC_COST = 1.0


def split_layers(num_layers: int, pp_size: int) -> list[int]:
    """Layers of each stage, as even as possible; the earlier stages take the rest, the last also runs the head.

    Raises:
        ValueError: a stage would be empty.
    """
    if not 1 <= pp_size <= num_layers:
        raise ValueError(
            f"pp_size={pp_size} does not fit num_layers={num_layers}: every stage needs a layer; use 1 to {num_layers}"
        )
    each, rest = divmod(num_layers, pp_size)
    return [each + (stage < rest) for stage in range(pp_size)]


def layer_range(num_layers: int, pp_size: int, stage: int) -> range:
    """The layers that `stage` owns, counted from 0 over the whole model."""
    counts = split_layers(num_layers, pp_size)
    assert 0 <= stage < pp_size, f"stage {stage} is not in 0..{pp_size - 1}"
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def sequence_work(length: int, linear_cost: float = LINEAR_COST, quadratic_cost: float = QUADRATIC_COST) -> float:
    """What a sequence costs to compute, in any unit: `linear_cost` a token, `quadratic_cost` a pair of tokens."""
    return linear_cost * length + quadratic_cost * length * length


def assign_sequences(
    lengths: Sequence[int],
    dp_size: int,
    linear_cost: float = LINEAR_COST,
    quadratic_cost: float = QUADRATIC_COST,
) -> Bins:
    """Spreads sequences over data-parallel ranks so that the heaviest rank has little more than its share.

    Largest differencing (Karmarkar and Karp 1982); the heaviest rank is within 4/3 of the best possible.

    Args:
        lengths: tokens of each of B sequences.
        dp_size: ranks.
        linear_cost, quadratic_cost: see `sequence_work`.

    Returns:
        `dp_size` ascending lists of rows; none is empty when B >= dp_size.
    """
    assert dp_size >= 1, f"dp_size={dp_size} must be 1 or more"
    return _balance([sequence_work(length, linear_cost, quadratic_cost) for length in lengths], dp_size)


def plan_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    max_sequences: int | None = None,
    min_batches: int = 1,
    linear_cost: float = LINEAR_COST,
    quadratic_cost: float = QUADRATIC_COST,
) -> Bins:
    """Packs one rank's sequences into few micro-batches of near equal work under a token budget.

    Args:
        lengths: tokens of each of B sequences.
        max_tokens: the most tokens in a micro-batch.
        max_sequences: the most sequences in a micro-batch; None = any.
        min_batches: the least number of micro-batches, as far as there are sequences.
        linear_cost, quadratic_cost: see `sequence_work`.

    Returns:
        Ascending lists of rows, none empty, the heaviest first so that too large a budget shows at once. Their
        number is max(n, min(min_batches, B)), where n is what the other arguments alone give.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    assert max_sequences is None or max_sequences >= 1, f"max_sequences={max_sequences} must be 1 or more"
    for row, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sequence {row} has {length} tokens, more than the micro-batch budget of {max_tokens}; "
                f"set ppo_max_token_len to {max(lengths)} or more, or lower the maximum prompt or response length"
            )
    if not lengths:
        return []
    limit = len(lengths) if max_sequences is None else max_sequences
    work = [sequence_work(length, linear_cost, quadratic_cost) for length in lengths]
    bins = _fewest_bins(lengths, max_tokens, limit)
    num_batches = max(len(bins), min(min_batches, len(lengths)))

    plans = [_split_bins(bins, work, num_batches), _balance(work, num_batches)]
    spread = _spread(lengths, num_batches, max_tokens, limit)
    plans += [spread] if spread else []
    fitting = [plan for plan in plans if all(_fits(rows, lengths, max_tokens, limit) for rows in plan)]
    best = min(fitting, key=lambda plan: max(_load(rows, work) for rows in plan))
    return sorted(best, key=lambda rows: (-_load(rows, work), rows))


def plan_dp_micro_batches(
    lengths: Sequence[int],
    dp_size: int,
    max_tokens: int,
    max_sequences: int | None = None,
    min_batches: int = 1,
    linear_cost: float = LINEAR_COST,
    quadratic_cost: float = QUADRATIC_COST,
) -> list[Bins]:
    """The micro-batches of every data-parallel rank: the same number everywhere.

    Args:
        lengths: tokens of each of B sequences of the mini-batch.
        dp_size: ranks.
        max_tokens, max_sequences, min_batches, linear_cost, quadratic_cost: as for `plan_micro_batches`.

    Returns:
        For each rank a list of micro-batches, each a list of rows of `lengths`; an empty one is a dummy that the rank
        runs with weight zero.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    ranks = assign_sequences(lengths, dp_size, linear_cost, quadratic_cost)

    def plan(rows: list[int], at_least: int) -> Bins:
        own = [lengths[row] for row in rows]
        bins = plan_micro_batches(own, max_tokens, max_sequences, at_least, linear_cost, quadratic_cost)
        return [[rows[index] for index in bin_rows] for bin_rows in bins]

    num_batches = max(min_batches, max(len(plan(rows, 1)) for rows in ranks))
    plans = [plan(rows, num_batches) for rows in ranks]
    num_batches = max(1, max(len(bins) for bins in plans))
    return [bins + [[] for _ in range(num_batches - len(bins))] for bins in plans]


def plan_mini_batches(
    num_sequences: int,
    sequences_per_prompt: int,
    prompts_per_mini_batch: int,
    epochs: int,
    seed: int,
    shuffle: bool,
    step: int = 0,
) -> Bins:
    """The mini-batches of one training step, one optimizer step each, all epochs one after the other.

    A mini-batch counts `prompts_per_mini_batch * sequences_per_prompt` sequences, whichever prompts they answer. Where
    that does not divide `num_sequences` (answers were dropped), sizes differ by one at most: a tiny rest would move
    the weights as much as a full mini-batch.

    Args:
        num_sequences: B.
        sequences_per_prompt: answers drawn for each prompt.
        prompts_per_mini_batch: size, in prompts.
        epochs: passes over the batch.
        seed, step: with the epoch they fix the order.
        shuffle: draw the sequences in a new order each epoch, else in rows' order.

    Returns:
        Ascending lists of rows; each epoch holds every row once.
    """
    size = sequences_per_prompt * prompts_per_mini_batch
    assert size >= 1, f"{prompts_per_mini_batch} prompts × {sequences_per_prompt} answers is no mini-batch"
    num_batches = -(-num_sequences // size)
    bounds = [-(-num_sequences * index // num_batches) for index in range(num_batches + 1)] if num_batches else []
    batches: Bins = []
    for epoch in range(epochs):
        rows = list(range(num_sequences))
        if shuffle:
            random.Random(f"mini-batches/{seed}/{step}/{epoch}").shuffle(rows)
        batches += [sorted(rows[first:end]) for first, end in itertools.pairwise(bounds)]
    return batches


def _load(rows: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[row] for row in rows)


def _fits(rows: Sequence[int], lengths: Sequence[int], max_tokens: int, limit: int) -> bool:
    return len(rows) <= limit and sum(lengths[row] for row in rows) <= max_tokens


def _balance(costs: Sequence[float], num_bins: int) -> Bins:
    """Largest differencing: merge the two most uneven partial partitions, heavy on light, until one is left.

    Heavy on light fills an empty bin before it doubles one, so no bin stays empty while there are rows enough.
    """

    def uneven(part: Partial) -> float:
        return part[0][0] - (part[-1][0] if len(part) == num_bins else 0)

    queue: list[tuple[float, int, Partial]] = [(-cost, row, [(cost, (row,))]) for row, cost in enumerate(costs)]
    heapq.heapify(queue)
    number = len(queue)
    while len(queue) > 1:
        _, _, one = heapq.heappop(queue)
        _, _, other = heapq.heappop(queue)
        num_shared = max(0, len(one) + len(other) - num_bins)
        heavy_first, light_first = one[len(one) - num_shared :], reversed(other[len(other) - num_shared :])
        shared = [(a + b, rows_a + rows_b) for (a, rows_a), (b, rows_b) in zip(heavy_first, light_first, strict=True)]
        merged: Partial = one[: len(one) - num_shared] + other[: len(other) - num_shared] + shared
        merged.sort(key=lambda entry: (-entry[0], entry[1]))
        heapq.heappush(queue, (-uneven(merged), number, merged))
        number += 1
    filled = [sorted(rows) for _, rows in queue[0][2]] if queue else []
    return sorted(filled) + [[] for _ in range(num_bins - len(filled))]


def _spread(lengths: Sequence[int], num_bins: int, max_tokens: int, limit: int) -> Bins | None:
    """Longest first, each into the emptiest bin that has room; None when one finds no room."""
    bins: Bins = [[] for _ in range(num_bins)]
    open_bins = [(0, index) for index in range(num_bins)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not open_bins or open_bins[0][0] + lengths[row] > max_tokens:
            return None
        load, index = heapq.heappop(open_bins)
        bins[index].append(row)
        if len(bins[index]) < limit:
            heapq.heappush(open_bins, (load + lengths[row], index))
    return [sorted(rows) for rows in bins] if all(bins) else None


def _fewest_bins(lengths: Sequence[int], max_tokens: int, limit: int) -> Bins:
    """Bins within both limits: first-fit decreasing, or fewer where `_spread` finds them."""
    bins: Bins = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        at = next((i for i, left in enumerate(room) if left >= lengths[row] and len(bins[i]) < limit), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[at].append(row)
        room[at] -= lengths[row]
    least = max(1, -(-sum(lengths) // max(1, max_tokens)), -(-len(lengths) // limit))
    for num_bins in range(least, len(bins)):
        spread = _spread(lengths, num_bins, max_tokens, limit)
        if spread:
            return spread
    return bins


def _split_bins(bins: Bins, work: Sequence[float], num_bins: int) -> Bins:
    """The same rows in `num_bins` bins: the heaviest bin with two rows or more is halved until there are enough."""
    bins = [sorted(rows) for rows in bins]
    while len(bins) < num_bins:
        heaviest = max((rows for rows in bins if len(rows) > 1), key=lambda rows: _load(rows, work))
        halves = _balance([work[row] for row in heaviest], 2)
        bins.remove(heaviest)
        bins += [[heaviest[index] for index in half] for half in halves]
    return bins
