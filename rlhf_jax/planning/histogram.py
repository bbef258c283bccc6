"""A sample of response lengths, from a file, and a batch that represents it.

    12              {"length": 12, "text": "..."}
    407             {"length": 407}

A line is the number of tokens of a response, EOS included: an integer, or a JSON object
with one as "length". A batch of B rows has the quantiles (i + 1/2)/B of the file, so
that it is the same every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.runs import parsing
from rlhf_jax.runs.parsing import Source

FIELD = "length"


def read(path: Path) -> tuple[int, ...]:
    """Reads the lengths of a file, in tokens, in increasing order.

    Raises:
      InputError: the file is missing or has no length, or a line has another form
        (names the line).
    """
    expected = "a file of lengths"
    advice = f"write one integer a line, or JSON objects with a field {FIELD!r}"
    text = parsing.read_text(path, expected=expected, advice=advice)
    lengths = [
        _length(line, where=f"{path}:{number}")
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not lengths:
        raise Source(str(path), expected, advice).refusal("an empty one")
    return tuple(sorted(lengths))


def spread(lengths: Sequence[int], *, rows: int) -> tuple[int, ...]:
    """The lengths of a batch: the quantiles (i + 1/2)/rows of increasing lengths."""
    count = len(lengths)
    return tuple(lengths[(2 * i + 1) * count // (2 * rows)] for i in range(rows))


def _length(line: str, *, where: str) -> int:
    expected = f"an integer of 1 or more tokens, or a JSON object with one as {FIELD!r}"
    source = Source(where, expected, "correct the line")
    value: Any = parsing.of_json(line, source)
    if isinstance(value, dict):
        value = value.get(FIELD)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise source.refusal(f"{line.strip()[:40]!r}")
    return value
