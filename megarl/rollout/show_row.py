"""`megarl data inspect`: one row of a data set as the model will see it."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from megarl.records import Prompt
from megarl.rollout.prompts import build_prompts
from megarl.rollout.rows import Row, load_rows
from megarl.rollout.tokenizer import load_tokenizer, stop_token_ids

_NO_LIMIT = 1 << 40


def run_inspect(
    file: str,
    row: int = 0,
    model: str | None = None,
    prompt_key: str = "prompt",
    chat_template: str | None = None,
    raw_prompt: bool = False,
) -> None:
    """Prints row number `row` of `file`; with a model folder also its text, ids and masks.

    Raises:
        ValueError: an unreadable file, a row that does not exist, or what `build_prompts` refuses.
    """
    rows = load_rows([file])
    if not 0 <= row < len(rows):
        raise ValueError(f"{file}: row {row} does not exist; it has {len(rows)} rows")
    parts: list[RenderableType] = [_show_fields(rows[row], f"{file}, row {row} of {len(rows)}")]
    if model is None:
        parts.append(Text("name a model folder to see the text, ids and masks that the model gets"))
    else:
        tokenizer = load_tokenizer(model)
        prompt = _build_one(rows[row], row, tokenizer, prompt_key, chat_template, raw_prompt, file)
        parts.append(inspect_row(prompt, tokenizer, stop_token_ids(model, tokenizer)))
    Console().print(Group(*parts))


def inspect_row(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...] = (), max_tokens: int = 64
) -> RenderableType:
    """The text, ids and masks of a prompt, and what the reward function is given.

    Args:
        prompt: as `build_prompts` made it.
        stop_ids: ids that end an answer.
        max_tokens: rows of the table; of a longer prompt the middle is left out.
    """
    count = len(prompt.token_ids)
    table = Table("position", "id", "token", "response_mask", title=f"{count} prompt tokens")
    head = count if count <= max_tokens else max_tokens // 2
    tail = count if count <= max_tokens else count - (max_tokens - head)
    for position, token_id in enumerate(prompt.token_ids):
        if position < head or position >= tail:
            token = Text(repr(tokenizer.decode([token_id])))
            table.add_row(str(position), str(token_id), token, "False")
        elif position == head:
            table.add_row("...", "...", Text(f"{tail - head} more"), "False")
    stops = ", ".join(f"{i} {tokenizer.decode([i])!r}" for i in stop_ids)
    table.add_row(f"{count} ...", "", Text(f"the answer; ended by {stops or 'the length limit'}"), "True")
    reward = Table("the reward function gets", "value", show_lines=True)
    for name in ("data_source", "ground_truth", "extra_info"):
        reward.add_row(name, Text(_as_text(getattr(prompt, name))))
    return Group(Panel(Text(prompt.text), title="what the model reads"), table, reward)


def _build_one(
    row: Row,
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    prompt_key: str,
    chat_template: str | None,
    raw_prompt: bool,
    origin: str,
) -> Prompt:
    prompts, _ = build_prompts(
        [row],
        tokenizer,
        max_prompt_length=_NO_LIMIT,
        prompt_key=prompt_key,
        chat_template=chat_template,
        raw_prompt=raw_prompt,
        origin=f"{origin} (row {index})",
    )
    return prompts[0]


def _show_fields(row: Row, title: str) -> RenderableType:
    table = Table("column", "value", title=title, show_lines=True)
    for name, value in row.items():
        table.add_row(str(name), Text(_as_text(value)))
    return table


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
