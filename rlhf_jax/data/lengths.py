"""Checks the lengths of encoded rows; errors name the rows that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlhf_jax.data.receipts import Receipt
from rlhf_jax.functional.checks import InputError

Overlong = Literal["error", "drop"]


def fits(
    lengths: Sequence[int],
    *,
    texts: Sequence[object],
    places: Sequence[str],
    max_length: int,
    overlong: Overlong,
    widest: int | None,
    more: str = "allow more",
    receipt: Receipt | None = None,
) -> list[int]:
    """Returns the indices of the rows that have at most `max_length` tokens.

    Args:
      lengths: tokens of each row.
      texts, places: the text of each row and its file and line, for errors.
      widest: tokens of the largest bucket or of a packed row; None is no such limit.
      more: what the errors advise to allow longer rows.
      receipt: records the rows that are left out.

    Raises:
      InputError: a row is too long, or no row fits.
    """
    fits = [i for i, length in enumerate(lengths) if length <= max_length]
    for row, length in enumerate(lengths):
        where = places[row]
        if overlong == "error":
            remedy = f"shorten it, {more}, or leave out what is too long by"
            remedy += " --overlong drop (in Python overlong='drop')"
            check(length, max_length, where=where, of=texts[row], remedy=remedy)
        if widest is not None and length <= max_length:
            holds = ", the largest bucket or the width of a packed row"
            remedy = "add a larger bucket, make rows wider, or remove the row"
            check(
                length, widest, where=where, holds=holds, of=texts[row], remedy=remedy
            )
        if receipt is not None and length > max_length:
            receipt.drop(f"longer than {max_length} tokens", where=where)
    if not fits:
        raise InputError(
            f"expected a row of at most {max_length} tokens, got {len(lengths)} rows,"
            f" the shortest with {min(lengths)}; {more}"
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
