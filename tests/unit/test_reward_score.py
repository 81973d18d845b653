"""Reward functions: found or refused at start; a failure is marked, never a zero reward."""

import math

import numpy as np
import pytest
import torch

from megarl.records import Episode, Prompt, Rollout, Turn
from megarl.reward.function import load_reward_function
from megarl.reward.score import (
    EpisodeScorer,
    FunctionScorer,
    Source,
    dry_run,
    join_verdicts,
    read_scores,
    score_answers,
)
from megarl.reward.verdict import Answer, Verdict, failed

PROMPT = Prompt(row=4, token_ids=(1,), text="", data_source="src", ground_truth="3", extra_info={"index": 4})


@pytest.fixture
def write(tmp_path):
    """Writes a file with a reward function and gives its spec."""

    def run(body: str, head: str = "data_source, solution_str, ground_truth, extra_info=None") -> str:
        file = tmp_path / "mine.py"
        file.write_text(f"def judge({head}):\n    {body}\n")
        return f"{file}:judge"

    return run


def build_answers(texts):
    return [
        Answer(PROMPT, Rollout(0, i, token_ids=(), logprobs=(), is_finished=True, weights_version=0), text)
        for i, text in enumerate(texts)
    ]


def score(function, texts, **options):
    return score_answers([Source("f", 1.0, FunctionScorer(function))], build_answers(texts), **options)


def test_rule_by_name():
    assert load_reward_function("numeric")("", "it is 3", "3", {})["score"] == 1.0


def test_kwargs_reach_the_rule():
    function = load_reward_function("gsm8k", {"method": "flexible"})
    assert function("", "3", "3", {})["score"] == 1.0


def test_function_of_a_file_gets_verls_arguments(write):
    spec = write("return [data_source, solution_str, ground_truth, extra_info, bonus]", "data_source, solution_str, "
                 "ground_truth, extra_info, bonus")  # fmt: skip
    function = load_reward_function(spec, {"bonus": 2})
    assert function("d", "s", "g", {"i": 1}) == ["d", "s", "g", {"i": 1}, 2]


def test_unknown_rule_names_the_nearest():  # case H4
    with pytest.raises(ValueError, match=r"reward.function=numerik .*did you mean numeric\?"):
        load_reward_function("numerik")


def test_unknown_function_of_a_file_names_the_nearest(write):  # case H4
    with pytest.raises(ValueError, match=r"no function juge; did you mean judge\?"):
        load_reward_function(write("return 1").replace(":judge", ":juge"))


@pytest.mark.parametrize(
    ("spec", "words"), [("no/file.py:f", "no/file.py does not exist"), ("no/file.py", "no/file.py:function")]
)
def test_missing_file_or_function_name(spec, words):  # case H4
    with pytest.raises(ValueError, match=words):
        load_reward_function(spec)


def test_file_that_fails_on_import(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("import nowhere_at_all\n")
    with pytest.raises(ValueError, match=r"bad.py cannot be imported: ModuleNotFoundError"):
        load_reward_function(f"{file}:f")


@pytest.mark.parametrize(
    ("head", "kwargs", "words"),
    [
        ("solution_str, ground_truth", {}, r"lacks \['data_source', 'extra_info'\]"),
        ("data_source, solution_str, ground_truth, extra_info, bonus", {}, "reward.kwargs.bonus"),
        ("data_source, solution_str, ground_truth, extra_info, bonus=1", {"bonis": 2}, "did you mean bonus"),
    ],
)
def test_arguments_that_do_not_fit(write, head, kwargs, words):
    with pytest.raises(ValueError, match=words):
        load_reward_function(write("return 1", head), kwargs)


def test_function_with_any_keywords_fits(write):
    assert load_reward_function(write("return kwargs['x']", "solution_str, **kwargs"), {"x": 5})("", "", "", {}) == 5


@pytest.mark.parametrize("body", ["return None", "return 'good'", "return {}", "return float('nan')", "return 1 / 0",
                                  "return {'score': None}", "return [1.0]"])  # fmt: skip
def test_dry_run_finds_a_wrong_return(write, body):  # case H4
    spec = write(body)
    with pytest.raises(ValueError) as caught:
        dry_run(FunctionScorer(load_reward_function(spec)), PROMPT, f"reward.function={spec}")
    assert spec in str(caught.value) and "row 4" in str(caught.value)


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), torch.tensor(1.0), {"score": 1, "note": "x"}])
def test_dry_run_accepts_numbers_and_dictionaries(value):
    assert dry_run(FunctionScorer(lambda *args: value), PROMPT, "f") == 1.0


def test_failed_answers_are_marked_and_the_others_scored():  # case H4, D2
    def function(data_source, text, ground_truth, extra_info):
        return {"raise": lambda: 1 / 0, "nan": lambda: math.nan, "ok": lambda: 0.5, "zero": lambda: 0.0}[text]()

    rewards = score(function, ["ok", "raise", "nan", "zero"])
    assert rewards.is_failed_mask.tolist() == [False, True, True, False]
    assert rewards.scores[[0, 3]].tolist() == [0.5, 0.0] and rewards.mean == 0.25
    assert len(rewards.failures) == 2
    assert rewards.failures[0] == "row 4, answer 1: ZeroDivisionError: division by zero"


def test_scores_are_finite_fp32_even_where_failed():
    rewards = score(lambda *args: {"a": 1.0}.get(args[1]), ["a", "b"])
    assert rewards.scores.dtype == torch.float32 and bool(rewards.scores.isfinite().all())


def test_too_many_failures_end_the_job():  # case H3
    function = {"a": 1.0, "b": None, "c": None}.get
    with pytest.raises(RuntimeError, match=r"failed on 2 of 3 answers, .*max_failure_share=0.5"):
        score(lambda *args: function(args[1]), ["a", "b", "c"])


def test_failures_up_to_the_share_are_allowed():
    rewards = score(lambda *args: {"a": 1.0}.get(args[1]), ["a", "b"], max_failure_share=0.5)
    assert rewards.is_failed_mask.tolist() == [False, True]


def test_further_numbers_are_averaged_over_the_answers_that_have_them():
    results = {"a": {"score": 1, "accuracy": 1, "pred": "x"}, "b": {"score": 0, "accuracy": 0, "extra": 4}}
    rewards = score(lambda *args: results[args[1]], ["a", "b"])
    assert rewards.metrics == {"accuracy": 0.5, "extra": 4.0}


def test_a_function_cannot_change_the_prompt(write):
    function = load_reward_function(write("extra_info['index'] = 9; return 1.0"))
    score(function, ["a"])
    assert PROMPT.extra_info == {"index": 4}


@pytest.mark.parametrize(("share", "num_answers", "bearable"), [(0.5, 2, 1), (0.5, 3, 1), (0.1, 40, 4), (0.7, 10, 7),
                                                               (0.0, 5, 0), (1.0, 5, 5)])  # fmt: skip
def test_as_many_may_fail_as_the_share_says(share, num_answers, bearable):
    verdicts = [failed("x") if i < bearable else Verdict(1.0) for i in range(num_answers)]
    join_verdicts([Source("f")], [verdicts], str, share)
    if bearable < num_answers:
        with pytest.raises(RuntimeError):
            join_verdicts([Source("f")], [[*verdicts[:bearable], failed("x"), *verdicts[bearable + 1 :]]], str, share)


def test_sources_are_summed_with_their_weights():
    verdicts = [[Verdict(1.0), Verdict(0.0)], [Verdict(0.5), Verdict(3.0)]]
    rewards = join_verdicts([Source("rule", 2.0), Source("model", -1.0)], verdicts, str, 0.5)
    assert rewards.scores.tolist() == [1.5, -3.0]
    assert rewards.metrics == {"rule/score": 0.5, "model/score": 1.75}


def test_a_source_of_weight_zero_is_measured_and_neither_counts_nor_fails_an_answer():
    verdicts = [[Verdict(3.0, {"accuracy": 1.0}), failed("x")], [Verdict(0.25), Verdict(0.5)]]
    rewards = join_verdicts([Source("rule", 0.0), Source("model")], verdicts, str, 0.0)
    assert rewards.scores.tolist() == [0.25, 0.5] and not rewards.is_failed_mask.any()
    assert rewards.metrics == {"accuracy": 1.0, "rule/score": 3.0, "model/score": 0.375}


def test_an_answer_that_one_source_could_not_judge_has_failed():
    """Case D2: what the other source said of it is not a reward."""
    verdicts = [[Verdict(1.0), Verdict(1.0)], [failed("down"), Verdict(1.0)]]
    rewards = join_verdicts([Source("rule"), Source("remote")], verdicts, "answer {}".format, 0.5)
    assert rewards.is_failed_mask.tolist() == [True, False]
    assert rewards.failures == ("answer 0: remote: down",)
    assert rewards.scores[1] == 2.0


def test_failures_of_all_sources_count_together():
    verdicts = [[failed("a"), Verdict(1.0), Verdict(1.0)], [Verdict(1.0), failed("b"), Verdict(1.0)]]
    with pytest.raises(RuntimeError, match="failed on 2 of 3 answers"):
        join_verdicts([Source("rule"), Source("remote")], verdicts, str, 0.5)


def test_numbers_of_two_sources_under_one_name_are_kept_apart():
    one, other = Verdict(1.0, {"accuracy": 1.0, "format": 0.5}), Verdict(2.0, {"accuracy": 0.0})
    rewards = join_verdicts([Source("a"), Source("b")], [[one], [other]], str, 0.5)
    expected = {"a/accuracy": 1.0, "b/accuracy": 0.0, "format": 0.5, "a/score": 1.0, "b/score": 2.0}
    assert rewards.metrics == expected


def test_a_models_score_that_is_not_finite_is_a_failure():
    verdicts = read_scores(torch.tensor([0.5, math.nan, -math.inf]))
    assert [verdict.failure is None for verdict in verdicts] == [True, False, False]


def test_an_answer_whose_environment_failed_is_not_asked_about_and_has_failed():
    """Whatever a rule would say of its text: the episode did not come to its end (case D2)."""
    played = Episode((Turn(1, 0.5), Turn(3, 1.0)))
    broken = Episode((Turn(1, 0.5),), failure="turn 1: KeyError: 'x'")
    answers = [
        Answer(PROMPT, Rollout(0, i, (), (), True, 0, episode=episode), "text")
        for i, episode in enumerate((played, broken, played))
    ]
    seen = []

    def function(*arguments):
        seen.append(arguments)
        return 2.0

    sources = [Source("rule", 1.0, FunctionScorer(function)), Source("environment", 1.0, EpisodeScorer())]
    rewards = score_answers(sources, answers)
    assert len(seen) == 2
    assert rewards.is_failed_mask.tolist() == [False, True, False]
    assert rewards.scores[[0, 2]].tolist() == [3.5, 3.5]
    assert rewards.metrics == {"rule/score": 2.0, "environment/score": 1.5, "num_turns": 2.0}
    assert "turn 1: KeyError: 'x'" in rewards.failures[0]
