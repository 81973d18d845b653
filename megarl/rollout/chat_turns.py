"""How a chat goes on after an answer, in tokens, without ever rendering the answer again.

What the engine sampled stays as it is; only what comes between two turns is taken from the chat template. A stand-in
answer is rendered with the observation behind it, and the text after the stand-in is what the template would write:

    rendered        <u> 2+3? <a> MARK </s> <u> 5 <a>
    sampled                      x y </s>
    put behind it                         <u> 5 <a>        (the engine sampled the end of the answer itself)

Some templates leave the thinking of earlier turns out when a chat goes on. Trained token in, token out, the policy
would see its thoughts of earlier turns, and when it is used through the template it would not: such templates are found
before anything is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

MARK = "MEGARL7STAND9IN"  # no template writes this itself
THOUGHT = "MEGARL3THOUGHT5"
QUESTION = {"role": "user", "content": "Question"}


@dataclass(frozen=True)
class ChatTurns:
    """A tokenizer and the chat template in use (None = the tokenizer's own)."""

    tokenizer: Any
    template: str | None = None

    def encode_observation(self, messages: Sequence[Mapping[str, str]], answer_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens between an answer and the next one.

        Args:
            messages: what the environment says, one message or more.
            answer_ids: the sampled tokens of the turn before; the last one ended it.

        Raises:
            ValueError: the template refuses these messages.
        """
        rendered = self.render([QUESTION, {"role": "assistant", "content": MARK}, *map(dict, messages)], True)
        _, mark, rest = rendered.rpartition(MARK)
        if not mark:
            raise ValueError(f"the chat template loses an earlier answer when {messages[0]['role']!r} speaks after it")
        ids = tuple(self.tokenizer(rest, add_special_tokens=False)["input_ids"])
        if not answer_ids or answer_ids[-1] not in ids:
            return ids
        closing = ids.index(answer_ids[-1])  # the template ends the answer too: not twice
        is_next = not self.tokenizer.decode(ids[:closing]).strip()
        return ids[closing + 1 :] if is_next else ids

    def strips_thinking(self, role: str) -> bool:
        """Whether the template leaves out what the policy thought, once a message of `role` follows.

        Raises:
            ValueError: the template knows no such role.
        """
        thinking = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{MARK}"}
        return THOUGHT not in self.render([QUESTION, thinking, {"role": role, "content": "Observation"}], True)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The text that the template makes of a chat. Raises ValueError when it refuses."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error


def check_thinking(turns: ChatTurns, roles: Sequence[str], allow_stripped: bool) -> list[str]:
    """What a user must know about the template, before anything is generated.

    Args:
        roles: who speaks after an answer.
        allow_stripped: go on with a template that strips thinking; the notes say what that means.

    Returns:
        Notes to print.

    Raises:
        ValueError: the template strips thinking and that is not allowed, or it does not know a role.
    """
    stripped = [role for role in roles if turns.strips_thinking(role)]
    if not stripped:
        return []
    note = (
        f"the chat template drops the <think>...</think> of earlier answers when {' or '.join(stripped)} speaks after "
        f"them; training keeps them, so the policy would be used on other contexts than it was trained on"
    )
    if allow_stripped:
        return [note]
    raise ValueError(
        f"{note}; set data.chat_template to a template that keeps them, or "
        f"rollout.multi_turn.allow_stripped_thinking=true if your policy does not think"
    )
