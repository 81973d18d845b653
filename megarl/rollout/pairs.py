"""Answers that somebody preferred, and answers labelled good or bad, from rows of data.

    {"prompt": "2+3?", "chosen": "5", "rejected": "6"}                       a pair
    {"chosen": [user message, assistant message], "rejected": [...]}         a pair; the prompt is what comes before
    {"prompt": "2+3?", "completion": "5", "label": true}                     a labelled answer (KTO)

An answer is encoded as it is and ends with the tokenizer's EOS, as an answer that the engine draws does. A pair serves
where labelled answers are asked for: its chosen answer is a good one, its rejected answer a bad one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.records import PackedBatch, Prompt, Rollout, pack_rollouts
from megarl.rollout.prompts import build_prompts
from megarl.rollout.rows import Row


@dataclass(frozen=True)
class Example:
    """A prompt with its judged answers: (chosen, rejected) of a pair, or one labelled answer."""

    prompt: Prompt
    answers: tuple[tuple[int, ...], ...]
    is_desirable: tuple[bool, ...]


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are read."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    completion: str = "completion"
    label: str = "label"


def build_examples(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    columns: Columns,
    *,
    is_pairwise: bool,
    max_prompt_length: int,
    max_response_length: int,
    overlong: str = "error",
    chat_template: str | None = None,
    raw_prompt: bool = False,
    origin: str = "the data",
) -> list[Example]:
    """Renders and encodes every row.

    Args:
        is_pairwise: every row must be a pair.
        max_response_length: longer answers are an error, or dropped with their row, or cut, as `overlong` says.
        others: see `build_prompts`.

    Raises:
        ValueError: rows without the columns, answers without text, over-long ones with "error".
    """
    prompts, _ = build_prompts(
        [_with_prompt(row, columns) for row in rows],
        tokenizer,
        max_prompt_length=max_prompt_length,
        overlong=overlong,
        prompt_key=columns.prompt,
        chat_template=chat_template,
        raw_prompt=raw_prompt,
        origin=origin,
    )
    examples: list[Example] = []
    for prompt in prompts:
        where = f"{origin}: row {prompt.row}"
        texts = _read_answers(rows[prompt.row], columns, is_pairwise, where)
        answers = [_encode_answer(text, tokenizer) for text, _ in texts]
        longest = max(len(answer) for answer in answers)
        if longest > max_response_length:
            if overlong == "error":
                raise ValueError(
                    f"{where}: an answer has {longest} tokens, more than data.max_response_length="
                    f"{max_response_length}; raise it, or set data.overlong_prompts to filter, left or right"
                )
            if overlong == "filter":
                continue
        cut = tuple(answer[:max_response_length] for answer in answers)
        examples.append(Example(prompt, cut, tuple(is_good for _, is_good in texts)))
    return examples


def pack_examples(examples: Sequence[Example]) -> PackedBatch:
    """The answers of all examples, packed behind their prompts in the order given; a pair lies chosen, then rejected.

    `group` counts the examples, so that the answers to one prompt share its tokens.
    """
    rollouts = [
        Rollout(index, sample, answer, (0.0,) * len(answer), is_finished=True, weights_version=0)
        for index, example in enumerate(examples)
        for sample, answer in enumerate(example.answers)
    ]
    return pack_rollouts([example.prompt for example in examples], rollouts)


def mismatch_examples(examples: Sequence[Example]) -> list[Example]:
    """Each prompt with the answers of the next example: what KTO estimates its baseline from."""
    return [
        Example(example.prompt, following.answers, following.is_desirable)
        for example, following in zip(examples, [*examples[1:], *examples[:1]], strict=True)
    ]


def _with_prompt(row: Row, columns: Columns) -> Row:
    """The row with a prompt, which may be the messages before the last one of the chosen answer."""
    chosen = row.get(columns.chosen)
    if row.get(columns.prompt) is None and isinstance(chosen, Sequence) and not isinstance(chosen, str):
        return {**row, columns.prompt: list(chosen[:-1])}
    return row


def _read_answers(row: Row, columns: Columns, is_pairwise: bool, where: str) -> list[tuple[str, bool]]:
    """(text, is it a good answer) of each answer of a row."""
    if row.get(columns.chosen) is not None and row.get(columns.rejected) is not None:
        return [
            (_read_text(row[columns.chosen], where, columns.chosen), True),
            (_read_text(row[columns.rejected], where, columns.rejected), False),
        ]
    if is_pairwise:
        raise ValueError(
            f"{where} has no pair in {columns.chosen!r} and {columns.rejected!r}; its columns are "
            f"{', '.join(map(str, row))}; set preference.chosen_key and preference.rejected_key"
        )
    label = row.get(columns.label)
    if row.get(columns.completion) is None or not isinstance(label, bool):
        raise ValueError(
            f"{where} has neither a pair nor an answer in {columns.completion!r} with true or false in "
            f"{columns.label!r}; its columns are {', '.join(map(str, row))}; set preference.completion_key or label_key"
        )
    return [(_read_text(row[columns.completion], where, columns.completion), label)]


def _read_text(value: Any, where: str, key: str) -> str:
    """An answer as text, or the last of some chat messages."""
    if isinstance(value, str):
        return value
    last = value[-1] if isinstance(value, Sequence) and value else None
    if isinstance(last, Mapping) and last.get("role") == "assistant" and isinstance(last.get("content"), str):
        return str(last["content"])
    raise ValueError(f"{where}: {key!r} must hold text, or chat messages that end with the assistant's")


def _encode_answer(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert isinstance(tokenizer.eos_token_id, int), "the tokenizer names no EOS token to end an answer with"
    return (*ids, tokenizer.eos_token_id)
