"""Algorithms as data: the names, what they set, what they need, and the functions behind them."""

from __future__ import annotations

import inspect

import pytest

from megarl.algo import losses
from megarl.algo.algorithms import ADVANTAGES, ALGORITHMS, LOSSES, NEEDS, PREFERENCES
from megarl.config import choices, schema
from megarl.config.load import ConfigError, dump_config, load_config
from megarl.config.needs import loss_needs_whole, model_roles, score_needs
from megarl.config.options import OPTIONS
from megarl.config.validate import find_problems
from megarl.trainer.estimators import ESTIMATORS
from megarl.trainer.ppo import POLICY_LOSSES
from tests.unit.test_config_validate import SMOLLM2


def values(choice: type[choices.Choice]) -> set[str]:
    return {member.value for member in choice}


def test_every_name_has_facts_a_choice_and_a_function():
    assert set(ADVANTAGES) == set(ESTIMATORS) == values(schema.AdvEstimator)
    assert set(LOSSES) == set(POLICY_LOSSES) == values(schema.PolicyLoss)
    assert set(PREFERENCES) == values(schema.PreferenceLoss)
    assert set(ALGORITHMS) == values(schema.AlgorithmName)


def test_facts_of_losses_agree_with_the_code():
    for name, function in POLICY_LOSSES.items():
        reads_answers = "mean_over_sequence" in inspect.getsource(getattr(losses, function.__name__))
        assert LOSSES[name].needs_whole == reads_answers, name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_sets_options_that_exist_and_survives_writing_and_reading(name, tmp_path):
    config = load_config(None, [f"algorithm.name={name}"])
    assert set(ALGORITHMS[name].settings()) <= set(OPTIONS)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(str(file)) == config


def test_one_line_changes_the_algorithm():
    config = load_config(None, ["algorithm.name=dapo"])
    assert config.algorithm.adv_estimator is schema.AdvEstimator.grpo
    assert config.algorithm.filter_groups.enable and config.actor.clip_ratio_high == 0.28
    assert config.actor.loss_agg_mode is schema.LossAggMode.token_mean


def test_what_the_user_writes_goes_over_the_name_wherever_it_stands(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("actor: {clip_ratio_high: 0.25}\nalgorithm: {name: gspo}\n")
    config = load_config(str(file), ["algorithm.name=dapo", "algorithm.filter_groups.enable=false"])
    assert config.actor.clip_ratio_high == 0.25 and not config.algorithm.filter_groups.enable
    assert config.algorithm.policy_loss is schema.PolicyLoss.clip


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"algorithm.name='grop'.*grpo"):
        load_config(None, ["algorithm.name=grop"])


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        (["algorithm.name=ppo"], {"actor", "critic"}),
        (["algorithm.name=dr_grpo"], {"actor"}),
        (["algorithm.name=grpo"], {"actor", "ref"}),
        (["algorithm.name=remax", "algorithm.use_kl_in_reward=false"], {"actor"}),
        (["algorithm.name=safe_rlhf"], {"actor", "critic", "cost_critic", "ref"}),
        (["algorithm.name=dpo"], {"actor", "ref"}),
        (["algorithm.name=simpo"], {"actor"}),
        (["algorithm.name=reward_model"], {"actor"}),
        (["algorithm.advantage=f.py:g"], {"actor"}),
        (["algorithm.advantage=f.py:g", "algorithm.advantage_needs=[values]"], {"actor", "critic"}),
    ],
)
def test_only_the_roles_that_an_algorithm_needs_are_built(words, roles):
    assert set(model_roles(load_config(None, words))) == roles


def test_verls_names_mean_the_same():
    words = [
        "algorithm.adv_estimator=AdvantageEstimator.RLOO",
        "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
    ]
    config = load_config(None, words)
    assert config.algorithm.adv_estimator is schema.AdvEstimator.rloo
    assert config.algorithm.policy_loss is schema.PolicyLoss.gmpo
    assert loss_needs_whole(config) and score_needs(config) == {"siblings"}
    assert set(NEEDS) >= score_needs(config)


@pytest.mark.parametrize(("enable", "length"), [("true", 64), ("false", 0)])
def test_verls_overlong_buffer_is_switched_as_there(enable, length):
    words = [f"reward_model.overlong_buffer.{word}" for word in (f"enable={enable}", "len=64", "penalty_factor=0.5")]
    algorithm = load_config(None, words).algorithm
    assert algorithm.overlong_buffer_len == length and algorithm.overlong_penalty == 0.5


@pytest.fixture
def problems_of(tmp_path):
    train = tmp_path / "train.parquet"
    train.touch()

    def run(*words: str) -> list[str]:
        base = [f"data.train_files=[{train}]", "actor.model_path=m", "data.train_batch_size=8", "rollout.n=2"]
        return find_problems(load_config(None, [*base, *words]), 1, SMOLLM2)

    return run


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("safe_rlhf",)])
def test_a_named_algorithm_has_no_problem_of_its_own(problems_of, name):
    n = "1" if ALGORITHMS[name].advantage is None else "2"
    assert problems_of(f"algorithm.name={name}", f"rollout.n={n}") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.name=safe_rlhf"], "set cost.function"),
        (["cost.function=numeric"], "use algorithm.adv_estimator=gae_lagrangian"),
        (["algorithm.adv_estimator=rloo", "rollout.n=1"], "rollout.n=1 with algorithm.adv_estimator=rloo"),
        (["algorithm.name=dapo", "rollout.n=1", "algorithm.adv_estimator=gae"], "filter_groups.enable=true"),
        (["algorithm.policy_loss=gspo", "algorithm.fused_logprob=false"], "looks at whole answers; use true"),
        (["algorithm.name=remax", "rollout.multi_turn.environment=e.py:E"], "use rloo, grpo or gae"),
        (["algorithm.name=opo", "algorithm.lam_alpha=0.05"], "only gae has a trace decay"),
        (["algorithm.overlong_buffer_len=600"], "use 512 or less"),
        (["algorithm.rollout_correction={level: token, upper: 0.9}"], "must lie around 1"),
        (["algorithm.lagrange.init=20"], "in this order"),
        (["algorithm.advantage=nothere.py:f"], "the file nothere.py does not exist"),
        (["algorithm.loss=f"], "write path/to/file.py:function"),
        (["algorithm.advantage_needs=[values]"], "leave it out"),
        (["algorithm.advantage=x.py:f", "algorithm.advantage_needs=[value]"], "did you mean values?"),
        (["algorithm.name=dpo", "rollout.n=1", "actor.ppo_epochs=2"], "a batch is used once"),
        (["algorithm.name=dpo", "rollout.n=1", "actor.ppo_mini_batch_size=4"], "every batch is one optimizer step"),
        (["algorithm.name=dpo"], "nothing is generated"),
        (["algorithm.name=dpo", "rollout.n=1", "actor.offload.params=true"], "no engine to make room for"),
        (["algorithm.name=ipo", "rollout.n=1", "preference.label_smoothing=0.1"], "only dpo and simpo know it"),
        (["algorithm.name=dpo", "rollout.n=1", "actor.ppo_max_token_len=1200"], "cannot hold a pair"),
    ],
)
def test_what_does_not_fit_is_told_with_the_way_out(problems_of, words, message):
    found = problems_of(*words)
    assert any(message in line for line in found), found


def test_the_parts_of_a_named_algorithm_exist():
    modes = values(schema.LossAggMode)
    for name, algorithm in ALGORITHMS.items():
        if algorithm.advantage is None:
            assert algorithm.loss in PREFERENCES, name
        else:
            assert algorithm.advantage in ADVANTAGES and algorithm.loss in LOSSES and algorithm.reduction in modes, name
