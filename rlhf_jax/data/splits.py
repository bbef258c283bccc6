"""Splits rows into training and held-out rows that share no prompt.

    prompts    a b a c d b      one drawn prompt, b
    held out     b       b
    trained    a   a c d

Responses to one prompt are alike, so the loss on further responses to a trained prompt
says little about new prompts. The prompt of a row is everything before the first
learned response, compared by its token ids if it is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from rlhf_jax.data import digests
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError

if TYPE_CHECKING:
    from rlhf_jax.data.receipts import Receipt

Item = TypeVar("Item")
ONE_PROMPT = "rows of one prompt, of which none is held out"


def hold_out(
    rows: Sequence[Item],
    *,
    share: float,
    seed: int,
    by: Literal["prompt", "row"] = "prompt",
    unprompted: Sequence[int] = (),
    receipt: Receipt | None = None,
    instead: str = "",
) -> tuple[list[Item], list[Item]]:
    """Returns (rows to train on, rows held out), each in the order of `rows`.

    Prompts are drawn at random. One is held out, with all its rows, if that brings the
    number of held-out rows nearer to `share` of all rows. At least one prompt is held
    out and at least one is trained on; rows with a single prompt are all trained on.
    The time is linear in the tokens of the prompts.

    Args:
      rows: records with a `prompt` of tokens, rows of a file with a field "prompt", or
        the prompts themselves. Each row without a prompt is a prompt of its own.
      share: fraction of the rows to hold out; 0 is none.
      seed: of the draw. If no prompt is shared, the rows held out are the first of
        `numpy.random.default_rng(seed).permutation(len(rows))`.
      by: "row" draws single rows, whatever their prompts.
      unprompted: tokens of a prompt without text, such as BOS; rows with this prompt
        count as rows without one.
      receipt: notes that no row is held out because all rows have one prompt.
      instead: what that note advises to do.

    Raises:
      InputError: share is not in [0, 1), or no row is left to train on.
    """
    checks.within(
        least=0,
        below=1,
        advice="choose a share of the rows, such as 0.1",
        **{"share to hold out": share},
    )
    if not share:
        return list(rows), []
    count = max(round(share * len(rows)), 1)
    if count >= len(rows):
        raise InputError(
            f"expected rows to train on beside {count} held out, got {len(rows)} in "
            "all; hold out a smaller share or none, or give more rows"
        )
    numbers = [*range(len(rows))]
    if by == "prompt":
        numbers = _numbers(rows, unprompted=unprompted)
    sizes = np.bincount(numbers)
    if len(sizes) == 1:
        if receipt is not None:
            reason = f"{ONE_PROMPT}; {instead}" if instead else ONE_PROMPT
            receipt.note(reason, count=len(rows))
        return list(rows), []
    order = np.random.default_rng(seed).permutation(len(sizes))
    drawn = _drawn(sizes[order].tolist(), num_rows=share * len(rows))
    apart = np.zeros(len(sizes), bool)
    apart[order[drawn]] = True
    sides: tuple[list[Item], list[Item]] = ([], [])
    for row, held_out in zip(rows, apart[numbers].tolist(), strict=True):
        sides[held_out].append(row)
    return sides


def by_prompt(rows: Sequence[Item]) -> list[list[Item]]:
    """Groups rows by their prompts, in the order of the prompts' first rows."""
    groups: dict[int, list[Item]] = {}
    for row, number in zip(rows, _numbers(rows), strict=True):
        groups.setdefault(number, []).append(row)
    return list(groups.values())


def numbered(prompts: Iterable[Sequence[int]]) -> list[int]:
    """Numbers prompts from 0 in the order of first appearance; equal prompts alike."""
    numbers: dict[bytes | None, int] = {}
    return [
        numbers.setdefault(digests.of_prompt(prompt), len(numbers))
        for prompt in prompts
    ]


def _numbers(rows: Sequence[Any], *, unprompted: Sequence[int] = ()) -> list[int]:
    """Numbers rows by their prompts; a row without a prompt has its own number."""
    none = digests.of_prompt(unprompted)
    number_of: dict[bytes | int, int] = {}
    numbers = []
    for place, row in enumerate(rows):
        prompt = digests.of_prompt(row)
        own = place if prompt is None or prompt == none else prompt
        numbers.append(number_of.setdefault(own, len(number_of)))
    return numbers


def _drawn(sizes: Sequence[int], *, num_rows: float) -> list[int]:
    """Returns the indices of the prompts to hold out.

    Args:
      sizes: the number of rows of each prompt, in the order of the draw.
      num_rows: the number of rows to hold out.
    """
    drawn: list[int] = []
    rest, left = num_rows, sum(sizes)
    for place, size in enumerate(sizes):
        # Hold the prompt out if that is nearer to the target; a tie goes to the even
        # number of prompts, as in `round`.
        nearer = size < 2 * rest or (size == 2 * rest and len(drawn) % 2 == 1)
        if nearer and size < left:
            drawn.append(place)
            rest, left = rest - size, left - size
    return drawn or [int(np.argmin(sizes))]
