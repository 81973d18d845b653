"""The sources of rewards and costs in a configuration: short forms, and what is wrong, by key (cases H4, I4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import ConfigError, dump_config, load_config, resolve_config
from megarl.config.model_facts import ModelFacts
from megarl.config.schema import Config, ModelEngine, RemoteStyle
from megarl.config.sources import check_sources, scoring_roles
from megarl.config.validate import find_problems

FACTS = ModelFacts("llama", 4, 4, 2, 32, 128, 500, 4096)


def load(*words: str) -> Config:
    return load_config(None, words)


def problems_of(*words: str) -> list[str]:
    written = load(*words)
    return list(check_sources(written, resolve_config(written)))


def kinds(config: Config) -> list[tuple[str | None, str | None, str | None]]:
    return [(source.name, source.function, source.model) for source in config.reward.sources]


def test_nothing_said_is_the_rule_of_each_rows_data_source_and_no_cost():
    config = resolve_config(load())
    assert kinds(config) == [("by_data_source", "by_data_source", None)]
    assert config.cost is None


def test_short_forms(tmp_path: Path):
    assert kinds(resolve_config(load("reward.function=a/b.py:judge"))) == [("judge", "a/b.py:judge", None)]
    assert kinds(resolve_config(load("reward_model.model_path=x"))) == [("reward_model", None, "reward_model")]
    both = resolve_config(load("reward.function=gsm8k", "reward.kwargs.method=flexible", "reward_model.model_path=x"))
    assert kinds(both) == [("gsm8k", "gsm8k", None), ("reward_model", None, "reward_model")]
    assert both.reward.sources[0].kwargs == {"method": "flexible"}
    cost = resolve_config(load("cost_model.model_path=x")).cost
    assert cost is not None and [source.model for source in cost.sources] == ["cost_model"]


def test_resolving_twice_changes_nothing_more():
    once = resolve_config(load("reward.function=gsm8k", "reward_model.model_path=x"))
    assert resolve_config(once) == once
    assert list(check_sources(once, once)) == []


def test_a_list_of_sources_from_yaml_and_from_the_command_line(tmp_path: Path):
    text = """
reward:
  sources:
    - {name: rule, function: numeric, kwargs: {format_score: 0.0}, weight: 0.5}
    - {remote: "http://judge:8000/score", model_name: rm, style: score, timeout_s: 5, fields: {use_activation: false}}
"""
    (tmp_path / "c.yaml").write_text(text)
    config = resolve_config(load_config(str(tmp_path / "c.yaml")))
    rule, remote = config.reward.sources
    assert (rule.name, rule.weight, rule.kwargs) == ("rule", 0.5, {"format_score": 0.0})
    assert (remote.name, remote.style, remote.timeout_s) == ("judge:8000", RemoteStyle.score, 5.0)
    assert remote.fields == {"use_activation": False}
    words = load("reward.sources=[{name: rule, function: numeric, weight: 2}]")
    assert (words.reward.sources[0].name, words.reward.sources[0].weight) == ("rule", 2.0)
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "dumped.yaml")) == config


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[{functoin: numeric}]", r"reward.sources\[0\].functoin .*did you mean function\?"),
        ("[{function: numeric}, {function: numeric, weight: heavy}]", r"reward.sources\[1\].weight='heavy' .*a number"),
        ("[{remote: 'http://x', style: scores}]", r"sources\[0\].style='scores' .*one of json, score"),
        ("[numeric]", r"sources\[0\]='numeric' .*section of names"),
        ("[{function: [a]}]", r"sources\[0\].function=\['a'\] .*text"),
        ("numeric", r"reward.sources='numeric' .*list of sections"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_source_is_told_by_its_place(value, words):
    with pytest.raises(ConfigError, match=words):
        load(f"reward.sources={value}")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[{weight: 1}]", "sources[0] names none of function, remote, model"),
        ("[{function: numeric, remote: 'http://x'}]", "sources[0] names function, remote of"),
        ("[{function: numeric}, {function: numeric}]", "two sources named numeric"),
        ("[{function: numeric, weight: 0}]", "every one of reward.sources has weight=0"),
        ("[{function: numeric, weight: .nan}]", "sources[0].weight=nan"),
        ("[{function: no/file.py:f}]", "the file no/file.py does not exist"),
        ("[{model: reward_model}]", "reward_model.model_path is not set"),
        ("[{model: no/folder}]", "sources[0].model=no/folder is not the folder"),
        ("[{remote: 'http://x', timeout_s: 0}]", "sources[0].timeout_s=0"),
        ("[{remote: 'http://x', concurrency: 0}]", "sources[0].concurrency=0 must be 1 or more"),
    ],
)  # fmt: skip
def test_what_contradicts_is_found(value, words):
    (problem,) = problems_of(f"reward.sources={value}")
    assert words in problem


def test_a_source_of_weight_zero_beside_another_is_only_measured():
    assert problems_of("reward.sources=[{function: numeric, weight: 0}, {function: gsm8k}]") == []


def test_function_and_sources_together_are_refused():
    (problem,) = problems_of("reward.function=gsm8k", "reward.sources=[{function: numeric}]")
    assert "both set" in problem


def test_a_model_that_no_source_uses_is_told():
    (problem,) = problems_of("reward_model.model_path=x", "reward.sources=[{function: numeric}]")
    assert "reward_model.model_path=x is not used" in problem


def test_the_device_picks_the_engine():
    assert resolve_config(load()).reward_model.engine is ModelEngine.megatron
    on_cpu = resolve_config(load("reward_model.device=cpu", "reward_model.model_path=x"))
    assert on_cpu.reward_model.engine is ModelEngine.transformers
    assert scoring_roles(on_cpu) == ()
    assert scoring_roles(resolve_config(load("reward_model.model_path=x"))) == ("reward_model",)
    problems = problems_of("reward_model.device=cpu", "reward_model.engine=megatron", "reward_model.model_path=x")
    assert len(problems) == 1 and "engine=transformers" in problems[0]


def test_the_grid_of_a_reward_model_is_checked_like_any_other(tmp_path: Path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,'
        ' "hidden_size": 128, "vocab_size": 300, "max_position_embeddings": 4096}'
    )
    words = [
        f"reward_model.model_path={tmp_path}",
        "parallel.reward_model={tp: 4, pp: 1, dp: 1}",
        "reward_model.ppo_max_token_len=1024",
        "data.max_prompt_length=512",
        "data.max_response_length=512",
    ]
    problems = find_problems(load(*words), 8, FACTS)
    assert any("parallel.reward_model.tp=4 does not divide the 2 kv heads" in problem for problem in problems)
    assert any("reward_model.ppo_max_token_len=1024" in problem and "use 1025" in problem for problem in problems)
    assert any("vocabulary of 300" in problem for problem in problems)


def test_a_role_may_take_fewer_ranks_than_the_job_has():
    """The placement actor tp 2 × pp 2 × dp 2, critic dp 2, reward model on one rank, without lists of ranks."""
    from megarl.parallel.topology import plan_topology

    assert plan_topology("critic", 8, 1, 1, 2).ranks == (0, 1)
    assert plan_topology("reward_model", 8, 1, 1, 1).ranks == (0,)
    with pytest.raises(ValueError, match=r"parallel\.critic\.dp=16"):
        plan_topology("critic", 8, 1, 1, 16)
