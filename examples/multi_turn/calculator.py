"""A calculator as an environment: the policy writes `<calc>412+389</calc>` and reads `801` in the next turn.

An episode ends with a turn that calls nothing: its last number is the answer. Reward: 1 for the right answer, and
`call_bonus` once, for a call that works, so that a policy that has never used the tool finds out that it pays.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from megarl.records import Prompt
from megarl.reward.rules import numeric
from megarl.rollout.environment import Step

CALL = re.compile(r"<calc>([^<>]*)</calc>")
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
MAX_LENGTH = 64  # characters of an expression: what a policy writes must not cost time or memory
MAX_DIGITS = 12


class Calculator:
    """One episode's calculator."""

    def __init__(self, call_bonus: float = 0.2) -> None:
        self.call_bonus = call_bonus

    def reset(self, prompt: Prompt) -> None:
        """Begins the episode."""
        self.ground_truth = prompt.ground_truth
        self.has_called = False

    def step(self, answer: str) -> Step:
        """Runs the first call of a turn, or judges a turn without one."""
        call = CALL.search(answer)
        if call is None:
            return Step(reward=numeric("", answer, self.ground_truth)["accuracy"], is_done=True)
        value = calculate(call.group(1))
        if value is None:
            return Step("That is no sum I can work out.")
        bonus = 0.0 if self.has_called else self.call_bonus
        self.has_called = True
        return Step(str(value), reward=bonus)


def calculate(text: str) -> int | None:
    """The value of an expression of whole numbers with + - *; None for anything else."""
    if len(text) > MAX_LENGTH:
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and len(str(node.value)) <= MAX_DIGITS:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{type(node).__name__} is not arithmetic")
