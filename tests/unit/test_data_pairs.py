"""Preference data: every form of a row gives the same ids, and what is wrong is told with file and row."""

from __future__ import annotations

import pytest

from megarl.rollout.pairs import Columns, build_examples, mismatch_examples, pack_examples
from megarl.rollout.tokenizer import load_tokenizer
from tests.tiny_task import write_job

PAIR = {"prompt": "a b", "chosen": "c", "rejected": "d e"}
LIMITS = {"max_prompt_length": 8, "max_response_length": 4}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write_job(folder)
    return load_tokenizer(str(folder / "model"))


def build(tokenizer, rows, is_pairwise=True, **changes):
    return build_examples(rows, tokenizer, Columns(), is_pairwise=is_pairwise, **{**LIMITS, **changes})


def test_an_answer_ends_with_eos_and_a_pair_is_chosen_then_rejected(tokenizer):
    (example,) = build(tokenizer, [PAIR])
    words = [tokenizer.convert_ids_to_tokens(list(answer)) for answer in example.answers]
    assert words == [["c", "</s>"], ["d", "e", "</s>"]]
    assert example.is_desirable == (True, False)
    assert tokenizer.convert_ids_to_tokens(list(example.prompt.token_ids)) == ["<u>", "a", "b", "<a>"]


def test_chat_messages_give_the_same_ids_as_text(tokenizer):
    user, good = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}
    bad = {"role": "assistant", "content": "d e"}
    expected = build(tokenizer, [PAIR])[0]
    for row in (
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"prompt": "a b", "chosen": [user, good], "rejected": [user, bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
    ):
        (example,) = build(tokenizer, [row])
        assert example.answers == expected.answers and example.prompt.token_ids == expected.prompt.token_ids


def test_labelled_answers_and_pairs_serve_kto(tokenizer):
    rows = [{"prompt": "a", "completion": "c", "label": True}, PAIR]
    labelled, pair = build(tokenizer, rows, is_pairwise=False)
    assert labelled.is_desirable == (True,) and pair.is_desirable == (True, False)
    assert pack_examples([labelled, pair]).num_sequences == 3
    assert mismatch_examples([labelled, pair])[0].answers == pair.answers
    assert mismatch_examples([labelled, pair])[0].prompt == labelled.prompt


@pytest.mark.parametrize(
    ("row", "is_pairwise", "message"),
    [
        ({"prompt": "a", "chosen": "c"}, True, "row 0 has no pair in 'chosen' and 'rejected'"),
        ({"prompt": "a", "completion": "c", "label": "yes"}, False, "true or false in 'label'"),
        ({"prompt": "a", "chosen": [], "rejected": "c"}, True, "must hold text"),
        ({**PAIR, "rejected": "a b c d"}, True, "an answer has 5 tokens, more than data.max_response_length=4"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_row(tokenizer, row, is_pairwise, message):
    with pytest.raises(ValueError, match=message):
        build(tokenizer, [row], is_pairwise)


@pytest.mark.parametrize(("overlong", "lengths"), [("filter", []), ("right", [[4, 2]])])
def test_an_overlong_answer_is_dropped_or_cut(tokenizer, overlong, lengths):
    examples = build(tokenizer, [{**PAIR, "chosen": "a b c d e"} | {"rejected": "d"}], overlong=overlong)
    assert [[len(answer) for answer in example.answers] for example in examples] == lengths
