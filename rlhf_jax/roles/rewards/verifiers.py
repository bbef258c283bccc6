"""Verifiers: compare a response with a known right answer.

    verify(prompt, response, row) -> float      1 if the response is right, else 0

`row` has every field of the user's data, including the right answer. `each` turns a
verifier into a function for `rewards.TextReward`; `verification/pool.py` runs it in
other processes, which import this module, so it must not import JAX.

    reward = rewards.TextReward(verifiers.each(verifiers.Gsm8k()), decode, rows)

Numbers are compared as decimals: 1,000 is 1000.00, and $0.30 is 0.3 exactly.
"""

from __future__ import annotations

import dataclasses
import decimal
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    runtime_checkable,
)

from rlhf_jax.functional import errors
from rlhf_jax.functional.errors import InputError

if TYPE_CHECKING:
    from rlhf_jax.roles.rewards.text import TextFunction

Decimal = decimal.Decimal
Row = Mapping[str, Any]  # one row of the user's data
TAKES = ("prompt", "response", "row")  # arguments of a verifier
Verifier = Callable[[str, str, Row], float]

MARKER = "####"  # precedes the answers of GSM8K

_NUMBER = re.compile(
    # A minus after a word, a digit or a bracket is between two numbers: 5-3. A minus
    # before a blank is a sign only after = or :.
    r"(?:(?<=[=:])[^\S\n]*(?P<first>[-−–])[^\S\n]+"
    r"|(?<![\w)\]}%])(?P<minus>[-−–])|\+)?"
    r"(?:\\?[$€£¥₹][^\S\n]?(?P<inner>[-−–])?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"|(?<![\w.])\.[0-9]+)"
    r"(?P<over>\s*/\s*[0-9][0-9,.]*)?"
)
# Rejects text after a number that makes it another one: 1,2345 or 1.2.3 or 1e5.
_WHOLE = re.compile(
    rf"[\s*]*(?:(?P<lead>[-−–])[^\S\n]+)?{_NUMBER.pattern}"
    r"(?![.,]?[0-9]|[eE][-+]?[0-9]|\s*[\^×÷⁄]|[^\S\n]+[0-9]"
    r"|[^\S\n]*(?:[-−–+*·:/x_'’]|\*\*)[^\S\n]*\(?[0-9])"
)


@runtime_checkable
class Readable(Protocol):
    """A verifier that can check the data before a run."""

    def gold(self, row: Row) -> Any:
        """The right answer of this row; ValueError if it has none."""


@runtime_checkable
class Answering(Protocol):
    """A verifier that can extract the answer from a response."""

    def answer(self, response: str) -> str | None:
        """The answer in normal form, equal for equal answers; None without any."""


class Judged(NamedTuple):
    """The score of a verifier, and further numbers that it counts."""

    score: float
    counts: Mapping[str, float]
    """By name; their means are logged as reward/NAME."""


@runtime_checkable
class Counting(Protocol):
    """A verifier that returns further numbers besides its score."""

    counts: Sequence[str]
    """The names of these numbers."""

    def judge(self, prompt: str, response: str, row: Row, /) -> Judged:
        """The score of a response, and a number for each of `counts`."""
        ...


def judged(verifier: Verifier, prompt: str, response: str, row: Row) -> Judged:
    """Runs a verifier on a response; `counts` is empty if it counts nothing."""
    if isinstance(verifier, Counting):
        return verifier.judge(prompt, response, row)
    return Judged(verifier(prompt, response, row), {})


def counted(verifier: Verifier | None) -> tuple[str, ...]:
    """The names of the numbers that a verifier counts; () if it counts none."""
    return tuple(verifier.counts) if isinstance(verifier, Counting) else ()


@runtime_checkable
class Isolating(Protocol):
    """A verifier or an environment that runs code written by a model."""

    def isolated(self, *, unsafe: bool) -> Any:
        """Checks it and returns it; InputError without isolation, unless `unsafe`."""


def each(verifier: Verifier) -> TextFunction:
    """(prompts, responses, rows) -> one number per response, for `TextReward`."""

    def scored(
        prompts: list[str], responses: list[str], rows: list[Row]
    ) -> list[float]:
        texts = zip(prompts, responses, rows, strict=True)
        return [verifier(*one) for one in texts]

    return scored


def check_answers(located: Iterable[tuple[str, Row]], *, verifier: Readable) -> None:
    """Reads the right answer of every row, before a run; a ValueError names the row."""
    for where, row in located:
        with errors.located(where, ValueError):
            verifier.gold(row)


@dataclasses.dataclass(frozen=True)
class LastInteger:
    """1 if the last number in the response is the integer in the row's `field`.

    Text before that number is ignored. 12, 12. and 12.0 are the integer 12, 1,200 is
    1200, and the 3 of 5-3 is 3; 12.5 and the fraction 6/4 are not integers.
    """

    field: str = "answer"
    """Field of the row with the right answer, an integer or its text."""

    def __call__(self, prompt: str, response: str, row: Row) -> float:
        return float(last_number(response) == self.gold(row))

    def answer(self, response: str) -> str | None:
        """The last number in the response; None without any."""
        return _plain(last_number(response))

    def gold(self, row: Row) -> Decimal:
        """The integer; ValueError if there is none."""
        return _gold_in(row, self.field, expected="an integer in", read=_integer)


@dataclasses.dataclass(frozen=True)
class ExactMatch:
    """1 if the response is the text in the row's `field`."""

    field: str = "answer"
    """Field of the row with the right answer."""
    ignore_space: bool = True
    """Whether white space at either end is ignored, and any other is one blank."""
    ignore_case: bool = False
    """Whether capitals equal small letters."""

    def __call__(self, prompt: str, response: str, row: Row) -> float:
        return float(self._normal(response) == self.gold(row))

    def answer(self, response: str) -> str | None:
        """The response, normalised; None if it is empty."""
        return self._normal(response) or None

    def gold(self, row: Row) -> str:
        """The text, normalised; ValueError if there is none."""
        return self._normal(_text_in(row, self.field))

    def _normal(self, text: str) -> str:
        text = " ".join(text.split()) if self.ignore_space else text
        return text.casefold() if self.ignore_case else text


@dataclasses.dataclass(frozen=True)
class Matches:
    r"""1 if a regular expression matches in the response.

    With `field`, 1 if group 1 of its last match is the text of this field of the row:
    `Matches(r"\\boxed\{([^{}]*)\}", field="answer")`.

    Raises:
      InputError: the pattern is invalid, or has no group to compare with the field.
    """

    pattern: str
    """Pattern of Python's `re`; ^ and $ match at lines, . matches any character."""
    field: str | None = None
    """Field of the row that group 1 must equal, except for white space around it; None
    accepts any match."""

    def __post_init__(self) -> None:
        try:
            groups = self._compiled().groups
        except re.error as error:
            raise InputError(
                f"pattern: expected a regular expression, got {self.pattern!r} "
                f"({error}); mend it"
            ) from None
        if self.field is not None and not groups:
            raise InputError(
                f"pattern: expected a group (...) to compare with {self.field!r}, got "
                f"{self.pattern!r}; put one around the answer"
            )

    def __call__(self, prompt: str, response: str, row: Row) -> float:
        matches = list(self._compiled().finditer(response))
        gold = self.gold(row)
        if not matches or gold is None:
            return float(bool(matches))
        return float((matches[-1][1] or "").strip() == gold)

    def gold(self, row: Row) -> str | None:
        """The text that group 1 must hold, if any; ValueError if the row has none."""
        return None if self.field is None else _text_in(row, self.field).strip()

    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Gsm8k:
    """1 if the one number after the response's last #### is that of the row.

    Separators, signs, decimals, currency and a final dot are read as people mean them:
    "#### $1,000." is 1000. Anything but one number ("#### about 5", 1/2, 2 + 3, 12:30)
    is wrong, and so are two numbers in the line ("72 or 73"). Words after the number
    are ignored: "5 apples" is 5, and so is "5 million".

    Source: Cobbe et al. 2021, arXiv:2110.14168; openai/grade-school-math.
    """

    field: str = "answer"
    """Field of the row with a worked answer that ends in `#### n`."""
    unmarked: Literal["wrong", "last_number"] = "wrong"
    """How to read a response without ####: it is wrong, or its last number counts (for
    models that were not trained on this form)."""

    def __call__(self, prompt: str, response: str, row: Row) -> float:
        return float(self._number(response) == self.gold(row))

    def answer(self, response: str) -> str | None:
        """The number that counts in the response; None without any."""
        return _plain(self._number(response))

    def gold(self, row: Row) -> Decimal:
        """The number after the last ####; ValueError if there is none."""
        expected = f"{MARKER} and a number at the end of"
        return _gold_in(row, self.field, expected=expected, read=_marked_number)

    def _number(self, response: str) -> Decimal | None:
        _, marker, answer = response.rpartition(MARKER)
        if not marker and self.unmarked == "last_number":
            return last_number(response)
        match = _WHOLE.match(answer) if marker else None
        if match is None or _NUMBER.search(answer[match.end() :].partition("\n")[0]):
            return None
        return _value(match)


def number(text: str) -> Decimal | None:
    """Reads a text that is one number, as people write it: -$1,234.50 or 12."""
    match = _NUMBER.fullmatch(text.strip().removesuffix("."))
    return None if match is None else _value(match)


def last_number(text: str) -> Decimal | None:
    """The last number in a text; None without any, or if it is a fraction like 1/2."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _value(last)


def _plain(value: Decimal | None) -> str | None:
    """Writes a number in normal form: 12.50 is 12.5, -0 is 0."""
    if value is None:
        return None
    digits = f"{value:f}"
    if "." in digits:
        digits = digits.rstrip("0").removesuffix(".")
    return "0" if value == 0 else digits


def _value(match: re.Match[str]) -> Decimal | None:
    if match["over"]:
        return None
    size = Decimal(match["digits"].replace(",", ""))
    signs = ("minus", "first", "inner", "lead")
    negative = any(match.groupdict().get(sign) for sign in signs)
    return size.copy_negate() if negative else size  # -size would round


def _text_in(row: Row, field: str) -> str:
    return _gold_in(
        row,
        field,
        expected="a text in",
        read=lambda gold: gold if isinstance(gold, str) and gold.strip() else None,
    )


def _gold_in(row: Row, field: str, *, expected: str, read: Callable[[Any], Any]) -> Any:
    """Applies `read` to a field of the row; ValueError if it returns None."""
    if field not in row:
        raise ValueError(
            f"expected a field {field!r}, got {', '.join(map(repr, row))}; add it, or "
            f"name the field that holds the answer"
        )
    value = read(row[field])
    if value is None:
        gold = row[field][-60:] if isinstance(row[field], str) else row[field]
        raise ValueError(
            f"expected {expected} {field!r}, got {gold!r:.80}; correct it, or remove "
            f"the row"
        )
    return value


def _integer(gold: Any) -> Decimal | None:
    # True is an int to Python.
    plain = isinstance(gold, int | float | str) and not isinstance(gold, bool)
    value = number(str(gold)) if plain else None
    whole = value is not None and value == value.to_integral_value()
    return value if whole else None


def _marked_number(gold: Any) -> Decimal | None:
    if not isinstance(gold, str) or MARKER not in gold:
        return None
    return number(gold.rpartition(MARKER)[2])
