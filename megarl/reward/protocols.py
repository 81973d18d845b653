"""What is sent to a scoring service and how its reply is read, for each style of service. Pure.

    style     request                                        score in the reply
    json      prompt, response, ground_truth, data_source,   score
              extra_info
    score     text_1: prompt, text_2: response               data[0].score
    rerank    query: prompt, documents: [response]           results[0].relevance_score
    classify  messages, or input: prompt + response          data[0].probs, one number
    pooling   as classify                                    data[0].data, its last number

All but the first are those of vLLM's server. `model` is added where a model's name is given. A model's raw output,
instead of a probability, is had from vLLM's `classify` and `pooling` with the further field `use_activation: false`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from megarl.reward.verdict import Answer

STYLES = ("json", "score", "rerank", "classify", "pooling")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def check_url(url: str) -> None:
    """Raises ValueError for anything but http(s) to a named host, without a password in it."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_good = is_good and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good, parts = False, urlsplit("")
    if not is_good:
        raise ValueError(f"remote={url} is not an address of a service; use http://host:port/path or https://...")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "remote holds a user name or password, which would be printed with the configuration; put the key into an "
            "environment variable and name that in api_key_env"
        )


def is_loopback(url: str) -> bool:
    """Whether the service runs on this machine: no proxy of the environment is asked then."""
    return urlsplit(url).hostname in LOOPBACK


def infer_style(url: str) -> str:
    """The style that the last part of the address names, else json."""
    last = urlsplit(url).path.rstrip("/").rsplit("/", 1)[-1]
    return last if last in STYLES else "json"


def build_request(style: str, answer: Answer, model_name: str | None) -> dict[str, Any]:
    """The body of the request that asks for the score of one answer."""
    prompt, text = answer.prompt, answer.text
    body: dict[str, Any] = {} if model_name is None else {"model": model_name}
    if style == "json":
        return body | {
            "prompt": prompt.text,
            "messages": [dict(message) for message in prompt.messages],
            "response": text,
            "ground_truth": prompt.ground_truth,
            "data_source": prompt.data_source,
            "extra_info": dict(prompt.extra_info),
        }
    question = prompt.text if not prompt.messages else prompt.messages[-1]["content"]
    if style == "score":
        return body | {"text_1": question, "text_2": text}
    if style == "rerank":
        return body | {"query": question, "documents": [text]}
    if prompt.messages:
        return body | {"messages": [*map(dict, prompt.messages), {"role": "assistant", "content": text}]}
    return body | {"input": prompt.text + text}


def read_score(style: str, reply: Any) -> float:
    """The score in a service's reply.

    Raises:
        ValueError: the reply has not the form of this style, or its score is not a finite number.
    """
    if style == "json":
        value = _field(reply, "score")
    elif style == "rerank":
        value = _field(_only(_field(reply, "results"), "results"), "relevance_score")
    elif style == "score":
        value = _field(_only(_field(reply, "data"), "data"), "score")
    elif style == "classify":
        value = _only(_field(_only(_field(reply, "data"), "data"), "probs"), "probs")
    else:
        value = _last(_field(_only(_field(reply, "data"), "data"), "data"))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the reply's score is {_shown(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"the reply's score is {number}, which is not finite")
    return number


def _field(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"the reply has no {name!r}: {_shown(value)}")
    if name not in value:
        raise ValueError(f"the reply has no {name!r}; it has {_shown(sorted(map(str, value)))}")
    return value[name]


def _only(value: Any, name: str) -> Any:
    if not _is_list(value) or len(value) != 1:
        raise ValueError(f"{name!r} of the reply must be a list of one, not {_shown(value)}")
    return value[0]


def _last(value: Any) -> Any:
    """The last number of a list, or of the last list in it: a score for every token ends with the sequence's."""
    for _ in range(2):
        if _is_list(value) and value:
            value = value[-1]
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
