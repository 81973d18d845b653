"""Rule functions that judge an answer by its text, all with the signature that users of verl know:

    (data_source, solution_str, ground_truth, extra_info, **kwargs) -> a number, or {"score": number, other metrics}

Numbers are compared exactly, as decimals: 3 = 3.0 = 3.00, 1,234 = 1234, and 1000001 is not 1000000.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

# A minus is a sign only where no word or number stands before it: "5-9" ends in 9, "x=-9" in -9.
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\w))?")
_AFTER_MARK = re.compile(r"####\s*(-?\$?-?[0-9][0-9.,]*)")
_CLOSING = " \t\r\n.!*`_$)]}\"'"  # what may follow a final number without spoiling the form


def numeric(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    format_score: float = 0.1,
) -> dict[str, float]:
    """Compares the last number of the answer with the ground truth.

    Returns:
        score: 1 when equal; `format_score` when not, but the answer ends with a number; else 0.
        accuracy: 1 or 0. format: 1 when the answer ends with a number, else 0.

    Raises:
        ValueError: the ground truth is not a number.
    """
    expected = _read_expected(ground_truth)
    text = solution_str.replace("\u2212", "-")
    found = list(_NUMBER.finditer(text))
    is_right = bool(found) and read_number(found[-1].group()) == expected
    has_form = bool(found) and not text[found[-1].end() :].strip(_CLOSING)
    score = 1.0 if is_right else format_score if has_form else 0.0
    return {"score": score, "accuracy": float(is_right), "format": float(has_form)}


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "strict",
    format_score: float = 0.0,
) -> dict[str, float]:
    """Judges an answer in the form of GSM8K, whose last line is `#### 42`.

    Args:
        ground_truth: the number, or a whole GSM8K solution that ends with `#### 42`.
        method: "strict" reads the number after the last `####`; "flexible" the last number anywhere.
        format_score: the score of a wrong answer that has the form.

    Returns:
        score, accuracy, and format: 1 when a number was found by `method`.

    Raises:
        ValueError: an unknown method, or a ground truth that holds no number.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"reward.kwargs.method={method!r} is not one of strict, flexible")
    marked = _AFTER_MARK.findall(str(ground_truth))
    expected = _read_expected(marked[-1] if marked else ground_truth)
    pattern = _AFTER_MARK if method == "strict" else _NUMBER
    found = [read_number(match) for match in pattern.findall(solution_str.replace("\u2212", "-"))]
    has_form = bool(found) and found[-1] is not None
    is_right = has_form and found[-1] == expected
    score = 1.0 if is_right else format_score if has_form else 0.0
    return {"score": score, "accuracy": float(is_right), "format": float(has_form)}


BY_DATA_SOURCE: dict[str, Callable[..., dict[str, float]]] = {"openai/gsm8k": gsm8k}
"""The rule of a row by its `data_source`; any other row is judged by `numeric`."""


def by_data_source(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """Judges each answer by the rule of its row's data source, as `BY_DATA_SOURCE` has it.

    Returns, raises: as that rule, which is given `kwargs`.
    """
    return BY_DATA_SOURCE.get(data_source, numeric)(data_source, solution_str, ground_truth, extra_info, **kwargs)


RULES: dict[str, Callable[..., dict[str, float]]] = {
    "numeric": numeric,
    "gsm8k": gsm8k,
    "by_data_source": by_data_source,
}


def read_number(text: str) -> Decimal | None:
    """The number that `text` writes (commas, a dollar sign and a final point are allowed), or None when it is none."""
    try:
        value = Decimal(text.strip().replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _read_expected(ground_truth: Any) -> Decimal:
    value = read_number(str(ground_truth))
    if value is None:
        raise ValueError(f"ground_truth={ground_truth!r} is not a number")
    return value
