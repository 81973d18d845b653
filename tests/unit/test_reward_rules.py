"""The rules judge by the number, exactly."""

from decimal import Decimal

import pytest

from megarl.reward.rules import by_data_source, gsm8k, numeric, read_number


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("3", "3"), ("The answer is 3.", "3"), ("4 - 1 = 3", "3"), ("5 - 9 = -4", "-4"), ("x=-4", -4), ("**-4**", "-4"),
        ("3.0", 3), ("1,234,567", "1234567"), ("$1,234.50", "1234.5"), ("first 7, then 3", "3"),
        ("5-9", "9"), ("(-4)", "-4"), ("\u22124", "-4"), ("1e3", "1000"), ("12,34", "34"),
    ],
)  # fmt: skip
def test_right_last_number_scores_one(answer, truth):
    result = numeric("", answer, truth)
    assert (result["score"], result["accuracy"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("4", 0.1), ("It is 4.", 0.1), ("**4**", 0.1), ("4 apples", 0.0), ("no idea", 0.0), ("", 0.0), ("3 or 4", 0.1)],
)
def test_wrong_answer_earns_only_its_form(answer, score):
    result = numeric("", answer, "3")
    assert (result["score"], result["accuracy"]) == (score, 0.0)


def test_near_is_not_equal():
    assert numeric("", "1000001", "1000000")["accuracy"] == 0.0
    assert numeric("", "100000000000000001", "100000000000000002")["accuracy"] == 0.0


def test_format_score_is_an_argument():
    assert numeric("", "4", "3", format_score=0.25)["score"] == 0.25


def test_ground_truth_without_number_is_an_error():
    with pytest.raises(ValueError, match="'three'"):
        numeric("", "3", "three")


@pytest.mark.parametrize(
    ("answer", "method", "score"),
    [
        ("so\n#### 42", "strict", 1.0), ("#### 1\n#### 42", "strict", 1.0), ("#### 42.", "strict", 1.0),
        ("#### $42.00", "strict", 1.0), ("42", "strict", 0.0), ("#### 41", "strict", 0.0),
        ("42 #### 41", "strict", 0.0),
        ("it is 42 then", "flexible", 1.0), ("42 or 41", "flexible", 0.0), ("none", "flexible", 0.0),
    ],
)  # fmt: skip
def test_gsm8k_methods(answer, method, score):
    assert gsm8k("", answer, "42", method=method)["score"] == score


def test_gsm8k_commas_on_both_sides():
    assert gsm8k("", "#### 1,042", "1042")["score"] == 1.0
    assert gsm8k("", "#### 1042", "2+2 is\n#### 1,042")["score"] == 1.0


def test_gsm8k_format_score():
    assert gsm8k("", "#### 41", "42", format_score=0.1)["score"] == 0.1


def test_gsm8k_unknown_method():
    with pytest.raises(ValueError, match="strict, flexible"):
        gsm8k("", "#### 42", "42", method="strikt")


@pytest.mark.parametrize(
    ("text", "value"), [(" 1,042. ", Decimal(1042)), ("$-3", Decimal(-3)), ("nan", None), ("inf", None), ("", None)]
)
def test_read_number(text, value):
    assert read_number(text) == value


@pytest.mark.parametrize(
    ("data_source", "answer", "score"),
    [("openai/gsm8k", "#### 3", 1.0), ("openai/gsm8k", "it is 3", 0.0), ("mine", "it is 3", 1.0), ("", "it is 3", 1.0)],
)
def test_the_rule_follows_the_data_source(data_source, answer, score):
    assert by_data_source(data_source, answer, "3")["score"] == score


def test_the_rule_of_a_data_source_gets_the_further_arguments():
    assert by_data_source("openai/gsm8k", "it is 3", "3", method="flexible")["score"] == 1.0
