"""Defaults < YAML < command line, verl's names, and messages that list every mistake."""

import pytest

from megarl.config.load import ConfigError, dump_config, load_config, resolve_config
from megarl.config.names import ALIASES, nearest_name
from megarl.config.options import OPTIONS
from megarl.config.schema import Config, DType, KLEstimator, LossAggMode, Overlong


def problems_of(*overrides: str, path: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_without_input_the_defaults_stand():
    assert load_config(None, []) == Config()


def test_command_line_beats_yaml_beats_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("trainer:\n  seed: 5\n  nnodes: 3\n")
    trainer = load_config(str(file), ["trainer.seed=7"]).trainer
    assert (trainer.seed, trainer.nnodes, trainer.total_epochs) == (7, 3, 1)


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("actor_rollout_ref.model.path=m", "actor.model_path", "m"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor.optim.lr", 1e-6),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor.ppo_mini_batch_size", 8),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "actor.ppo_micro_batch_size", 2),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=99", "actor.ppo_max_token_len", 99),
        ("actor_rollout_ref.actor.clip_ratio=0.3", "actor.clip_ratio", 0.3),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "actor.loss_agg_mode", "seq-mean-token-sum"),
        ("actor_rollout_ref.actor.kl_loss_type=low_var_kl", "actor.kl_loss_type", KLEstimator.k3),
        ("actor_rollout_ref.actor.grad_clip=0.5", "actor.optim.clip_grad", 0.5),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "parallel.actor.tp", 2),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2", "parallel.actor.pp", 2),
        ("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2", "parallel.ref.pp", 2),
        ("critic.megatron.tensor_model_parallel_size=2", "parallel.critic.tp", 2),
        ("actor_rollout_ref.rollout.name=naive", "rollout.name", "naive"),
        ("actor_rollout_ref.rollout.n=4", "rollout.n", 4),
        ("actor_rollout_ref.rollout.temperature=0.7", "rollout.temperature", 0.7),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "parallel.rollout.tp", 2),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.4", "rollout.gpu_memory_utilization", 0.4),
        ("actor_rollout_ref.rollout.dtype=bfloat16", "rollout.dtype", DType.bf16),
        ("actor_rollout_ref.rollout.val_kwargs.top_p=0.9", "rollout.val.top_p", 0.9),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=False", "rollout.val.n", 0),
        ("critic.model.path=c", "critic.model_path", "c"),
        ("critic.optim.lr=2e-5", "critic.optim.lr", 2e-5),
        ("trainer.critic_warmup=3", "critic.warmup_steps", 3),
        ("trainer.logger=['console','wandb']", "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("trainer.val_before_train=False", "trainer.val_before_train", False),
        ("trainer.resume_mode=resume_path", "trainer.resume_mode", "path"),
        ("data.train_files=a.parquet,b.parquet", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.truncation=left", "data.overlong_prompts", "left"),
        ("data.filter_overlong_prompts=True", "data.overlong_prompts", Overlong.filter),
        ("algorithm.kl_ctrl.kl_coef=0.01", "algorithm.kl_ctrl.kl_coef", 0.01),
        ("algorithm.kl_penalty=kl", "algorithm.kl_penalty", KLEstimator.k1),
        ("+algorithm.lam=0.95", "algorithm.lam", 0.95),
    ],
)
def test_verl_name_sets_our_option(word, key, value):
    found = load_config(None, [word])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_every_alias_leads_to_an_option():
    assert {alias.key for alias in ALIASES.values()} <= set(OPTIONS)


def test_no_alias_hides_an_option_of_ours():
    assert not set(ALIASES) & set(OPTIONS)


@pytest.mark.parametrize("order", [1, -1])
def test_filter_overrules_truncation_in_either_order(order):
    words = ["data.truncation=error", "data.filter_overlong_prompts=True"]
    assert load_config(None, words[::order]).data.overlong_prompts is Overlong.filter


def test_switched_off_filter_leaves_truncation_alone():
    config = load_config(None, ["data.truncation=right", "data.filter_overlong_prompts=False"])
    assert config.data.overlong_prompts is Overlong.right


def test_reward_file_and_name_of_verl_become_one_option():
    config = load_config(None, ["custom_reward_function.path=a/f.py", "custom_reward_function.name=g"])
    assert config.reward.function == "a/f.py:g"


def test_two_names_with_different_values_are_refused():
    (line,) = problems_of("actor.model_path=a", "actor_rollout_ref.model.path=b")
    assert "actor.model_path=a" in line and "actor_rollout_ref.model.path=b" in line


def test_two_names_with_one_value_agree():
    config = load_config(None, ["actor.model_path=a", "actor_rollout_ref.model.path=a"])
    assert config.actor.model_path == "a"


def test_a_name_on_the_command_line_beats_its_alias_in_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("actor_rollout_ref:\n  model:\n    path: a\n")
    assert load_config(str(file), ["actor.model_path=b"]).actor.model_path == "b"


def test_typo_names_the_full_key_and_the_nearest():  # case I4
    (line,) = problems_of("data.trian_files=x")
    assert line.startswith("data.trian_files ") and "did you mean data.train_files?" in line


def test_typo_below_a_verl_name_offers_the_verl_name():
    (line,) = problems_of("actor_rollout_ref.actor.ppo_mini_batch_sizes=4")
    assert "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?" in line


def test_text_for_a_number_names_key_value_and_rule():  # case I4
    (line,) = problems_of("trainer.seed=abc")
    assert "trainer.seed='abc'" in line and "a whole number" in line


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        ("data.overlong_prompts=midle", "error, filter, left, right"),
        ("data.shuffle=maybe", "true or false"),
        ("trainer.val_before_train=2", "true or false"),
        ("trainer.nnodes=1.5", "a whole number"),
        ("actor.optim.lr=null", "a number"),
        ("actor.optim.betas=[0.9]", "a list of 2 numbers"),
        ("parallel.actor.ranks=[0,x]", "a list of whole numbers"),
        ("data.train_files={a: b}", "a list of text"),
        ("actor_rollout_ref.rollout.n=many", "a whole number"),
    ],
)
def test_wrong_type_is_refused_with_what_is_allowed(word, allowed):
    (line,) = problems_of(word)
    assert word.split("=")[0] in line and allowed in line


def test_all_mistakes_of_all_layers_come_at_once(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("trainer:\n  sed: 5\ndata: 3\nactor:\n  dtype: fp8\n")
    lines = problems_of("bogus", "data.max_prompt_length=long", path=str(file))
    assert len(lines) == 5
    assert len(str(ConfigError(lines)).splitlines()) == 6


@pytest.mark.parametrize("text", ["data: [1, 2\n", "- a\n", "a: 1\na: 2\n"])
def test_unreadable_yaml_names_the_file(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    (line,) = problems_of(path=str(file))
    assert str(file) in line


def test_missing_yaml_names_the_file():
    assert problems_of(path="nowhere.yaml") == ["the configuration file nowhere.yaml does not exist"]


def test_what_cannot_be_here_is_refused_with_its_reason():
    (line,) = problems_of("actor_rollout_ref.actor.strategy=fsdp")
    assert "Megatron-Core" in line


def test_what_is_always_so_here_is_accepted():
    words = ["actor_rollout_ref.model.use_remove_padding=True", "actor_rollout_ref.actor.strategy=megatron"]
    assert load_config(None, words) == Config()


def test_a_name_without_effect_warns(caplog):
    load_config(None, ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4"])
    assert "has no effect" in caplog.text


def test_chat_template_on_the_command_line_stays_text():
    config = load_config(None, ["data.chat_template={{ messages[0]['content'] }}"])
    assert config.data.chat_template == "{{ messages[0]['content'] }}"


def test_text_that_looks_like_a_number_stays_text():
    assert load_config(None, ["trainer.experiment_name=007"]).trainer.experiment_name == "007"


def test_reference_grid_can_be_set_although_unset_by_default():
    grid = load_config(None, ["parallel.ref.tp=2"]).parallel.ref
    assert grid is not None and (grid.tp, grid.pp) == (2, 1)


def test_values_can_refer_to_others(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("critic:\n  model_path: ${actor.model_path}\n")
    assert load_config(str(file), ["actor.model_path=m"]).critic.model_path == "m"


def test_a_reference_to_nothing_is_a_config_error():
    assert "critic.model_path" in problems_of("critic.model_path=${actor.path}")[0]


def test_dump_reads_back_equal(tmp_path):
    words = ["actor.loss_agg_mode=seq-mean-token-sum", "actor.optim.betas=[0.8,0.9]", "reward.kwargs.method=strict",
             "parallel.ref.tp=2", "data.train_files=[a]", "data.chat_template={{ x }}"]  # fmt: skip
    config = resolve_config(load_config(None, words))
    file = tmp_path / "c.yaml"
    file.write_text(dump_config(config))
    assert load_config(str(file), []) == config


def test_resolve_fills_what_follows_from_other_options():
    config = resolve_config(load_config(None, [
        "actor.model_path=m", "data.train_batch_size=8", "actor.clip_ratio=0.3", "actor.clip_ratio_high=0.4",
        "actor.ppo_epochs=2", "trainer.seed=9", "trainer.project_name=p", "trainer.experiment_name=e",
        "parallel.actor.tp=2", "actor.uneven_stages=true",
    ]))  # fmt: skip
    actor, critic = config.actor, config.critic
    assert (critic.model_path, config.ref.model_path, actor.tokenizer_path) == ("m", "m", "m")
    assert (actor.ppo_mini_batch_size, critic.ppo_mini_batch_size, critic.ppo_epochs) == (8, 8, 2)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.4)
    assert (config.data.seed, config.trainer.default_local_dir) == (9, "runs/p/e")
    assert config.parallel.ref == config.parallel.actor and config.ref.uneven_stages


def test_resolve_changes_neither_its_input_nor_a_resolved_one():
    config = load_config(None, ["actor.model_path=m"])
    once = resolve_config(config)
    assert config.critic.model_path is None and resolve_config(once) == once


def test_critic_mini_batch_follows_the_actor():
    config = resolve_config(load_config(None, ["data.train_batch_size=8", "actor.ppo_mini_batch_size=4"]))
    assert config.critic.ppo_mini_batch_size == 4


def test_loss_agg_mode_is_a_choice():
    assert load_config(None, []).actor.loss_agg_mode is LossAggMode.token_mean


def test_nothing_is_near_a_strange_name():
    assert nearest_name("zzzz", ["data.seed"]) is None
