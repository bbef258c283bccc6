"""Packing of pairs loses nothing, mixes nothing, and is deterministic."""

import time

import chex
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from rlhf_jax.data import packing
from rlhf_jax.data.examples import Pair
from rlhf_jax.devices.row_sharding import Share
from rlhf_jax.functional.checks import InputError

RNG = np.random.default_rng(2)


def tokens(count):
    return RNG.integers(3, 99, count).tolist()


PAIRS = [
    Pair(tokens(RNG.integers(1, 6)), [*tokens(i % 4), 1], [*tokens((i * 3) % 5), 1])
    for i in range(23)
]
WIDTH = 40


def size(pair):
    return 2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected)


def texts_of(batch, row, pair):
    """[(prompt, answer) of the chosen, of the rejected text] of one pair in a batch."""
    texts = []
    for segment in (2 * pair + 1, 2 * pair + 2):
        mine = batch.segments[row] == segment
        answer = mine & batch.response_mask[row]
        texts.append(
            (
                batch.tokens[row][mine & ~answer].tolist(),
                batch.tokens[row][answer].tolist(),
            )
        )
    return texts


def test_a_row_by_hand():
    pairs = [Pair([5, 6], [7, 1], [1]), Pair([8], [1], [9, 1])]
    [batch] = packing.packed_in_order(
        packing.pack(pairs, width=14), batch_size=1, pad_id=0
    )
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 1, 5, 6, 1, 8, 1, 8, 9, 1]])
    np.testing.assert_array_equal(
        batch.segments, [[1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4]]
    )
    np.testing.assert_array_equal(
        batch.response_mask, [[0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1]]
    )
    np.testing.assert_array_equal(batch.pairs, [[True, True]])
    np.testing.assert_array_equal(batch.index, [0])
    assert batch.mask.all()
    for array in (batch.tokens, batch.segments, batch.index):
        assert array.dtype == np.int32
    for array in (batch.response_mask, batch.pairs, batch.mask):
        assert array.dtype == np.bool_


@pytest.mark.parametrize("width", [None, 27, WIDTH, 1000])
def test_every_pair_is_in_one_row_whole(width):
    rows = packing.pack(PAIRS, width=width)
    assert sorted(place for row in rows for place in row.places) == [*range(len(PAIRS))]
    batches = packing.packed_in_order(rows, batch_size=4, pad_id=0)
    packed_places = []
    for batch in batches:
        for row, index in enumerate(batch.index):
            places = rows[index].places if index >= 0 else ()
            assert batch.pairs[row].sum() == len(places)
            assert batch.mask[row].sum() == sum(size(PAIRS[place]) for place in places)
            for pair, place in enumerate(places):
                prompt, chosen, rejected = map(list, PAIRS[place][:3])
                expected = [(prompt, chosen), (prompt, rejected)]
                assert texts_of(batch, row, pair) == expected
                packed_places.append(place)
    assert sorted(packed_places) == [*range(len(PAIRS))]
    if width is not None:
        assert batches[0].tokens.shape[1] <= width


def test_a_pair_goes_where_it_first_fits():
    sizes = [8, 5, 3, 9, 2, 4]
    pairs = [Pair([4], [5] * (n - 3), [1]) for n in sizes]
    assert [size(pair) for pair in pairs[:4]] == sizes[:4]
    pairs[4] = Pair([4], [], [])
    rows = packing.pack(pairs, width=12)
    # 8 + 3 | 5 + 2 + 4 | 9: the 2 no longer fits into the first row, the 4 neither.
    assert [row.places for row in rows] == [(0, 2), (1, 4, 5), (3,)]
    assert packing.pack(pairs, width=12) == rows
    assert [row.places for row in packing.pack(pairs, width=None)] == [
        (place,) for place in range(6)
    ]


def stream(**options):
    rows = packing.pack(PAIRS, width=WIDTH)
    return packing.packed_batches(
        rows, **({"batch_size": 2, "seed": 5, "pad_id": 0} | options)
    ), len(rows)


def row_by_row(sizes, *, width):
    """First fit by its definition: tries every row from the first on."""
    room = np.full(len(sizes), width)
    filled = []
    for place, size in enumerate(sizes):
        row = int(np.argmax(room[: len(filled) + 1] >= size))
        if row == len(filled):
            filled.append([])
        filled[row].append(place)
        room[row] -= size
    return filled


@hypothesis.given(st.lists(st.integers(0, 20), max_size=120), st.integers(20, 50))
def test_first_fit_is_that_of_asking_every_row(sizes, width):
    assert packing.first_fit(sizes, width=width) == row_by_row(sizes, width=width)


@pytest.mark.slow
def test_first_fit_does_not_ask_every_row():
    """With 16 times as many sizes, most in a row of their own."""

    def seconds(count):
        sizes = np.random.default_rng(0).integers(5, 10, count).tolist()
        began = time.process_time()
        packing.first_fit(sizes, width=10)
        return time.process_time() - began

    assert seconds(160_000) < 2.5 * 16 * min(seconds(10_000) for _ in range(3)) + 0.2


@pytest.mark.slow
def test_every_row_once_an_epoch_at_random_access():
    batches, count = stream()
    steps = 3 * count
    index = np.concatenate([batches[step].index for step in range(steps)])
    for epoch in index[: 6 * count].reshape(6, count).tolist():
        assert sorted(epoch) == [*range(count)]
    assert index[:count].tolist() != index[count : 2 * count].tolist()
    again, _ = stream()
    for step in (7, 0, 3, 3):
        chex.assert_trees_all_equal(again[step], batches[step])
    other, _ = stream(seed=6)
    assert [other[i].index.tolist() for i in range(9)] != [
        batches[i].index.tolist() for i in range(9)
    ]
    assert batches.steps_per_epoch == -(-count // 2)
    widths = {batches[step].tokens.shape for step in range(steps)}
    assert len(widths) == 1, "or every batch is a program of its own"


def test_process_slices_make_up_the_global_batch():
    whole, _ = stream(batch_size=4)
    parts = [stream(batch_size=4, share=Share((i,), 4))[0] for i in (0, 1)]
    for step in range(3):
        jax.tree.map(
            lambda all_rows, *mine: np.testing.assert_array_equal(
                np.concatenate(mine), all_rows[:2]
            ),
            whole[step],
            *[part[step] for part in parts],
        )


@pytest.mark.parametrize(
    ("pairs", "width", "message"),
    [
        ([], None, "expected at least one row of data, got none"),
        (
            [PAIRS[0], Pair([], [4, 1], [1])],
            None,
            r"pair 1 \(from 0, .*\): expected a prompt of at least 1 token, got none",
        ),
        (
            [Pair([3], [1], [1]), Pair([3, 4], [5, 1], [1])],
            6,
            r"pair 1 \(from 0, .*\): expected at most 6 tokens, .* got 7; make",
        ),
    ],
)
def test_pairs_that_no_row_holds(pairs, width, message):
    with pytest.raises(InputError, match=message):
        packing.pack(pairs, width=width)
