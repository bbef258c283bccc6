"""Limits on the tokens of rows; errors name the rows that are too long."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from rlhf_jax.data.receipts import Receipt
from rlhf_jax.functional.checks import InputError

Overlong = Literal["error", "drop"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most tokens of a row, and what becomes of longer rows."""

    max_length: int
    """Most tokens of a row, prompt and response together."""
    overlong: Overlong = "error"
    """Whether a longer row is an error or left out."""
    widest: int | None = None
    """Tokens of the largest bucket or of a packed row; None is no such limit. A row
    beyond it is an error."""
    more: str = "allow more"
    """What errors advise to allow longer rows."""

    def fitting(
        self,
        lengths: Sequence[int],
        *,
        texts: Sequence[object],
        places: Sequence[str],
        receipt: Receipt | None = None,
    ) -> list[int]:
        """Returns the indices of the rows that have at most `max_length` tokens.

        Args:
          lengths: tokens of each row.
          texts, places: the text of each row and its file and line, for errors.
          receipt: records the rows that are left out.

        Raises:
          InputError: a row is too long, or no row fits.
        """
        longest, widest = self.max_length, self.widest
        fits = [i for i, length in enumerate(lengths) if length <= longest]
        for length, where, of in zip(lengths, places, texts, strict=True):
            if self.overlong == "error":
                remedy = f"shorten it, {self.more}, or leave out what is too long by"
                remedy += " --overlong drop (in Python overlong='drop')"
                check(length, longest, where=where, of=of, remedy=remedy)
            if widest is not None and length <= longest:
                holds = ", the largest bucket or the width of a packed row"
                remedy = "add a larger bucket, make rows wider, or remove the row"
                check(length, widest, where=where, holds=holds, of=of, remedy=remedy)
            if receipt is not None and length > longest:
                receipt.drop(f"longer than {longest} tokens", where=where)
        if not fits:
            raise InputError(
                f"expected a row of at most {longest} tokens, got {len(lengths)} rows,"
                f" the shortest with {min(lengths)}; {self.more}"
            )
        return fits


def check(
    length: int,
    most: int,
    *,
    where: str,
    remedy: str,
    holds: str = "",
    of: object = None,
) -> None:
    """Raises InputError if `length` exceeds `most` tokens.

    Args:
      where: file and line of the row.
      holds: ", " and what has no room for more tokens, or "".
      of: the text of the tokens; None if there is none.
    """
    if length > most:
        got = f"{length} of {of!r:.60}" if of is not None else f"{length}"
        raise InputError(
            f"{where}: expected at most {most} tokens{holds}, got {got}; {remedy}"
        )


def check_prompt(prompt: Sequence[int], *, where: str, of: object = None) -> None:
    """Raises InputError for an empty prompt, which cannot predict a response."""
    if len(prompt) == 0:
        got = "none" if of is None else f"none of {of!r:.60}"
        raise InputError(
            f"{where}: expected a prompt of at least 1 token, got {got}; remove the row"
        )
