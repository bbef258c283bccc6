"""Lengths of encoded rows: which fit, and an error that names those that do not."""

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
    """Which of `lengths` are at most `max_length`; none of these may be wider.

    Args:
      more: how a row may be longer, for the errors.
      receipt: is told of the rows that are left out.
    """
    fits = [i for i, length in enumerate(lengths) if length <= max_length]
    if overlong == "error" and len(fits) < len(lengths):
        row = next(i for i, length in enumerate(lengths) if length > max_length)
        raise InputError(
            f"{places[row]}: expected at most {max_length} tokens, got {lengths[row]}"
            f" of {texts[row]!r:.60}; shorten it, {more}, or leave out what is too"
            " long with overlong='drop'"
        )
    if not fits:
        raise InputError(
            f"expected a row of at most {max_length} tokens, got {len(lengths)} rows,"
            f" the shortest with {min(lengths)}; {more}"
        )
    for row in fits:
        if widest is not None and lengths[row] > widest:
            raise InputError(
                f"{places[row]}: expected at most {widest} tokens, the largest bucket"
                f" or the width of a packed row, got {lengths[row]} of"
                f" {texts[row]!r:.60}; add a larger bucket, make rows wider, or remove"
                " the row"
            )
    if receipt is not None:
        for place, length in zip(places, lengths, strict=True):
            if length > max_length:
                receipt.drop(f"longer than {max_length} tokens", where=place)
    return fits
