"""A scoring service over loopback that fails in every way that services do (case H3)."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.records import Prompt, Rollout
from megarl.reward.remote import RemoteRewardModel
from megarl.reward.score import Source, dry_run, score_answers
from megarl.reward.verdict import Answer

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"})
PROMPT = Prompt(row=4, token_ids=(1,), text="<u>2+3?<a>", data_source="src", ground_truth="5", messages=CHAT)
PLAIN = Prompt(row=5, token_ids=(1,), text="2+3=", ground_truth="5")


def answers(*texts: str, prompt: Prompt = PROMPT) -> list[Answer]:
    return [Answer(prompt, Rollout(0, i, (), (), True, 0), text) for i, text in enumerate(texts)]


class Service:
    """What the server saw, and how it behaves: the text of an answer names the behaviour."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.reply: Any = {"score": 0.5}
        self.num_open = self.most_open = 0
        self.lock = threading.Lock()
        self.url = ""

    def asked(self, text: str) -> int:
        return sum(body.get("response") == text for body in self.bodies)


def build_handler(service: Service) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with service.lock:
                service.bodies.append(body)
                service.headers.append(dict(self.headers.items()))
                service.num_open += 1
                service.most_open = max(service.most_open, service.num_open)
            try:
                self.behave(body.get("response", ""), service.asked(body.get("response", "")))
            except BrokenPipeError:
                self.close_connection = True  # the caller has given up
            finally:
                with service.lock:
                    service.num_open -= 1

        def behave(self, how: str, times: int) -> None:
            if how == "500 twice" and times <= 2:
                self.say(500, b"busy")
            elif how == "429 once" and times <= 1:
                self.say(429, b"slow down", {"Retry-After": "0"})
            elif how == "breaks once" and times <= 1:
                self.close_connection = True  # no reply at all
            elif how == "always 503":
                self.say(503, b"down")
            elif how == "silent":
                time.sleep(1.0)
            elif how == "slow":
                self.send_response(200)
                self.send_header("Content-Length", "100000")
                self.end_headers()
                for _ in range(20):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)
            elif how == "404":
                self.say(404, b"no such model")
            elif how == "302":
                self.say(302, b"", {"Location": "http://127.0.0.1:1/elsewhere"})
            elif how == "packed":
                self.say(200, b"xx", {"Content-Encoding": "gzip"})
            elif how == "brief pause":
                time.sleep(0.05)
                self.say(200, b'{"score": 1}')
            else:
                replies = {
                    "nan": b'{"score": NaN}', "huge": b'{"score": 1e999}', "no key": b'{"scores": 1}',
                    "text": b'{"score": "high"}', "flag": b'{"score": true}', "html": b"<html>", "list": b"[1]",
                    "long": b'{"score": 1, "x": "' + b"x" * 5000 + b'"}', "deep": b"[" * 100000,
                }  # fmt: skip
                self.say(200, replies.get(how, json.dumps(service.reply).encode()))

        def say(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    server = ThreadingHTTPServer(("127.0.0.1", 0), build_handler(service))
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_address[1]}/judge"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield service
    server.shutdown()
    server.server_close()


def open_judge(service: Service, **options: Any) -> RemoteRewardModel:
    return RemoteRewardModel(service.url, **{"backoff_s": 0.01, "timeout_s": 0.4, "num_retries": 2, **options})


@pytest.mark.parametrize(("how", "requests"), [("500 twice", 3), ("429 once", 2), ("breaks once", 2), ("fine", 1)])
def test_what_passes_is_asked_again(service, how, requests):
    (verdict,) = open_judge(service).score(answers(how), 0)
    assert (verdict.score, verdict.failure) == (0.5, None)
    assert service.asked(how) == requests


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nan", "nan, which is not finite"), ("huge", "inf, which is not finite"),
        ("no key", r"no 'score'; it has \['scores'\]"), ("text", "'high', not a number"), ("flag", "not a number"),
        ("404", "status 404: no such model"), ("302", "status 302"), ("html", "not JSON"), ("list", "no 'score'"),
        ("long", "longer than 4096 bytes"), ("packed", "gzip"), ("deep", "longer than|not JSON"),
    ],
)  # fmt: skip
def test_what_stays_wrong_fails_at_once(service, how, words):
    (verdict,) = open_judge(service, max_reply_bytes=4096).score(answers(how), 0)
    assert verdict.failure is not None
    assert service.asked(how) == 1
    assert re.search(words, verdict.failure), verdict.failure


@pytest.mark.parametrize(("how", "words"), [("silent", "no reply within 0.4 s"), ("slow", "no whole reply within 0.4")])
def test_a_reply_that_does_not_come_is_given_up(service, how, words):
    started = time.monotonic()
    (verdict,) = open_judge(service, num_retries=1).score(answers(how), 0)
    assert verdict.failure is not None and words in verdict.failure and "2 attempts" in verdict.failure
    assert service.asked(how) == 2
    assert time.monotonic() - started < 3.0


def test_nobody_listens():
    judge = RemoteRewardModel("http://127.0.0.1:9/judge", backoff_s=0.05, num_retries=2)
    started = time.monotonic()
    (verdict,) = judge.score(answers("a"), 0)
    assert verdict.failure is not None and "ConnectError" in verdict.failure and "3 attempts" in verdict.failure
    assert time.monotonic() - started >= 0.075, "the pauses before the two retries are at least half of 0.05 and 0.1"


def test_a_failure_is_a_masked_row_and_never_a_zero(service):
    rewards = score_answers([Source("judge", 2.0, open_judge(service))], answers("a", "nan", "b", "404", "c"))
    assert rewards.is_failed_mask.tolist() == [False, True, False, True, False]
    assert rewards.mean == 1.0, "a failure that counted as zero would give 0.6"
    assert rewards.failures[0].startswith("row 4, answer 1: ") and len(rewards.failures) == 2


def test_too_many_failures_end_the_job_before_all_are_asked(service):
    judge = open_judge(service, concurrency=1, num_retries=0)
    with pytest.raises(RuntimeError, match=r"failed on 40 of 40 answers, more than reward.max_failure_share=0.1.*503"):
        score_answers([Source("judge", 1.0, judge)], answers(*["always 503"] * 40), max_failure_share=0.1)
    assert len(service.bodies) == 5, "four failures can be borne, the fifth ends it"


def test_no_more_requests_at_a_time_than_allowed(service):
    verdicts = open_judge(service, concurrency=3).score(answers(*["brief pause"] * 12), 0)
    assert all(verdict.score == 1.0 for verdict in verdicts)
    assert service.most_open == 3


def test_the_dry_call_meets_a_service_that_is_not_there():  # case H4
    judge = RemoteRewardModel("http://127.0.0.1:9/judge", num_retries=0)
    with pytest.raises(ValueError, match=r"reward.sources\[0\].remote=http://127.0.0.1:9/judge fails on row 4"):
        dry_run(judge, PROMPT, "reward.sources[0].remote=http://127.0.0.1:9/judge")


@pytest.mark.parametrize(
    ("style", "prompt", "request_body", "reply"),
    [
        ("score", PROMPT, {"text_1": "2+3?", "text_2": "5"}, {"data": [{"index": 0, "score": 0.25}]}),
        ("rerank", PROMPT, {"query": "2+3?", "documents": ["5"]}, {"results": [{"relevance_score": 0.25}]}),
        ("classify", PLAIN, {"input": "2+3=5"}, {"data": [{"label": "LABEL_0", "probs": [0.25], "num_classes": 1}]}),
        ("classify", PROMPT, {"messages": [*CHAT, {"role": "assistant", "content": "5"}]},
         {"data": [{"probs": [0.25]}]}),
        ("pooling", PLAIN, {"input": "2+3=5"}, {"data": [{"object": "pooling", "data": [[9.0], [0.25]]}]}),
        ("pooling", PLAIN, {"input": "2+3=5"}, {"data": [{"data": [0.25]}]}),
        ("json", PLAIN, {"prompt": "2+3=", "messages": [], "response": "5", "ground_truth": "5", "data_source": "",
                         "extra_info": {}}, {"score": 0.25}),
    ],
)  # fmt: skip
def test_styles(service, style, prompt, request_body, reply):
    service.reply = reply
    judge = open_judge(service, style=style, model_name="rm", fields={"use_activation": False})
    (verdict,) = judge.score(answers("5", prompt=prompt), 0)
    assert (verdict.score, verdict.failure) == (0.25, None)
    assert service.bodies == [request_body | {"model": "rm", "use_activation": False}]


@pytest.mark.parametrize(
    "reply", [{"data": []}, {"data": [{"score": 1}, {"score": 2}]}, {"data": "x"}, {}, {"data": [1]}]
)
def test_a_reply_of_another_form_is_a_failure(service, reply):
    service.reply = reply
    (verdict,) = open_judge(service, style="score").score(answers("5"), 0)
    assert verdict.failure is not None and "reply" in verdict.failure


def test_two_classes_are_not_one_score(service):
    service.reply = {"data": [{"probs": [0.25, 0.75]}]}
    (verdict,) = open_judge(service, style="classify").score(answers("5"), 0)
    assert verdict.failure is not None and "list of one" in verdict.failure


def test_the_address_names_the_style(service):
    service.url = service.url.replace("/judge", "/v1/score")
    service.reply = {"data": [{"score": 0.25}]}
    (verdict,) = open_judge(service).score(answers("5"), 0)
    assert verdict.score == 0.25 and "text_1" in service.bodies[0]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///etc/passwd", "http"), ("ftp://host/x", "http"), ("judge", "http"), ("http:///x", "http"),
        ("http://[::1", "http"), ("http://user:secret@host/x", "api_key_env"),
    ],
)  # fmt: skip
def test_only_http_and_no_password_in_the_address(url, words):
    with pytest.raises(ValueError, match=words) as caught:
        RemoteRewardModel(url)
    assert "secret" not in str(caught.value)


def test_the_key_comes_from_the_environment_and_is_never_told(service, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "top-secret")
    (verdict,) = open_judge(service, api_key_env="JUDGE_KEY").score(answers("404"), 0)
    assert service.headers[0]["Authorization"] == "Bearer top-secret"
    assert verdict.failure is not None and "top-secret" not in verdict.failure


def test_a_key_that_is_not_set_is_an_error(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key_env=JUDGE_KEY"):
        RemoteRewardModel("http://127.0.0.1:9/x", api_key_env="JUDGE_KEY")
