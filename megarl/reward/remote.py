"""Rewards from a service over HTTP: bounded, retried where that can help, and never a zero where it cannot.

    refused or broken connection, no reply in time, 408, 429, 5xx     asked again, each time after a longer pause
    any other status, no JSON, no score, a score that is not finite   failed at once: asking again changes nothing

A reply is read up to a limit of bytes and of time. At most `concurrency` requests are under way. When more answers
have failed than the caller can bear, the rest are not asked any more.

    judge = RemoteRewardModel("http://127.0.0.1:8000/score", "my-reward-model")
    verdicts = judge.score(answers, max_failures=10)
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from megarl.reward.protocols import STYLES, build_request, check_url, infer_style, is_loopback, read_score
from megarl.reward.verdict import Answer, Verdict, failed

MAX_PAUSE_S = 30.0
TRANSIENT_STATUS = (408, 429)


class _Transient(Exception):
    """Asking again may help. `after_s`: what the service asked us to wait."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class RemoteRewardModel:
    """A reward model that another process serves.

    Args:
        api_url: the address that requests are posted to, http or https.
        model_name: the name the service knows the model by; None = the service has one model.
        style: json, score, rerank, classify or pooling; None = what the last part of `api_url` says, else json.
        api_key_env: the environment variable that holds the service's key.
        timeout_s: for one request, from the first byte sent to the last one read.
        num_retries: how often a request is sent again.
        backoff_s: the pause before the first retry; it doubles up to half a minute, with some chance in it.
        concurrency: requests under way at a time.
        max_reply_bytes: a longer reply is refused.
        fields: further fields of each request.

    Raises:
        ValueError: an address that is not http(s), an unknown style, an environment variable that is not set.
    """

    waits_elsewhere = True

    def __init__(
        self,
        api_url: str,
        model_name: str | None = None,
        *,
        style: str | None = None,
        api_key_env: str | None = None,
        timeout_s: float = 30.0,
        num_retries: int = 4,
        backoff_s: float = 0.5,
        concurrency: int = 16,
        max_reply_bytes: int = 1 << 20,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        check_url(api_url)
        if style is not None and style not in STYLES:
            raise ValueError(f"style={style!r} of remote={api_url} is not one of {', '.join(STYLES)}")
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if api_key_env is not None:
            if not os.environ.get(api_key_env):
                raise ValueError(f"api_key_env={api_key_env} of remote={api_url}: that variable is not set")
            headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"
        self._url, self._model_name, self._fields = api_url, model_name, dict(fields or {})
        self._style = style or infer_style(api_url)
        self._timeout_s, self._num_retries, self._backoff_s = timeout_s, num_retries, backoff_s
        self._concurrency, self._max_reply_bytes = concurrency, max_reply_bytes
        self._client = httpx2.Client(
            headers=headers,
            timeout=timeout_s,
            limits=httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            follow_redirects=False,  # a key must not travel to another host
            trust_env=not is_loopback(api_url),
        )

    def score(self, answers: Sequence[Answer], max_failures: int) -> list[Verdict]:
        """See `Scorer.score`."""
        stop = threading.Event()
        lock = threading.Lock()
        num_failures = 0

        def judge(answer: Answer) -> Verdict:
            nonlocal num_failures
            if stop.is_set():
                return failed(f"not asked: {num_failures} others had failed")
            verdict = self._judge(answer, stop.wait)
            if verdict.failure is not None:
                with lock:
                    num_failures += 1
                    if num_failures > max_failures:
                        stop.set()
            return verdict

        with ThreadPoolExecutor(max(1, min(self._concurrency, len(answers)))) as pool:
            return list(pool.map(judge, answers))

    def close(self) -> None:
        """See `Scorer.close`."""
        self._client.close()

    def _judge(self, answer: Answer, wait: Callable[[float], bool]) -> Verdict:
        """Asks until there is a score or no hope. `wait` pauses, and says True when the caller has given up."""
        body = json.dumps(self._fields | build_request(self._style, answer, self._model_name), default=_as_plain)
        pause_s = self._backoff_s
        for attempt in range(self._num_retries + 1):
            try:
                return Verdict(read_score(self._style, self._post(body.encode())))
            except _Transient as reason:
                last = f"{reason} ({attempt + 1} attempts)"
                after_s = max(pause_s * random.uniform(0.5, 1.0), min(reason.after_s, MAX_PAUSE_S))
            except (ValueError, httpx2.HTTPError) as error:
                return failed(f"{self._url}: {error}")
            if attempt == self._num_retries or wait(after_s):
                break
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return failed(f"{self._url}: {last}")

    def _post(self, body: bytes) -> Any:
        """The parsed reply to one request.

        Raises:
            _Transient: see above. ValueError: a reply that is no use.
        """
        deadline = time.monotonic() + self._timeout_s
        headers = {"Content-Type": "application/json"}
        try:
            with self._client.stream("POST", self._url, content=body, headers=headers) as reply:
                status = reply.status_code
                if status in TRANSIENT_STATUS or status >= 500:
                    raise _Transient(f"status {status}", _read_seconds(reply.headers.get("Retry-After")))
                content = self._read_within(reply, deadline)
        except httpx2.TimeoutException as error:
            raise _Transient(f"no reply within {self._timeout_s:g} s ({type(error).__name__})") from error
        except (httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
            raise _Transient(f"{type(error).__name__}: {error}") from error
        if status != 200:
            raise ValueError(f"status {status}: {content[:200].decode(errors='replace')}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the reply is not JSON: {content[:80]!r}") from error

    def _read_within(self, reply: httpx2.Response, deadline: float) -> bytes:
        """The reply's bytes, or an end to it: a service may send one byte a minute, or for ever."""
        encoding = reply.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise ValueError(f"the reply is packed ({encoding}), which was not asked for")
        content = bytearray()
        for piece in reply.iter_raw():
            content += piece
            if len(content) > self._max_reply_bytes:
                raise ValueError(f"the reply is longer than {self._max_reply_bytes} bytes")
            if time.monotonic() > deadline:
                raise _Transient(f"no whole reply within {self._timeout_s:g} s")
        return bytes(content)


def _read_seconds(text: str | None) -> float:
    """What `Retry-After` asks for, in seconds; 0 where it is missing or a date."""
    return float(text) if text is not None and text.isdecimal() else 0.0


def _as_plain(value: Any) -> Any:
    """Arrays and numpy numbers as lists and numbers; everything else that JSON does not know as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
