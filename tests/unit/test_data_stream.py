"""The order of prompts: deterministic, resumable, every row at most once an epoch."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.records import Prompt
from megarl.rollout.prompts import PromptStream, StreamPosition, plan_epoch, split_batches


def prompts_of(lengths: list[int]) -> list[Prompt]:
    return [Prompt(row=i, token_ids=(1,) * n, text="") for i, n in enumerate(lengths)]


def stream_of(num_prompts: int, batch_size: int, seed: int = 1, **options) -> PromptStream:
    return PromptStream(prompts_of([1 + i % 7 for i in range(num_prompts)]), batch_size, seed, **options)


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def read_rows(stream: PromptStream, num_batches: int) -> list[list[int]]:
    return [[prompt.row for prompt in stream.next_batch()] for _ in range(num_batches)]


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_fewer_rows_than_a_batch_names_origin_and_both_numbers(num_rows):  # case G7
    with pytest.raises(ValueError, match=rf"t.parquet: {num_rows} prompts .*train_batch_size=4"):
        stream_of(num_rows, 4, origin="t.parquet")


def test_validation_scores_every_row_once():  # case G7
    batches = split_batches(prompts_of([1] * 5), 4)
    assert [[prompt.row for prompt in batch] for batch in batches] == [[0, 1, 2, 3], [4]]


def test_validation_without_batch_size_is_one_batch():
    assert [len(batch) for batch in split_batches(prompts_of([1] * 5), None)] == [5]
    assert split_batches([], None) == []


def test_same_seed_repeats():  # case G8
    assert read_rows(stream_of(20, 4, seed=1), 12) == read_rows(stream_of(20, 4, seed=1), 12)


def test_seeds_differ():  # case G8
    assert read_rows(stream_of(20, 4, seed=1), 5) != read_rows(stream_of(20, 4, seed=2), 5)


def test_epochs_differ_and_hold_every_row_once():
    rows = read_rows(stream_of(20, 4), 10)
    first, second = flat(rows[:5]), flat(rows[5:])
    assert sorted(first) == sorted(second) == list(range(20)) and first != second


def test_without_shuffle_the_order_is_that_of_the_data():
    assert read_rows(stream_of(9, 4, shuffle=False), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("length_bucketing", [False, True])
def test_restored_position_continues_the_order(length_bucketing):
    straight = read_rows(stream_of(22, 4, length_bucketing=length_bucketing), 13)
    stream = stream_of(22, 4, length_bucketing=length_bucketing)
    read_rows(stream, 7)
    position = stream.position
    resumed = stream_of(22, 4, length_bucketing=length_bucketing)
    resumed.seek(position)
    assert position == StreamPosition(epoch=1, step=2)
    assert read_rows(resumed, 6) == straight[7:]


def test_position_of_other_data_is_refused():
    with pytest.raises(ValueError, match="holds 5 steps"):
        stream_of(20, 4).seek(StreamPosition(epoch=0, step=5))


def spread(lengths: list[int], batches: list[list[int]]) -> int:
    return sum(max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in batches)


def test_bucketing_puts_like_lengths_together_in_no_fixed_order():
    lengths = [(i * 37) % 100 for i in range(64)]
    plain = plan_epoch(lengths, 8, seed=1, epoch=0, shuffle=True, length_bucketing=False)
    bucketed = plan_epoch(lengths, 8, seed=1, epoch=0, shuffle=True, length_bucketing=True)
    assert spread(lengths, bucketed) < spread(lengths, plain) / 4
    firsts = [lengths[batch[0]] for batch in bucketed]
    assert firsts != sorted(firsts)


def test_bucketing_does_not_always_leave_out_the_longest():
    lengths = list(range(10))
    left_out = {
        row for epoch in range(20) for row in set(range(10)) - set(flat(plan_epoch(lengths, 4, 1, epoch, True, True)))
    }
    assert len(left_out) > 4


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    bucketing=st.booleans(),
)
def test_an_epoch_is_full_batches_of_different_rows(lengths, batch_size, seed, shuffle, bucketing):
    batches = plan_epoch(lengths, batch_size, seed, 0, shuffle, bucketing)
    rows = flat(batches)
    assert len(batches) == len(lengths) // batch_size
    assert all(len(batch) == batch_size for batch in batches)
    assert len(set(rows)) == len(rows) and set(rows) <= set(range(len(lengths)))


def test_the_fingerprint_knows_whatever_a_position_depends_on() -> None:
    same = stream_of(10, 4).fingerprint()
    others = [
        stream_of(11, 4), stream_of(10, 5), stream_of(10, 4, seed=2), stream_of(10, 4, shuffle=False),
        stream_of(10, 4, length_bucketing=True), stream_of(10, 4, answers=b"other"),
    ]  # fmt: skip
    assert stream_of(10, 4).fingerprint() == same
    assert len({same, *(other.fingerprint() for other in others)}) == 7
