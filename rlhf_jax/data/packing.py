"""Packs several encoded pairs or examples into one row, and batches the rows.

    pairs      8, 5 and 3 tokens, both texts      width 12
    rows       pair 0 (8), pair 2 (3)  |  pair 1 (5)

Each pair goes into the first row that has room (first fit), in the order of the data,
so the rows depend on the data and the width alone. `batches` shuffles and batches them.
Both texts of a pair are in the same row, so the loss needs no other row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.algorithms.batch import PackedPreferences, Sequences
from rlhf_jax.data import batches, lengths
from rlhf_jax.data.batches import Batches, Visit
from rlhf_jax.data.examples import Example, Pair, Text, Tokens
from rlhf_jax.devices import row_sharding
from rlhf_jax.devices.row_sharding import Share

HostArray = Any


class PackedRow(NamedTuple):
    """Concatenated texts: examples, or pairs (prompt + chosen, prompt + rejected)."""

    tokens: Tokens
    segments: Sequence[int]  # k + 1 for text k of the row; a pair is two texts
    response: Sequence[bool]  # response tokens, except those that no token precedes
    places: tuple[int, ...]  # indices of the pairs or examples in the data set


def pack(pairs: Sequence[Pair], *, width: int | None) -> list[PackedRow]:
    """Packs pairs into rows by first fit.

    Args:
      pairs: encoded pairs, in any order.
      width: tokens of a row; None gives every pair a row of its own.

    Raises:
      InputError: there are no pairs, or one has no prompt or does not fit into a row.
    """
    for place, pair in enumerate(pairs):
        where = f"pair {place} (from 0, of those to be packed)"
        lengths.check_prompt(pair.prompt, where=where)
    texts = [
        (Example(pair.prompt, pair.chosen), Example(pair.prompt, pair.rejected))
        for pair in pairs
    ]
    return _pack(texts, width=width, of="pair")


def pack_examples(examples: Sequence[Text], *, width: int) -> list[PackedRow]:
    """Packs examples like `pack`; without a prompt the first token is not learned."""
    texts = [(example,) for example in examples]
    return _pack(texts, width=width, of="example")


def packed_batches(
    rows: Sequence[PackedRow],
    *,
    batch_size: int,
    seed: int,
    pad_id: int,
    share: Share = row_sharding.WHOLE,
    labels: Sequence[bool] | None = None,
) -> Batches[PackedPreferences]:
    """Shuffles and batches rows, right-padded to the longest row of the data set.

    Args:
      rows: from `pack`.
      batch_size: rows, not pairs, of the global batch.
      labels: for each packed pair, whether its first text is desirable (KTO); None for
        data without labels.
    """
    mine = share.of(batch_size)
    collate = _collate(rows, pad_id=pad_id, labels=labels)

    def of_visits(visits: Sequence[Visit]) -> PackedPreferences:
        return collate([visits[place].row for place in mine])

    return batches.shuffled(len(rows), batch_size, seed=seed, collate=of_visits)


def sequence_batches(
    rows: Sequence[PackedRow],
    *,
    batch_size: int,
    seed: int,
    pad_id: int,
    share: Share = row_sharding.WHOLE,
) -> Batches[Sequences]:
    """Batches the rows of `pack_examples` as `packed_batches` does, with `segments`."""
    packed = packed_batches(
        rows, batch_size=batch_size, seed=seed, pad_id=pad_id, share=share
    )
    return packed.map(
        lambda batch: Sequences(
            tokens=batch.tokens,
            mask=batch.mask,
            response_mask=batch.response_mask,
            segments=batch.segments,
        )
    )


def packed_in_order(
    rows: Sequence[PackedRow],
    *,
    batch_size: int,
    pad_id: int,
    labels: Sequence[bool] | None = None,
) -> list[PackedPreferences]:
    """Batches every row once, in order, for evaluation.

    Empty rows of index -1 fill up the last batch. `labels` as in `packed_batches`.
    """
    collate = _collate(rows, pad_id=pad_id, labels=labels)
    places = [*range(len(rows)), *[-1] * (-len(rows) % batch_size)]
    return [
        collate(places[start : start + batch_size])
        for start in range(0, len(places), batch_size)
    ]


def _collate(
    rows: Sequence[PackedRow], *, pad_id: int, labels: Sequence[bool] | None
) -> Callable[[Sequence[int]], PackedPreferences]:
    """Returns a function from indices of rows to a batch; -1 is a row without pairs."""
    every = [*rows, PackedRow((), (), (), ())]
    width = max(len(row.tokens) for row in every)
    most = max(len(row.places) for row in every)

    def batch(places: Sequence[int]) -> PackedPreferences:
        rows = [every[place] for place in places]
        texts = [row.tokens for row in rows]
        tokens, mask = batches.pad(texts, width=width, pad_id=pad_id, left=False)
        segments: HostArray = np.zeros(mask.shape, np.int32)
        segments[mask] = np.concatenate([row.segments for row in rows])
        response_mask: HostArray = np.zeros(mask.shape, bool)
        response_mask[mask] = np.concatenate([row.response for row in rows])
        counts = np.array([len(row.places) for row in rows])
        pairs: HostArray = np.arange(most)[None, :] < counts[:, None]
        index: HostArray = np.array(places, np.int32)
        desirable: HostArray = None
        if labels is not None:
            desirable = np.zeros(pairs.shape, bool)
            desirable[pairs] = [labels[place] for row in rows for place in row.places]
        return PackedPreferences(
            tokens=tokens,
            segments=segments,
            response_mask=response_mask,
            pairs=pairs,
            index=index,
            labels=desirable,
        )

    return batch


def _pack(
    texts: Sequence[tuple[Text, ...]], *, width: int | None, of: str
) -> list[PackedRow]:
    """Packs items of one or two texts by first fit; an item is never split."""
    sizes = [sum(text.length for text in whole) for whole in texts]
    most = batches.longest(sizes)
    if width is None:
        return [_row(texts, (place,)) for place in range(len(texts))]
    lengths.check(
        most,
        width,
        where=f"{of} {sizes.index(most)} (from 0, of those to be packed)",
        holds=", its texts with their prompts",
        remedy=f"make rows wider, or leave long {of}s out",
    )
    filled = first_fit(sizes, width=width)
    return [_row(texts, tuple(places)) for places in filled]


def first_fit(sizes: Sequence[int], *, width: int) -> list[list[int]]:
    """Puts each item into the first row that has room; O(n log n) for n items.

    Args:
      sizes: tokens of each item, at most `width`, in the order of packing.
      width: tokens of a row.

    Returns:
      The items of each row, as indices of `sizes`.
    """
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    # A binary tree over the rows: `room[node]` is the largest room of the rows below
    # it, and its children are 2·node and 2·node + 1.
    room = [width] * (2 * leaves)
    filled: list[list[int]] = []
    for place, size in enumerate(sizes):
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < size
        row = node - leaves
        if row == len(filled):
            filled.append([])
        filled[row].append(place)
        room[node] -= size
        while node > 1:
            node //= 2
            largest = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest:
                break
            room[node] = largest
    return filled


def _row(texts: Sequence[tuple[Text, ...]], places: tuple[int, ...]) -> PackedRow:
    tokens: list[int] = []
    segments: list[int] = []
    in_response: list[bool] = []
    in_row = [text for place in places for text in texts[place]]
    for number, text in enumerate(in_row, start=1):
        tokens += [*text.prompt, *text.response]
        segments += [number] * text.length
        in_response += text.trained
    return PackedRow(tokens, segments, in_response, places)
