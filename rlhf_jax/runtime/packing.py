"""Encoded pairs to rows that hold several, and those to batches[step].

    pairs      8, 5 and 3 tokens, both texts      width 12
    rows       pair 0 (8), pair 2 (3)  |  pair 1 (5)

Each pair goes into the first row that has room (first fit), in the order of the data:
the rows follow from the data and the width alone. They are shuffled and batched as
`batches` does it. A pair is packed whole: its row is all that its loss needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runtime import batches, row_sharding
from rlhf_jax.runtime.batches import Batches, Visit
from rlhf_jax.runtime.encoding import Pair, Tokens
from rlhf_jax.runtime.row_sharding import Share
from rlhf_jax.stages.batch import PackedPreferences

HostArray = Any


class PackedRow(NamedTuple):
    """Pairs laid end to end."""

    tokens: Tokens  # prompt and chosen answer, prompt and rejected answer, ...
    segments: Sequence[int]  # 2k + 1 and 2k + 2 for the texts of pair k of the row
    response: Sequence[bool]  # tokens of answers
    pairs: tuple[int, ...]  # rows of the data set


def pack(pairs: Sequence[Pair], *, width: int | None) -> list[PackedRow]:
    """First fit of pairs into rows; every pair is in one row.

    Args:
      pairs: encoded, in any order.
      width: tokens of a row; None is a row for each pair.

    Raises:
      InputError: there are no pairs, one has no prompt or does not fit into a row.
    """
    if not pairs:
        raise InputError("expected at least one row of data, got none")
    for place, pair in enumerate(pairs):
        if len(pair.prompt) == 0:
            raise InputError(
                f"pair {place} (from 0, of those to be packed): expected a prompt of "
                f"at least 1 token, got none, so that nothing predicts how its answers "
                f"begin; remove the pair"
            )
    sizes = [
        2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs
    ]
    if width is None:
        return [_row(pairs, (place,)) for place in range(len(pairs))]
    if max(sizes) > width:
        raise InputError(
            f"pair {int(np.argmax(sizes))} (from 0, of those to be packed): expected "
            f"at most {width} tokens, both texts with their prompts, got {max(sizes)}; "
            f"make rows wider, or leave long pairs out"
        )
    room = np.full(len(pairs), width)
    filled: list[list[int]] = []
    for place, size in enumerate(sizes):
        row = int(np.argmax(room[: len(filled) + 1] >= size))
        if row == len(filled):
            filled.append([])
        filled[row].append(place)
        room[row] -= size
    return [_row(pairs, tuple(places)) for places in filled]


def packed_batches(
    rows: Sequence[PackedRow],
    *,
    batch_size: int,
    seed: int,
    pad_id: int,
    share: Share = row_sharding.WHOLE,
) -> Batches[PackedPreferences]:
    """Right-padded rows, all as wide as the longest of the data set.

    Args:
      rows: of `pack`.
      batch_size: rows, not pairs, of the global batch.
      seed, pad_id, share: as `batches.prompt_batches`.

    Raises:
      InputError: no rows, or sizes that do not divide.
    """
    mine = share.of(batch_size)
    collate = _Collate(rows, pad_id=pad_id)

    def of_visits(visits: Sequence[Visit]) -> PackedPreferences:
        return collate([visits[place].row for place in mine])

    return batches.shuffled(len(rows), batch_size, seed=seed, collate=of_visits)


def packed_in_order(
    rows: Sequence[PackedRow], *, batch_size: int, pad_id: int
) -> list[PackedPreferences]:
    """Every row once, in order, for evaluation.

    Rows without pairs, of index -1, fill up the last batch.
    """
    collate = _Collate(rows, pad_id=pad_id)
    places = [*range(len(rows)), *[-1] * (-len(rows) % batch_size)]
    return [
        collate(places[start : start + batch_size])
        for start in range(0, len(places), batch_size)
    ]


class _Collate:
    """Places in `rows` to a batch; -1 is a row without pairs."""

    def __init__(self, rows: Sequence[PackedRow], *, pad_id: int) -> None:
        self._rows = [*rows, PackedRow((), (), (), ())]
        self._pad_id = pad_id
        self._width = max(len(row.tokens) for row in self._rows)
        self._most = max(len(row.pairs) for row in self._rows)

    def __call__(self, places: Sequence[int]) -> PackedPreferences:
        rows = [self._rows[place] for place in places]
        tokens, mask = batches.pad(
            [row.tokens for row in rows],
            width=self._width,
            pad_id=self._pad_id,
            left=False,
        )
        segments: HostArray = np.zeros(mask.shape, np.int32)
        segments[mask] = np.concatenate([row.segments for row in rows])
        response_mask: HostArray = np.zeros(mask.shape, bool)
        response_mask[mask] = np.concatenate([row.response for row in rows])
        counts = np.array([len(row.pairs) for row in rows])
        pairs: HostArray = np.arange(self._most)[None, :] < counts[:, None]
        index: HostArray = np.array(places, np.int32)
        return PackedPreferences(
            tokens=tokens,
            segments=segments,
            response_mask=response_mask,
            pairs=pairs,
            index=index,
        )


def _row(pairs: Sequence[Pair], places: tuple[int, ...]) -> PackedRow:
    tokens: list[int] = []
    segments: list[int] = []
    response: list[bool] = []
    for place in places:
        pair = pairs[place]
        for answer in (pair.chosen, pair.rejected):
            number = 1 + (segments[-1] if segments else 0)
            tokens += [*pair.prompt, *answer]
            segments += [number] * (len(pair.prompt) + len(answer))
            response += [False] * len(pair.prompt) + [True] * len(answer)
    return PackedRow(tokens, segments, response, places)
