"""A histogram of response lengths, from a file, and the batch that stands for it.

    12              {"length": 12, "text": "..."}
    407             {"length": 407}

A line is an integer, or a JSON object whose "length" is one: tokens of a response, EOS
included. The file is a sample: 240 lines are 240 responses. A batch of B rows has those
at the shares (i + 1/2)/B of the sorted file, so that it is the same every time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError

FIELD = "length"


def read(path: Path) -> tuple[int, ...]:
    """The lengths of a file in rising order, tokens.

    Raises:
      InputError: there is no such file, no length in it, or a line of another form;
        names the line.
    """
    lines, got = [], "which is empty"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        got = f"which cannot be read: {error}"
    lengths = [
        _length(line, where=f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not lengths:
        raise InputError(
            f"--lengths: expected a file of lengths, got {path}, {got}; write one "
            f"integer a line, or JSON objects with a field {FIELD!r}"
        )
    return tuple(sorted(lengths))


def spread(lengths: Sequence[int], *, rows: int) -> tuple[int, ...]:
    """The lengths of a batch: at the shares (i + 1/2)/rows of rising lengths."""
    count = len(lengths)
    return tuple(lengths[(2 * i + 1) * count // (2 * rows)] for i in range(rows))


def _length(line: str, *, where: str) -> int:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError:
        value = None
    if isinstance(value, dict):
        value = value.get(FIELD)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            f"{where}: expected an integer of 1 or more tokens, or a JSON object with "
            f"one as {FIELD!r}, got {line.strip()[:40]!r}; correct the line"
        )
    return value
