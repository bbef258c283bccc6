"""Three rewards: the right number in the required form, and each of the two alone.

    --rewards correct=function:experiments.studies.smollm2.rewards:correct ...

A row has `form`, a regular expression for the whole response whose group 1 is the
number, and `answer`, the right number. With the form `17 \\+ 25 = (NUMBER)` and 42:

    response              correct   format   arithmetic
    17 + 25 = 42             1         1         1
    17 + 25 = 52             0         1         0
    The sum is 42.           0         0         1
    17 + 25 = 42 or 52       0         0         1

So arithmetic - correct is the share of right numbers in another form, and
format - correct that of wrong numbers in the required form. A text with many numbers
may contain the right one by chance, so arithmetic is an upper bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_jax.roles.rewards.verifiers import number

Row = Mapping[str, Any]
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"  # answers of both tasks are not negative
# A complete number in the text, not the end of 3.5, 1,234 or -42.
_NUMBERS = re.compile(rf"(?<![\d.,-]){NUMBER}")


def correct(
    prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Row]
) -> list[float]:
    """1 for a response in the required form with the right number, else 0."""
    del prompts
    return [
        float(match is not None and _equal(match[1], row))
        for match, row in zip(_matches(responses, rows), rows, strict=True)
    ]


def in_form(
    prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Row]
) -> list[float]:
    """1 for a response in the required form, with any number, else 0."""
    del prompts
    return [float(match is not None) for match in _matches(responses, rows)]


def arithmetic(
    prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Row]
) -> list[float]:
    """1 for a response that contains the right number, else 0."""
    del prompts
    return [
        float(any(_equal(text, row) for text in _NUMBERS.findall(response)))
        for response, row in zip(responses, rows, strict=True)
    ]


def _matches(
    responses: Sequence[str], rows: Sequence[Row]
) -> list[re.Match[str] | None]:
    return [
        re.fullmatch(row["form"], response.strip(), re.DOTALL)
        for response, row in zip(responses, rows, strict=True)
    ]


def _equal(text: str, row: Row) -> bool:
    """Whether a text is the right number."""
    value = number(text)
    return value is not None and value == number(row["answer"])
