"""What a configuration must hold beyond its types: key, value, rule and way out, all problems at once."""

import json
from dataclasses import replace

import pytest

from megarl.config.load import load_config
from megarl.config.model_facts import ModelFacts, read_model_facts
from megarl.config.validate import find_problems

SMOLLM2 = ModelFacts(
    family="llama", num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576, vocab_size=49152,
    max_position_embeddings=8192,
)  # fmt: skip
GQA = replace(SMOLLM2, num_heads=8, num_kv_heads=2, num_layers=8)


@pytest.fixture
def problems_of(tmp_path):
    """Problems of a configuration that is fine but for the words given."""
    train = tmp_path / "train.parquet"
    train.touch()

    def run(*words: str, world_size: int = 1, model: ModelFacts = SMOLLM2) -> list[str]:
        base = [f"data.train_files=[{train}]", "actor.model_path=m", "data.train_batch_size=8"]
        return find_problems(load_config(None, [*base, *words]), world_size, model)

    return run


def test_a_good_configuration_has_no_problems(problems_of):
    assert problems_of() == []


def test_batch_that_does_not_divide_over_dp_names_the_nearest_once(problems_of):  # case I3
    (line,) = problems_of("data.train_batch_size=3", world_size=2)
    assert "data.train_batch_size=3" in line and line.endswith("use a batch of 2 or 4")


def test_batch_times_n_is_what_divides(problems_of):
    assert problems_of("data.train_batch_size=3", "rollout.n=2", world_size=2) == []


def test_offered_batch_suits_actor_and_critic(problems_of):
    words = ("data.train_batch_size=10", "parallel.actor.pp=2")
    (line,) = problems_of(*words, world_size=8)  # actor dp 4, critic dp 8
    assert "4 data-parallel ranks of the actor" in line and "8 data-parallel ranks of the critic" in line
    assert line.endswith("use a batch of 8 or 16")


def test_only_the_critics_grid_may_be_too_wide(problems_of):
    (line,) = problems_of("data.train_batch_size=2", "parallel.actor.pp=2", world_size=4)
    assert "of the critic" in line and "of the actor" not in line


@pytest.mark.parametrize(
    ("mini", "world_size", "rule"),
    [
        (16, 1, "larger than data.train_batch_size=8; use 8"),
        (3, 1, "does not divide data.train_batch_size=8; use 2 or 4"),
        (1, 2, "do not divide over the 2 data-parallel ranks of the actor; use 2"),
    ],
)
def test_mini_batch_is_refused_once_with_the_nearest(problems_of, mini, world_size, rule):
    (line,) = problems_of(f"actor.ppo_mini_batch_size={mini}", world_size=world_size)
    assert line.startswith(f"actor.ppo_mini_batch_size={mini} ") and rule in line


def test_a_critics_own_mini_batch_is_named(problems_of):
    (line,) = problems_of("critic.ppo_mini_batch_size=3")
    assert line.startswith("critic.ppo_mini_batch_size=3 ")


def test_micro_batch_larger_than_mini_batch(problems_of):  # case I4
    (line,) = problems_of("actor.ppo_mini_batch_size=4", "actor.ppo_micro_batch_size=8")
    assert line.startswith("actor.ppo_micro_batch_size=8 ") and "use 4 or less" in line


def test_micro_batch_is_compared_with_one_dp_ranks_share(problems_of):
    (line,) = problems_of("rollout.n=2", "actor.ppo_micro_batch_size=9", world_size=2)
    assert "use 8 or less" in line


def test_token_budget_holds_one_sequence(problems_of):
    (line,) = problems_of("actor.ppo_max_token_len=1023")
    assert "actor.ppo_max_token_len=1023" in line and "use 1024 or more" in line


def test_reference_budget_counts_only_when_there_is_a_reference(problems_of):
    assert problems_of("ref.ppo_max_token_len=5") == []
    assert len(problems_of("ref.ppo_max_token_len=5", "algorithm.use_kl_in_reward=true")) == 1


def test_context_length(problems_of):
    (line,) = problems_of("data.max_prompt_length=8000")
    assert "8512" in line and "max_position_embeddings=8192" in line


@pytest.mark.parametrize("word", ["rollout.temperature=0", "rollout.top_p=0.9", "rollout.top_k=2"])
def test_training_samples_the_whole_distribution(problems_of, word):  # case C1
    (line,) = problems_of(word)
    assert line.startswith(word.split("=")[0] + "=")


def test_validation_may_truncate(problems_of):  # case C1
    assert problems_of("rollout.val.top_p=0.9", "rollout.val.top_k=2", "rollout.val.temperature=0.7") == []


def test_grid_that_does_not_fit_the_ranks(problems_of):
    (line,) = problems_of("parallel.rollout.tp=3", world_size=4)
    assert "parallel.rollout" in line and "4 ranks" in line


def test_pipeline_that_does_not_divide_the_layers_names_the_sizes(problems_of):  # case A12
    (line,) = problems_of("parallel.actor.pp=4", world_size=4)
    assert "parallel.actor.pp=4" in line and "1, 2, 3, 5, 6, 10, 15 or 30" in line and "actor.uneven_stages" in line


def test_uneven_stages_allow_it(problems_of):
    assert problems_of("parallel.actor.pp=4", "actor.uneven_stages=true", world_size=4) == []


def test_more_stages_than_layers_is_never_possible(problems_of):
    words = ("parallel.actor.pp=16", "actor.uneven_stages=true", "data.train_batch_size=16")
    (line,) = problems_of(*words, world_size=16, model=GQA)
    assert "16" in line and "8 layers" in line


def test_more_tensor_ranks_than_kv_heads_names_both(problems_of):  # case A5
    (line,) = problems_of("parallel.actor.tp=4", world_size=4, model=GQA)
    assert "parallel.actor.tp=4" in line and "2 kv heads" in line and "use 1 or 2" in line


def test_the_engine_may_have_more_ranks_than_kv_heads(problems_of):  # case A5
    assert problems_of("parallel.rollout.tp=4", world_size=4, model=GQA) == []


@pytest.mark.parametrize("role", ["actor", "critic", "rollout"])
def test_tensor_ranks_divide_the_heads(problems_of, role):
    (line,) = problems_of(f"parallel.{role}.tp=2", world_size=2)
    assert f"parallel.{role}.tp=2" in line and "9 attention heads; use 1, 3 or 9" in line


def test_reference_with_the_actors_grid_is_not_named_again(problems_of):
    assert len(problems_of("parallel.actor.tp=2", "actor.use_kl_loss=true", world_size=2)) == 1


def test_vllm_has_no_pipeline(problems_of):
    (line,) = problems_of("parallel.rollout.pp=2", world_size=2)
    assert "parallel.rollout.pp=2" in line


def test_the_warm_up_is_said_in_steps_or_as_a_share(problems_of):
    (line,) = problems_of("actor.optim.lr_warmup_steps=3", "actor.optim.lr_warmup_steps_ratio=0.1")
    assert "actor.optim.lr_warmup_steps_ratio" in line


def test_shared_weights_must_stay_where_they_are(problems_of):
    (line,) = problems_of("rollout.share_weights=true", "rollout.free_cache_engine=true")
    assert "rollout.free_cache_engine=false" in line


def test_naive_engine_has_the_actors_grid(problems_of):
    (line,) = problems_of("rollout.name=naive", "parallel.rollout.tp=2", world_size=2)
    assert "naive" in line


@pytest.mark.parametrize(
    "word",
    [
        "actor.optim.lr=0", "critic.optim.lr=-1", "actor.optim.lr=nan", "actor.kl_loss_coef=-0.1",
        "algorithm.kl_ctrl.kl_coef=-1", "algorithm.gamma=1.5", "actor.clip_ratio=0", "actor.clip_ratio_c=0.5",
        "data.max_response_length=0", "rollout.n=0", "trainer.save_freq=0", "trainer.seed=-1",
        "data.train_batch_size=0", "actor.ppo_micro_batch_size=0", "reward.max_failure_share=2",
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named_once(problems_of, word):
    (line,) = [line for line in problems_of(word) if line.startswith(word.split("=")[0] + "=")]
    assert "must be" in line


def test_betas_are_below_one(problems_of):
    assert "actor.optim.betas" in problems_of("actor.optim.betas=[0.9,1.0]")[0]


def test_logger_typo_names_the_nearest(problems_of):
    assert "did you mean tensorboard?" in problems_of("trainer.logger=tensorbord")[0]


def test_grpo_needs_siblings(problems_of):  # case D1
    (line,) = problems_of("algorithm.adv_estimator=grpo")
    assert "rollout.n=1" in line and "grpo" in line


def test_without_critic_its_options_are_not_looked_at(problems_of):
    assert problems_of("algorithm.adv_estimator=grpo", "rollout.n=2", "critic.ppo_max_token_len=1") == []


def test_critic_warm_up_needs_a_critic(problems_of):
    (line,) = problems_of("algorithm.adv_estimator=grpo", "rollout.n=2", "critic.warmup_steps=1")
    assert line.startswith("critic.warmup_steps=1 ")


def test_missing_files_are_named(problems_of):
    lines = problems_of("data.val_files=[no.parquet]", "reward.function=no.py:f", "critic.model_path=nowhere")
    assert len(lines) == 3
    assert all(any(name in line for line in lines) for name in ("no.parquet", "no.py", "critic.model_path=nowhere"))


def test_no_training_files():
    lines = find_problems(load_config(None, ["actor.model_path=m"]), 1, SMOLLM2)
    assert any(line.startswith("data.train_files is empty") for line in lines)


def test_validation_every_few_steps_needs_files(problems_of):
    assert "data.val_files" in problems_of("trainer.test_freq=5")[0]


def test_resume_from_a_path_needs_the_path_and_the_mode(problems_of):
    assert "needs trainer.resume_from_path" in problems_of("trainer.resume_mode=path")[0]
    assert "use resume_mode=path" in problems_of("trainer.resume_from_path=here")[0]
    assert "is not a folder" in problems_of("trainer.resume_mode=path", "trainer.resume_from_path=nowhere")[0]


def test_every_problem_comes_at_once(problems_of):
    words = ("parallel.actor.pp=4", "rollout.temperature=0", "data.train_batch_size=3", "trainer.logger=x")
    assert len(problems_of(*words, world_size=4)) == 4


def test_model_is_read_from_the_folder_when_not_given(problems_of, tmp_path):
    write_config(tmp_path, num_hidden_layers=7)
    words = (f"actor.model_path={tmp_path}", "parallel.actor.pp=2")
    (line,) = problems_of(*words, world_size=2, model=None)
    assert "7 layers" in line


def test_models_of_different_vocabularies_are_refused(problems_of, tmp_path):
    write_config(tmp_path, vocab_size=100)
    (line,) = problems_of(f"critic.model_path={tmp_path}")
    assert "100" in line and "49152" in line


def write_config(folder, **changes):
    entries = {
        "model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 64, "vocab_size": 49152, "max_position_embeddings": 4096,
    } | changes  # fmt: skip
    (folder / "config.json").write_text(json.dumps({name: value for name, value in entries.items() if value != "-"}))


def test_facts_are_read(tmp_path):
    write_config(tmp_path)
    assert read_model_facts(str(tmp_path)) == ModelFacts("qwen2", 2, 4, 2, 16, 64, 49152, 4096)


def test_head_dim_and_kv_heads_have_their_usual_defaults(tmp_path):
    write_config(tmp_path, num_key_value_heads=None, head_dim=128)
    facts = read_model_facts(str(tmp_path))
    assert (facts.num_kv_heads, facts.head_dim) == (4, 128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["'gpt2'", "llama, mistral"]),
        ({"hidden_size": "-"}, ["hidden_size=None"]),
        ({"vocab_size": "many"}, ["vocab_size='many'"]),
    ],
)
def test_unusable_config_json_is_explained(tmp_path, changes, words):
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError) as caught:
        read_model_facts(str(tmp_path))
    assert all(word in str(caught.value) for word in words)


def test_a_folder_without_config_json_and_no_folder(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_model_facts(str(tmp_path))
    with pytest.raises(ValueError, match="no such folder"):
        read_model_facts(str(tmp_path / "x"))


def test_fused_needs_actor_and_critic_on_one_grid(problems_of):
    (line,) = problems_of("pipeline.schedule=fused", "parallel.actor.pp=2", world_size=2, model=GQA)
    assert line.startswith("pipeline.schedule=fused ") and "make parallel.critic like parallel.actor" in line
    both = ("parallel.actor.pp=2", "parallel.critic.pp=2")
    assert problems_of("pipeline.schedule=fused", *both, world_size=2, model=GQA) == []
    (line,) = problems_of("pipeline.schedule=fused", "algorithm.adv_estimator=grpo", "rollout.n=2", *both, world_size=2)
    assert "has no critic; use auto or zero_bubble" in line


def test_more_chunks_than_layers_are_refused(problems_of):
    words = ("pipeline.schedule=interleaved", "pipeline.virtual_stages=5", "parallel.actor.pp=2")
    (line,) = problems_of(*words, world_size=2, model=GQA)
    assert "pipeline.virtual_stages=5 × parallel.actor.pp=2 are more chunks than the model's 8 layers" in line
