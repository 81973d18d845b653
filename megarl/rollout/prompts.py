"""From rows to prompts, and the order in which training sees them.

    rows (rows.py)  ->  build_prompts  ->  [Prompt]  ->  PromptStream: batch after batch, epoch after epoch
                                                     ->  split_batches: all of them once (validation)

A row in verl's form, and the same question in the short form:

    {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "2+3?"}],
     "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"index": 0}}
    {"question": "2+3?", "answer": "5"}

Chat messages, messages whose content is a list of text parts, and a plain string (one user message) give the same
ids. With `raw_prompt` a plain string is encoded as it is, with the tokenizer's own special tokens and no template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.records import Prompt
from megarl.rollout.rows import Row
from megarl.rollout.tokenizer import load_chat_template

_ENCODE_AT_ONCE = 1024
_SHUFFLE_PURPOSE = 0x70726F6D  # keeps this stream of random numbers apart from others with the same seed


@dataclass(frozen=True)
class PromptCounts:
    """What became of the rows; `cut` and `dropped` were longer than the limit. Lengths are tokens of the kept ones."""

    rows: int
    kept: int
    cut: int
    dropped: int
    mean_length: float
    max_length: int

    def __str__(self) -> str:
        lengths = f"{self.mean_length:.1f} tokens on average, {self.max_length} at most"
        text = f"{self.kept} prompts of {self.rows} rows, {lengths}"
        if self.cut:
            text += f"; {self.cut} cut to the limit"
        return f"{text}; {self.dropped} over-long ones dropped" if self.dropped else text


def build_prompts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    overlong: str = "error",
    prompt_key: str = "prompt",
    chat_template: str | None = None,
    raw_prompt: bool = False,
    origin: str = "the data",
) -> tuple[list[Prompt], PromptCounts]:
    """Renders and encodes every row.

    Args:
        rows: as `load_rows` gives them; `Prompt.row` is the position in this list.
        max_prompt_length: tokens, chat template included.
        overlong: what happens to longer prompts: "error", "filter" (dropped), "left" (the left end is cut off,
            the last tokens stay) or "right" (the first tokens stay).
        prompt_key: the column with the prompt; when it is "prompt" and missing, "question" is read.
        chat_template: a template or the path of a file with one; None = the tokenizer's own.
        raw_prompt: encode plain strings as they are.
        origin: the files, for messages.

    Raises:
        ValueError: rows without prompt, no chat template, a prompt without tokens, over-long prompts with "error".
    """
    assert overlong in ("error", "filter", "left", "right"), f"overlong={overlong!r}"
    template = load_chat_template(chat_template)
    prompts: list[Prompt] = []
    too_long: list[tuple[int, int]] = []
    texts = [render_prompt(row, i, tokenizer, prompt_key, template, raw_prompt, origin) for i, row in enumerate(rows)]
    for index, token_ids in enumerate(_encode(texts, tokenizer, with_special_tokens=raw_prompt)):
        text = texts[index]
        if not token_ids:
            raise ValueError(f"{origin}: row {index} gives a prompt without tokens")
        if len(token_ids) > max_prompt_length:
            too_long.append((index, len(token_ids)))
            if overlong in ("error", "filter"):
                continue
            token_ids = token_ids[-max_prompt_length:] if overlong == "left" else token_ids[:max_prompt_length]
            text = str(tokenizer.decode(list(token_ids)))
        messages = () if raw_prompt else read_messages(rows[index], index, prompt_key, origin)
        prompts.append(_with_reward_fields(rows[index], index, token_ids, text, messages, origin))
    if too_long and overlong == "error":
        shown = ", ".join(f"row {index}: {length}" for index, length in too_long[:3])
        longest = max(length for _, length in too_long)
        raise ValueError(
            f"{origin}: {len(too_long)} of {len(rows)} prompts are longer than "
            f"data.max_prompt_length={max_prompt_length} tokens ({shown}{', ...' if len(too_long) > 3 else ''}); "
            f"raise it to {longest}, or set data.overlong_prompts to filter, left or right"
        )
    lengths = [len(prompt.token_ids) for prompt in prompts]
    counts = PromptCounts(
        rows=len(rows),
        kept=len(prompts),
        cut=len(too_long) if overlong in ("left", "right") else 0,
        dropped=len(too_long) if overlong == "filter" else 0,
        mean_length=sum(lengths) / len(lengths) if lengths else 0.0,
        max_length=max(lengths, default=0),
    )
    return prompts, counts


def render_prompt(
    row: Row,
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    prompt_key: str,
    template: str | None,
    raw_prompt: bool,
    origin: str,
) -> str:
    """The text of one row that the model reads, chat template applied. Raises ValueError naming origin and row."""
    where = f"{origin}: row {index}"
    if raw_prompt:
        value = _read_prompt(row, prompt_key, where)
        if not isinstance(value, str):
            raise ValueError(f"{where}: data.raw_prompt=true needs plain text in {prompt_key!r}, not chat messages")
        return value
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the tokenizer has no chat template; set data.chat_template to a Jinja template or a file with one, "
            "or data.raw_prompt=true to encode plain text as it is"
        )
    messages = list(map(dict, read_messages(row, index, prompt_key, origin)))
    try:
        return str(
            tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"{where}: the chat template refuses the messages: {error}") from error


def read_messages(row: Row, index: int, prompt_key: str, origin: str) -> tuple[dict[str, str], ...]:
    """The chat of one row, each message with role and content. Raises ValueError naming origin and row."""
    where = f"{origin}: row {index}"
    return tuple(_to_messages(_read_prompt(row, prompt_key, where), where, prompt_key))


def _read_prompt(row: Row, prompt_key: str, where: str) -> Any:
    value = row.get(prompt_key)
    if value is None and prompt_key == "prompt":
        value = row.get("question")
    if value is None:
        raise ValueError(
            f"{where} has no column {prompt_key!r}; its columns are {', '.join(map(str, row))}; set data.prompt_key"
        )
    return value


def _to_messages(value: Any, where: str, prompt_key: str) -> list[dict[str, str]]:
    """Any form of a prompt as messages with plain text, so that all forms give the same ids."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"{where}: {prompt_key!r} holds {type(value).__name__}; use text or a list of chat messages")
    messages: list[dict[str, str]] = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: message {number} of {prompt_key!r} must have a role and a content")
        content: Any = message.get("content")
        if isinstance(content, list | tuple):
            kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
            if any(kind != "text" for kind in kinds):
                raise ValueError(f"{where}: message {number} has parts of type {kinds}; only text parts are read")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ValueError(f"{where}: message {number} of {prompt_key!r} has no text as content")
        messages.append({"role": message["role"], "content": content})
    return messages


def _encode(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, with_special_tokens: bool
) -> Iterator[tuple[int, ...]]:
    """Ids of each text; a rendered chat template already holds its special tokens."""
    for start in range(0, len(texts), _ENCODE_AT_ONCE):
        some = list(texts[start : start + _ENCODE_AT_ONCE])
        for token_ids in tokenizer(some, add_special_tokens=with_special_tokens)["input_ids"]:
            yield tuple(token_ids)


def _with_reward_fields(
    row: Row, index: int, token_ids: tuple[int, ...], text: str, messages: tuple[dict[str, str], ...], origin: str
) -> Prompt:
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping):
        ground_truth = reward_model.get("ground_truth")
    else:
        ground_truth = row.get("ground_truth", row.get("answer"))
    extra_info = row.get("extra_info") or {}
    if not isinstance(extra_info, Mapping):
        raise ValueError(f"{origin}: row {index}: 'extra_info' holds {type(extra_info).__name__}, not named values")
    return Prompt(
        row=index,
        token_ids=token_ids,
        text=text,
        data_source=str(row.get("data_source") or ""),
        ground_truth=ground_truth,
        extra_info=extra_info,
        messages=messages,
    )


@dataclass(frozen=True)
class StreamPosition:
    """Where a stream stands: the next batch is number `step` of epoch `epoch`, both from 0."""

    epoch: int = 0
    step: int = 0


class PromptStream:
    """Full batches of prompts without end; holds the position, which can be saved and restored.

    The order depends on (seed, epoch) alone: streams with the same arguments agree, whatever was read before.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        length_bucketing: bool = False,
        origin: str = "the data",
        answers: bytes = b"",
    ) -> None:
        """Raises ValueError when there is not even one full batch; see `plan_epoch` for the arguments. `answers`: what
        else is trained on beside the prompts, for the fingerprint."""
        if len(prompts) < batch_size:
            raise ValueError(
                f"{origin}: {len(prompts)} prompts are fewer than data.train_batch_size={batch_size}; "
                f"lower it to {max(len(prompts), 1)} or less, or give more data"
            )
        self._prompts = list(prompts)
        self._lengths = [len(prompt.token_ids) for prompt in prompts]
        self._batch_size, self._seed = batch_size, seed
        self._shuffle, self._length_bucketing, self._answers = shuffle, length_bucketing, answers
        self.steps_per_epoch = len(prompts) // batch_size
        self.num_prompts = len(prompts)
        self.seek(StreamPosition())

    @property
    def position(self) -> StreamPosition:
        return self._position

    @property
    def first(self) -> Prompt:
        """The first prompt of the data, to look at."""
        return self._prompts[0]

    def seek(self, position: StreamPosition) -> None:
        """Continues from `position`, which a stream with the same arguments gave."""
        if not 0 <= position.step < self.steps_per_epoch:
            raise ValueError(
                f"the saved position is step {position.step} of an epoch, but the data now holds "
                f"{self.steps_per_epoch} steps; resume with the same data.train_files and data.train_batch_size"
            )
        self._position = position
        self._plan = plan_epoch(
            self._lengths, self._batch_size, self._seed, position.epoch, self._shuffle, self._length_bucketing
        )

    def fingerprint(self) -> str:
        """A number of the prompts and of everything their order depends on: equal when a position means the same."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self._batch_size} {self._seed} {self._shuffle} {self._length_bucketing}".encode())
        digest.update(np.asarray(self._lengths, dtype=np.int64).tobytes())
        for prompt in self._prompts:
            digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes())
        digest.update(self._answers)
        return digest.hexdigest()

    def next_batch(self) -> list[Prompt]:
        """The next `batch_size` prompts; moves the position."""
        batch = [self._prompts[index] for index in self._plan[self._position.step]]
        epoch, step = self._position.epoch, self._position.step + 1
        if step == self.steps_per_epoch:
            self.seek(StreamPosition(epoch + 1, 0))
        else:
            self._position = StreamPosition(epoch, step)
        return batch


def plan_epoch(
    lengths: Sequence[int], batch_size: int, seed: int, epoch: int, shuffle: bool, length_bucketing: bool
) -> list[list[int]]:
    """The batches of one epoch as positions in the data; rows that do not fill a batch are left out.

    With length bucketing the prompts are sorted by length before they are cut into batches, and the batches are
    shuffled. Those left out are chosen before the sort: else the longest would never be seen.
    """
    random = np.random.default_rng([_SHUFFLE_PURPOSE, seed, epoch])
    order = random.permutation(len(lengths)).tolist() if shuffle else list(range(len(lengths)))
    num_batches = len(lengths) // batch_size
    order = order[: num_batches * batch_size]
    if length_bucketing:
        order.sort(key=lambda index: lengths[index])
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if length_bucketing and shuffle:
        batches = [batches[i] for i in random.permutation(num_batches)]
    return batches


def split_batches(prompts: Sequence[Prompt], batch_size: int | None) -> list[list[Prompt]]:
    """Every prompt exactly once, in order, `batch_size` at a time (None = all at once); the last may be smaller."""
    size = batch_size or max(len(prompts), 1)
    return [list(prompts[start : start + size]) for start in range(0, len(prompts), size)]
