"""Sources that wait elsewhere are asked beside everything else; the others have answered when asking returns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.config.schema import RewardConfig
from megarl.judging import ask_sources
from megarl.records import Prompt, Rollout
from megarl.reward.pool import ScorerPool
from megarl.reward.remote import RemoteRewardModel
from megarl.reward.score import FunctionScorer, Source
from megarl.reward.verdict import Answer, Verdict

PROMPTS = [Prompt(0, (1,), "p")]
ROLLOUTS = [Rollout(0, sample, (2,), (0.0,), True, 0) for sample in range(3)]


class Service:
    """Answers when it is let."""

    waits_elsewhere = True

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.threads: set[str] = set()

    def score(self, answers: Sequence[Answer], max_failures: int) -> list[Verdict]:
        self.threads.add(threading.current_thread().name)
        assert self.may_answer.wait(30), "nobody went on while this was asked"
        return [Verdict(1.0) for _ in answers]

    def close(self) -> None: ...


@pytest.fixture
def asker():
    with ThreadPoolExecutor(1, "asker") as pool:
        yield pool


def test_asking_returns_while_a_service_is_still_at_it(asker) -> None:
    service = Service()
    sources = [Source("service", 1.0, service), Source("rule", 1.0, FunctionScorer(lambda *_: 0.5))]
    asked = ask_sources(RewardConfig(), sources, PROMPTS, ROLLOUTS, ["a"] * 3, asker)
    assert asked.pending is not None and not asked.pending.done()
    assert [verdict.score for verdict in asked.found["rule"]] == [0.5] * 3 and "service" not in asked.found
    service.may_answer.set()
    assert [verdict.score for verdict in asked.pending.result(30)["service"]] == [1.0] * 3


def test_a_source_is_always_asked_from_the_same_thread(asker) -> None:
    """The processes of a pool end with the thread that started them."""
    service = Service()
    service.may_answer.set()
    for _ in range(5):
        asked = ask_sources(RewardConfig(), [Source("s", 1.0, service)], PROMPTS, ROLLOUTS, ["a"] * 3, asker)
        assert asked.pending is not None
        asked.pending.result(30)
    assert len(service.threads) == 1


def test_what_computes_here_is_not_run_beside(asker) -> None:
    asked = ask_sources(
        RewardConfig(), [Source("f", 1.0, FunctionScorer(lambda *_: 0.0))], PROMPTS, ROLLOUTS, ["a"] * 3, asker
    )
    assert asked.pending is None and set(asked.found) == {"f"}


def test_an_error_of_a_source_reaches_who_waits_for_it(asker) -> None:
    class Broken(Service):
        def score(self, answers: Sequence[Answer], max_failures: int) -> list[Verdict]:
            raise RuntimeError("out of order")

    asked = ask_sources(RewardConfig(), [Source("b", 1.0, Broken())], PROMPTS, ROLLOUTS, ["a"] * 3, asker)
    assert asked.pending is not None
    with pytest.raises(RuntimeError, match="out of order"):
        asked.pending.result(30)


def test_services_and_pools_wait_elsewhere() -> None:
    assert ScorerPool.waits_elsewhere and RemoteRewardModel.waits_elsewhere
