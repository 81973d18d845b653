"""From scores to advantages: what each algorithm makes of one small batch, and what moves between steps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.load import load_config
from megarl.config.schema import AlgorithmConfig
from megarl.records import PackedBatch
from megarl.trainer.estimators import ESTIMATORS, Advantages, wrap_user_estimator
from megarl.trainer.judge import Coefficients, Evidence, Judged, advance, first_coefficients, judge
from tests.tiny import build_batch

NOW = Coefficients(kl_coef=0.1, multiplier=2.0)
RESPONSES = [2, 3, 1, 2]


def algorithm(*words: str) -> AlgorithmConfig:
    return load_config(None, list(words)).algorithm


def batch_of_two_groups() -> PackedBatch:
    batch = build_batch([2, 2, 3, 3], RESPONSES)
    return dataclasses.replace(batch, group=torch.tensor([0, 0, 1, 1]))


def run(options: AlgorithmConfig, batch: PackedBatch | None = None, **changes: Any) -> Judged:
    batch = batch_of_two_groups() if batch is None else batch
    zeros = torch.zeros(batch.num_tokens)
    evidence = Evidence(
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.5]),
        is_failed=torch.zeros(4, dtype=torch.bool),
        old_logprobs=batch.rollout_logprobs,
        values=zeros,
        greedy_scores=torch.tensor([0.25, 0.25, 1.0, 1.0]),
    )
    evidence = dataclasses.replace(evidence, **changes)
    return judge(options, batch, evidence, NOW, ESTIMATORS[options.adv_estimator.value], max_response_length=4)


def per_answer(judged: Judged, batch: PackedBatch | None = None) -> list[list[float]]:
    """Advantages of the policy tokens, answer by answer."""
    batch = batch_of_two_groups() if batch is None else batch
    assert judged.scores.advantages is not None
    parts = judged.scores.advantages.split(batch.lengths.tolist())
    masks = batch.response_mask.split(batch.lengths.tolist())
    return [part[mask].tolist() for part, mask in zip(parts, masks, strict=True)]


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [0.5, -0.5, 0.0, 0.0]),
        ("rloo", [1.0, -1.0, 0.0, 0.0]),
        ("opo", [0.6, -0.4, 0.0, 0.0]),
        ("remax", [0.75, -0.25, -0.5, -0.5]),
    ],
)
def test_advantages_of_whole_answers(name, expected):
    """Lengths 2 and 3: the baseline of OPO is 2/5."""
    found = per_answer(run(algorithm(f"algorithm.name={name}", "algorithm.use_kl_in_reward=false")))
    for row, (tokens, value) in enumerate(zip(found, expected, strict=True)):
        assert tokens == pytest.approx([value] * RESPONSES[row])


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_is_white_over_the_batch(name):
    found = torch.tensor(flat(per_answer(run(algorithm(f"algorithm.adv_estimator={name}")))))
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-6) and float(found.std()) == pytest.approx(1.0, abs=1e-4)


def test_the_kl_is_paid_for_in_the_scores_that_groups_compare():
    """A KL of 1 a token at 0.1: the first answer (2 tokens) loses 0.2, the second (3 tokens) 0.3."""
    batch = batch_of_two_groups()
    options = algorithm("algorithm.name=rloo")
    found = per_answer(run(options, ref_logprobs=batch.rollout_logprobs - 1.0))
    assert found[0] == pytest.approx([0.8 + 0.3] * 2)
    assert found[1] == pytest.approx([-0.3 - 0.8] * 3)


def test_the_price_of_length_is_part_of_the_score():
    """Limit 4, buffer 2: 2 tokens cost nothing, 3 tokens half the penalty."""
    judged = run(
        algorithm("algorithm.name=rloo", "algorithm.use_kl_in_reward=false", "algorithm.overlong_buffer_len=2")
    )
    assert per_answer(judged)[0] == pytest.approx([1.5] * 2)
    assert judged.metrics["reward/overlong_penalty"] == pytest.approx(-0.125)


def test_what_turns_have_earned_lies_on_the_turns():
    """Answer 1 (3 tokens) scores 0: a first turn earned 2 on its first token, so the last token is left with -2."""
    batch = batch_of_two_groups()
    earned = torch.zeros(batch.num_tokens)
    first = batch.token_rows([1])[2]
    earned[first] = 2.0
    judged = run(algorithm("algorithm.whiten_advantages=false"), turn_rewards=earned)
    assert judged.scores.rewards is not None
    assert judged.scores.rewards[batch.token_rows([1])].tolist() == [0.0, 0.0, 2.0, 0.0, -2.0]
    assert per_answer(judged)[1] == pytest.approx([0.0, -2.0, -2.0])
    assert judged.metrics["critic/rewards/mean"] == 0.5


def test_a_truncated_answer_counts_in_its_group_but_not_in_the_loss():
    batch = dataclasses.replace(batch_of_two_groups(), is_finished=torch.tensor([True, False, True, True]))
    judged = run(algorithm("algorithm.name=dr_grpo", "algorithm.mask_truncated=true"), batch)
    assert per_answer(judged, batch)[0] == pytest.approx([0.5] * 2)
    assert int(judged.mask.sum()) == sum(RESPONSES) - 3


def test_a_failed_answer_leaves_the_batch():
    """Case D2."""
    failed = torch.tensor([False, True, False, False])
    judged = run(algorithm("algorithm.name=dr_grpo"), rewards=torch.tensor([1.0, math.nan, 0.5, 0.0]), is_failed=failed)
    assert per_answer(judged) == [[0.0, 0.0], [0.0] * 3, [0.25], [-0.25] * 2]
    assert int(judged.mask.sum()) == sum(RESPONSES) - 3
    assert all(math.isfinite(value) for value in judged.metrics.values())


def test_the_lagrangian_joins_two_gaes_and_each_critic_gets_its_own_targets():
    batch = batch_of_two_groups()
    costs = torch.tensor([0.0, 1.0, 0.0, 4.0])
    options = algorithm("algorithm.adv_estimator=gae_lagrangian", "algorithm.whiten_advantages=false")
    judged = run(options, costs=costs, cost_values=torch.zeros(batch.num_tokens))
    expected = [(1.0 - 0.0) / 3, (0.0 - 2.0) / 3, 0.5 / 3, (0.5 - 8.0) / 3]
    for tokens, value in zip(per_answer(judged), expected, strict=True):
        assert tokens == pytest.approx([value] * len(tokens))
    assert judged.scores.returns is not None and judged.scores.cost_returns is not None
    mask = batch.response_mask
    assert judged.scores.cost_returns[mask].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 4.0, 4.0]
    told = {"cost/mean": 1.25, "lagrange/multiplier": 2.0, "lagrange/cost_limit": 0.0}
    assert told.items() <= judged.metrics.items()


@pytest.mark.parametrize("multiplier", [0.5, 4.0])
def test_the_weight_of_the_kl_does_not_depend_on_the_multiplier(multiplier):
    """Rewards and costs of zero: what is left of the joint advantage is the KL, at half its coefficient."""
    batch = batch_of_two_groups()
    zeros, none = torch.zeros(batch.num_tokens), torch.zeros(4)
    options = algorithm("algorithm.name=safe_rlhf", "algorithm.whiten_advantages=false", "algorithm.lam=0")
    evidence = Evidence(
        none, none.bool(), batch.rollout_logprobs, batch.rollout_logprobs - 1.0, zeros, None, none, zeros
    )  # fmt: skip
    now = Coefficients(0.1, multiplier)
    judged = judge(options, batch, evidence, now, ESTIMATORS["gae_lagrangian"], 4)
    assert flat(per_answer(judged)) == pytest.approx([-0.05] * sum(RESPONSES))


def test_decoupled_and_length_adaptive_decay():
    """VAPO: with alpha 1 an answer of 2 tokens has λ 1/2, one of 1 token λ 0; the critic's targets are plain sums."""
    judged = run(algorithm("algorithm.lam_alpha=1.0", "algorithm.lam_critic=1.0", "algorithm.whiten_advantages=false"))
    found = per_answer(judged)
    assert found[0] == pytest.approx([0.5, 1.0])
    assert found[2] == pytest.approx([0.5])
    assert judged.scores.returns is not None
    assert judged.scores.returns[batch_of_two_groups().response_mask][:2].tolist() == [1.0, 1.0]


def test_the_gap_to_the_sampler_is_always_measured_and_corrected_on_demand():
    batch = batch_of_two_groups()
    old = batch.rollout_logprobs + 1.0
    plain = run(algorithm("algorithm.name=dr_grpo"), old_logprobs=old)
    assert plain.scores.importance is None
    assert plain.metrics["rollout/ratio_mean"] == pytest.approx(math.e)
    held = run(algorithm("algorithm.name=dr_grpo", "algorithm.rollout_correction.level=token"), old_logprobs=old)
    assert held.scores.importance is not None
    assert held.scores.importance[batch.response_mask].tolist() == [2.0] * sum(RESPONSES)


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "values"])
def test_what_is_not_finite_is_named(name):
    """Case H5: one NaN on a policy token of answer 1; NaN on a prompt token is nothing."""
    batch = batch_of_two_groups()
    bad = torch.zeros(batch.num_tokens)
    bad[0] = math.nan
    given: dict[str, Any] = {name: bad}
    assert run(algorithm(), **given).not_finite == ()
    bad[batch.token_rows([1])[-1]] = math.nan
    assert run(algorithm(), **given).not_finite == (f"{name} on 1 tokens, first in answer 1",)


# a user's own function


def test_a_users_function_may_return_bare_advantages():
    def double(x: Any) -> Tensor:
        return torch.where(x.mask, 2.0, math.nan)  # what is masked is not read

    batch = batch_of_two_groups()
    values = torch.ones(batch.num_tokens)
    evidence = Evidence(torch.ones(4), torch.zeros(4, dtype=torch.bool), batch.rollout_logprobs, values=values)
    judged = judge(algorithm(), batch, evidence, NOW, wrap_user_estimator(double, "mine.py:double"), 4)
    assert flat(per_answer(judged)) == [2.0] * sum(RESPONSES)
    assert judged.scores.returns is not None
    assert judged.scores.returns[batch.response_mask].tolist() == [3.0] * sum(RESPONSES)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(3), r"mine.py:f returned \[3\]"),
        (1.0, "returned float"),
        (Advantages(torch.full((18,), math.nan)), "not finite"),
    ],
)
def test_what_a_users_function_returns_is_checked(result, message):
    batch = batch_of_two_groups()
    assert batch.num_tokens == 18
    evidence = Evidence(torch.ones(4), torch.zeros(4, dtype=torch.bool), batch.rollout_logprobs)
    with pytest.raises(ValueError, match=message):
        judge(algorithm(), batch, evidence, NOW, wrap_user_estimator(lambda x: result, "mine.py:f"), 4)


# what moves between steps


def test_the_multiplier_rises_over_the_limit_and_waits_out_its_delay():
    options = algorithm("algorithm.lagrange={cost_limit: 0.5, lr: 0.1, delay_steps: 3}")
    assert advance(options, NOW, {"cost/mean": 1.0}, 8, step=4).multiplier == pytest.approx(2.0 * math.exp(0.1))
    assert advance(options, NOW, {"cost/mean": 0.0}, 8, step=4).multiplier < 2.0
    assert advance(options, NOW, {"cost/mean": 1.0}, 8, step=3) == NOW
    assert advance(options, NOW, {}, 8, step=9) == NOW


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_moves_nothing(value):
    options = algorithm("algorithm.kl_ctrl.type=adaptive")
    assert advance(options, NOW, {"actor/reward_kl_penalty": value, "cost/mean": value}, 8, step=4) == NOW


def test_a_resumed_run_takes_up_what_it_had():
    options = algorithm("algorithm.lagrange.init=0.5", "algorithm.kl_ctrl.kl_coef=0.3")
    assert first_coefficients(options, {}) == Coefficients(0.3, 0.5)
    assert first_coefficients(options, dataclasses.asdict(NOW)) == NOW


def test_a_fixed_kl_coefficient_stays():
    assert advance(algorithm(), NOW, {"actor/reward_kl_penalty": 5.0}, 8, step=1) == NOW
