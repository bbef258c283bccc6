"""Pages of a pool: their owners, and that no row waits for ever."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.generation import page_table

SIZE, PROMPT, NEW, PLACES = 3, 7, 11, 4
LONGEST = PROMPT + NEW - 1
LEAST = -(-LONGEST // SIZE)  # 6 pages


@functools.cache
def programs():
    """The programs of a step and of an arrival for each size of a pool."""

    def step(table, alive, ends):
        table, going = page_table.grant(table, alive=alive)
        view = page_table.view(table, going=going)
        alive = alive & ~(going & ends)
        return page_table.advanced(table, going=going, alive=alive), going, view, table

    def arrive(table, place, length):
        fits = page_table.admissible(table, lengths=length, new=NEW)
        return (fits, *page_table.admit(table, place=place, lengths=length, new=NEW))

    return toys.jit(step), toys.jit(arrive)


def check(table, tokens_of_places):
    """Checks the table of places with these tokens against a list of pages."""
    count = table.owner.shape[0]
    rows = [[p for p in row if p < count] for row in np.asarray(table.table)]
    used = [page for row in rows for page in row]
    assert len(used) == len(set(used)), "two rows have a page"
    for place, row in enumerate(rows):
        assert len(row) == -(-tokens_of_places[place] // SIZE), (
            place,
            row,
            tokens_of_places,
        )
        assert table.tokens[place] == tokens_of_places[place]
        for number, page in enumerate(row):
            assert (table.owner[page], table.number[page]) == (place, number)
    free = sorted(set(range(count)) - set(used))
    np.testing.assert_array_equal(np.flatnonzero(table.owner == PLACES), free)


def queue(pages, lengths, responses):
    """Plays prompts and responses of these lengths, and checks each step.

    A NumPy array follows the content of every page, by `view`.

    Returns:
      The number of steps, and the number of steps in which a row waited.
    """
    step, arrive = programs()
    table = page_table.empty(places=PLACES, pages=pages, size=SIZE, longest=LONGEST)
    pool = np.full((pages, SIZE, 2), -1)  # which prompt's token, and which of them
    row = np.full(PLACES, -1)
    tokens_of_places, left = np.zeros(PLACES, int), np.zeros(PLACES, int)
    waiting, steps, pauses = 0, 0, 0
    while waiting < len(lengths) or (row >= 0).any():
        free = np.flatnonzero(row < 0)
        while waiting < len(lengths) and len(free):
            length, place = lengths[waiting], free[0]
            args = toys.array([place], np.int32), toys.array([length], np.int32)
            fits, more, page = arrive(table, *args)
            if not fits:
                assert (row >= 0).any(), "nothing goes on, and the next prompt waits"
                break
            table, free = more, free[1:]
            row[place], tokens_of_places[place] = waiting, length
            left[place] = responses[waiting] - 1  # the first came with the prompt
            for token in range(length):
                at = pool[page[0, token // SIZE], token % SIZE]
                at[:] = waiting, token
            if not left[place]:
                left[place] = 1  # one more, for a row that is run at least once
            waiting += 1
        ends = toys.array(left == 1, bool)
        table, going, view, granted = step(table, toys.array(row >= 0, bool), ends)
        going = np.asarray(going)
        assert going.any() or not (row >= 0).any(), "every row waits"
        assert not going[row < 0].any()
        for place in np.flatnonzero(going):
            page = int(view.page[place])
            assert page < pages
            assert granted.owner[page] == place
            pool[page, int(view.column[place])] = row[place], tokens_of_places[place]
            # What its token sees is the row's tokens, every one once, its own included.
            mine = np.asarray(view.owner) == place
            tokens = pool[np.asarray(view.seen) & mine[:, None]]
            assert (tokens[:, 0] == row[place]).all()
            assert sorted(tokens[:, 1]) == list(range(tokens_of_places[place] + 1))
        tokens_of_places, left = tokens_of_places + going, left - going
        steps, pauses = steps + 1, pauses + bool((going != (row >= 0)).any())
        ended = going & (left == 0)
        row[ended], tokens_of_places[ended] = -1, 0
        check(table, tokens_of_places)
    assert (np.asarray(table.owner) == PLACES).all()
    return steps, pauses


ALL_LONG = [NEW] * 7
MIXED = [2, 11, 3, 2, 11, 5, 7]
PROMPTS = [7, 3, 1, 6, 0, 7, 2]


@pytest.mark.parametrize(
    ("pages", "responses"),
    [
        (LEAST, MIXED),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((LEAST, ALL_LONG), (LEAST + 1, ALL_LONG), (9, ALL_LONG)),
                *((9, MIXED), (9, [2] * 7), (9, [2] * 6 + [NEW]), (40, ALL_LONG)),
            )
        ),
    ],
)
def test_every_response_comes_to_its_end(pages, responses):
    """Long, short and mixed, in the smallest pool and in one with room for all."""
    steps, pauses = queue(pages, PROMPTS, responses)
    assert steps >= max(responses) - 1
    if pages == 40:
        assert not pauses
    if pages <= 9 and responses.count(NEW) > 1:
        assert pauses  # rows do wait, without which nothing was shown


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_queues_come_to_their_end(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, PROMPT + 1, 20).tolist()
    responses = rng.integers(2, NEW + 1, 20).tolist()
    queue(int(rng.integers(LEAST, 3 * LEAST)), lengths, responses)


def safe_by_hand(tokens, more, pages):
    """Ends rows that can end, one by one; whether none is left."""
    free, rows = pages - sum(tokens), list(zip(tokens, more, strict=True))
    while rows:
        able = [row for row in rows if row[1] <= free]
        if not able:
            return False
        free += able[0][0]
        rows.remove(able[0])
    return True


def test_safe_is_what_a_search_finds():
    rng = np.random.default_rng(0)
    cases = [rng.integers(0, 5, (2, 5)) for _ in range(200)]
    pages = [int(tokens.sum() + rng.integers(0, 4)) for tokens, _ in cases]
    check = jax.vmap(lambda h, m, n: page_table.safe(held=h, more=m, pages=n))
    tokens, more = np.stack(cases, axis=1)
    output = toys.jit(check)(tokens, more, np.asarray(pages))
    expected = [
        safe_by_hand(tokens.tolist(), more.tolist(), n)
        for (tokens, more), n in zip(cases, pages, strict=True)
    ]
    assert 100 < sum(expected) < 180
    np.testing.assert_array_equal(output, expected)


def test_prompts_that_always_fit_together():
    """A row of 17 tokens has 6 pages, and a prompt of 7 tokens has 3."""

    def most(pages, group_size=1):
        return page_table.arrivals_at_most(
            pages, size=SIZE, prompt=PROMPT, new=NEW, group_size=group_size
        )

    assert [most(n) for n in (6, 8, 9, 11, 12)] == [1, 1, 2, 2, 3]
    assert [most(n, 2) for n in (9, 14, 15)] == [2, 2, 4]
    with pytest.raises(InputError, match=r"at least 6 pages of 3 .* got 5; give more"):
        most(5)
    with pytest.raises(InputError, match=r"at least 9 .* and 1 prompts more .* got 8"):
        most(8, 2)


@pytest.mark.slow
def test_rows_that_go_on_move_with_their_pages():
    table = page_table.empty(places=PLACES, pages=9, size=SIZE, longest=LONGEST)

    def run(place, lengths, alive):
        admitted, page = page_table.admit(table, place=place, lengths=lengths, new=NEW)
        after = page_table.advanced(admitted, going=alive, alive=alive)
        return page, after, *page_table.moved(after, alive=alive, places=3, pages=7)

    page, after, fewer, source = toys.jit(run)(
        np.array([2, 0, 3]), np.array([7, 2, 4]), np.array([False, False, True, True])
    )
    np.testing.assert_array_equal(page[:, :3], [[0, 1, 2], [3, 9, 9], [4, 5, 9]])
    np.testing.assert_array_equal(after.owner, [2, 2, 2, 4, 3, 3, 4, 4, 4])
    np.testing.assert_array_equal(source, [0, 1, 2, 4, 5, 9, 9])
    np.testing.assert_array_equal(fewer.owner, [0, 0, 0, 1, 1, 3, 3])
    np.testing.assert_array_equal(fewer.number[:5], [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(fewer.tokens, [8, 5, 0])
    np.testing.assert_array_equal(fewer.most, [6, 5, 0])
    expected = [[0, 1, 2], [3, 4, 7], [7, 7, 7]]
    np.testing.assert_array_equal(fewer.table[:, :3], expected)
    assert (np.asarray(fewer.table[:, 3:]) == 7).all()


def test_lengths_of_the_prompts_that_come_next():
    mask = jnp.arange(4)[None] >= jnp.array([[3], [0], [2], [4], [1]])
    row = np.arange(6, dtype=np.int32).reshape(3, 2)
    after = page_table.next_lengths(mask, row)
    np.testing.assert_array_equal(after, [[2, 0], [3, -1], [-1, -1]])
