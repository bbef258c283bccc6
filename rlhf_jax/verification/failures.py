"""Failures of a batch, as one line per kind: a broken tool fails in every row."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

_NUMBER = re.compile(r"\d+")


class Failure(NamedTuple):
    """Why a call of the user's code has no result."""

    why: str  # "raised KeyError: 'gold'"
    where: str  # "prompt 'Hi' (row 3) and response 'Yo'"

    @property
    def kind(self) -> str:
        """The same for failures that differ in their numbers, or in what they name."""
        return _NUMBER.sub("N", self.why.partition(":")[0])


def warn(failures: Iterable[Failure], *, num_rows: int, rows: str, of: str) -> None:
    """Prints one line per kind of failure on standard error, with the first of each.

    Args:
      num_rows: of the batch.
      rows: what they are and what becomes of them, as "responses were left out".
      of: what failed, as "verifier".
    """
    kinds: dict[str, list[Failure]] = {}
    for failure in failures:
        kinds.setdefault(failure.kind, []).append(failure)
    for alike in kinds.values():
        why, where = alike[0]
        print(
            f"warning: {len(alike)} of {num_rows} {rows}; the {of} {why} for {where}",
            file=sys.stderr,
        )
