"""Which pages of a pool are whose: granted as rows grow, free again when a row ends.

No row may wait for ever. Let a row hold h pages and take at most r more, were it to
draw its longest response, and let f pages be free. The rows are kept *safe*: in the
order of r, the smallest first, each can have all that it may take once the rows before
it have ended,

    f + Σ_{before i} h_j - r_i >= 0   for every row i.

A page goes to a row, and a prompt comes in, only if the rows are safe afterwards. The
first row of a safe order always gets its page, so that it goes on until it ends, frees
its pages and leaves the others safe: some row always goes on, and every response comes
to its end. A row that does not get its page keeps what it has and is not run.

This is the banker's algorithm for one resource (Dijkstra 1965, EWD 123), where the
claim of a row is its longest response. Its safe order, if there is one, can always be
that of r.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.attention import Pages

Array = jax.Array


@flax.struct.dataclass
class PageTable:
    """Pages of B places."""

    table: Array  # i32[B, J], pages of a place in the order of its tokens; N is none
    owner: Array  # i32[N], the place of a page; B where it is free
    number: Array  # i32[N], which of its place's pages it is, from 0
    tokens: Array  # i32[B], in the pages of a place
    most: Array  # i32[B], pages of its longest response; 0 where none goes on
    size: int = flax.struct.field(pytree_node=False)  # C, columns of a page

    @property
    def held(self) -> Array:
        """i32[B], pages of each place."""
        return (self.table < self.owner.shape[0]).sum(axis=1, dtype=jnp.int32)


def pages_of(tokens: Any, *, size: int) -> Any:
    """⌈tokens / size⌉, of an integer or of i32[...]."""
    return -(-tokens // size)


def arrivals_at_most(
    pages: int, *, size: int, prompt: int, new: int, group_size: int, shares: int = 1
) -> int:
    """How many prompts can come in at once, whatever their lengths, in whole groups.

    With no row at work all N = `pages` are free, and A prompts of p pages are safe if
    N >= J + (A - 1)·p, where J is the pages of a longest response with its prompt.

    Args:
      shares: how many such pools there are, for the error.

    Returns:
      A, a multiple of group_size.

    Raises:
      InputError: not even one group can.
    """
    longest = pages_of(prompt + new - 1, size=size)  # the last token is never run
    one = pages_of(prompt, size=size)
    least = longest + (group_size - 1) * one
    if pages < least:
        others = f" and {group_size - 1} prompts more of its group"
        of_all = f" in each of {shares} shares of the rows"
        raise InputError(
            f"cache_pages: expected at least {least * shares} pages of {size} columns, "
            f"which one row of {prompt} + {new} columns"
            f"{others if group_size > 1 else ''} may take"
            f"{of_all if shares > 1 else ''}, got {pages * shares}; give more, or "
            f"leave it out"
        )
    return (pages - longest + one) // (one * group_size) * group_size


def empty(*, places: int, pages: int, size: int, longest: int) -> PageTable:
    """B places without pages, and N free pages, for rows of up to `longest` tokens."""
    slots = pages_of(longest, size=size)
    return PageTable(
        table=jnp.full((places, slots), pages, jnp.int32),
        owner=jnp.full(pages, places, jnp.int32),
        number=jnp.zeros(pages, jnp.int32),
        tokens=jnp.zeros(places, jnp.int32),
        most=jnp.zeros(places, jnp.int32),
        size=size,
    )


def safe(*, held: Array, more: Array, pages: Array | int) -> Array:
    """bool[]: the rows can all come to their end, one after another.

    Args:
      held: i32[B], h.
      more: i32[B], r, what a row may take beyond that. Both are 0 where there is none.
    """
    slack = _slack(held=held, more=more, pages=pages, before=_before(more))
    return (slack >= 0).all()


def grant(table: PageTable, *, alive: Array) -> tuple[PageTable, Array]:
    """Gives a page to every row that needs one for its next token and may have it.

    Args:
      table: safe.
      alive: bool[B], rows that go on.

    Returns:
      The table, safe again, and bool[B], rows that have a column for their next token.
    """
    pages, places = table.owner.shape[0], alive.shape[0]
    held = table.held
    # The last page is full: the next token would be the first of another.
    wants = alive & (held * table.size == table.tokens)
    more = table.most - held
    before = _before(more)
    slack = _slack(held=held, more=more, pages=pages, before=before)
    # A page for row k takes one from what is left for every row before it, and from no
    # other's: row i allows as many, to rows after it, as its slack.
    rank = wants + (before & wants[:, None]).sum(axis=0, dtype=jnp.int32)
    allowed = jnp.where(before, (slack + rank)[:, None], pages + places).min(axis=0)
    granted = wants & (rank <= allowed)
    # The k-th row to get a page gets the k-th that is free.
    free = table.owner == places
    # Both counts rise by one at each row and page: the k-th of one finds the k-th of
    # the other without a loop.
    nth_row, nth_page = (jnp.cumsum(x, dtype=jnp.int32) for x in (granted, free))
    page = _first(nth_page, nth_row)
    row = _first(nth_row, nth_page)
    taken = free & (nth_page <= nth_row[-1])
    last = jnp.arange(table.table.shape[1])[None] == held[:, None]
    here = granted[:, None] & last
    table = dataclasses.replace(
        table,
        table=jnp.where(here, page[:, None], table.table),
        owner=jnp.where(taken, row, table.owner),
        number=jnp.where(taken, held[jnp.minimum(row, places - 1)], table.number),
    )
    return table, alive & (~wants | granted)


def view(table: PageTable, *, going: Array) -> Pages:
    """The pages as attention reads them, for the next token of every row.

    Args:
      table: with a column for that token where a row is going.
    """
    pages, places = table.owner.shape[0], going.shape[0]
    last = jnp.minimum(table.tokens // table.size, table.table.shape[1] - 1)
    page = jnp.take_along_axis(table.table, last[:, None], axis=1)[:, 0]
    owner = jnp.minimum(table.owner, places - 1)
    upto = jnp.where(table.owner < places, table.tokens[owner], -1)
    column = table.number[:, None] * table.size + jnp.arange(table.size)[None]
    return Pages(
        table=table.table,
        owner=owner,
        seen=column <= upto[:, None],
        page=jnp.where(going, page, pages),
        column=table.tokens % table.size,
    )


def advanced(table: PageTable, *, going: Array, alive: Array) -> PageTable:
    """The table after a token of every row that is going; rows that ended free theirs.

    Args:
      going: bool[B], rows whose token was run.
    """
    pages, places = table.owner.shape[0], alive.shape[0]
    # A free page has the owner B: the entry appended says that nobody keeps it.
    kept = jnp.append(alive, False)[table.owner]
    return dataclasses.replace(
        table,
        table=jnp.where(alive[:, None], table.table, pages),
        owner=jnp.where(kept, table.owner, places),
        tokens=jnp.where(alive, table.tokens + going, 0),
        most=jnp.where(alive, table.most, 0),
    )


def admissible(table: PageTable, *, lengths: Array, new: int) -> Array:
    """bool[]: prompts of those lengths can come in.

    Args:
      lengths: i32[A], tokens of each prompt; below 0 there is none.
    """
    taken, most = claim(lengths, size=table.size, new=new)
    # As if they had come in already: safe then means that they may.
    held = jnp.concatenate([table.held, taken])
    more = jnp.concatenate([table.most, most]) - held
    return safe(held=held, more=more, pages=table.owner.shape[0])


def next_lengths(mask: Array, row: Array) -> Array:
    """i32[T, A]: tokens of the prompts that come in after those of a turn.

    Args:
      mask: bool[N, P], of all prompts.
      row: i32[T, A], those that come in each turn; N or more for none.

    Returns:
      Their lengths a turn later, -1 where there is no prompt.
    """
    rows = mask.shape[0]
    lengths = mask.sum(axis=1, dtype=jnp.int32)
    after = jnp.append(row[1:], jnp.full_like(row[:1], rows), axis=0)
    return lengths.at[after].get(mode="fill", fill_value=-1)


def claim(lengths: Array, *, size: int, new: int) -> tuple[Array, Array]:
    """i32[A] each: pages of prompts, and of their longest responses with them.

    Args:
      lengths: i32[A], tokens of each prompt; below 0 there is none, of 0 pages.
    """
    taken = pages_of(jnp.maximum(lengths, 0), size=size)
    most = pages_of(lengths + new - 1, size=size)  # the last token is never run
    return taken, jnp.where(lengths < 0, 0, most)


def admit(
    table: PageTable, *, place: Array, lengths: Array, new: int
) -> tuple[PageTable, Array]:
    """Gives prompts their pages.

    Args:
      table: with rooms for them (`admissible`), as their places were left.
      place: i32[A], of each prompt, all different; B where there is none.
      lengths: i32[A], tokens of each; below 0 where there is none.

    Returns:
      The table, and i32[A, J]: the pages of each prompt, N where it has none.
    """
    pages, places = table.owner.shape[0], table.tokens.shape[0]
    taken, most = claim(lengths, size=table.size, new=new)
    slot = jnp.arange(table.table.shape[1], dtype=jnp.int32)
    used = slot[None] < taken[:, None]
    ends = jnp.cumsum(taken, dtype=jnp.int32)
    nth_page = jnp.cumsum(table.owner == places, dtype=jnp.int32)
    nth = (ends - taken)[:, None] + slot[None] + 1
    page = jnp.where(used, _first(nth_page, nth), pages)

    def put(array: Array, values: Array) -> Array:
        return array.at[place].set(values, mode="drop")

    def mark(array: Array, values: Array) -> Array:
        return array.at[page].set(jnp.broadcast_to(values, page.shape), mode="drop")

    table = dataclasses.replace(
        table,
        table=put(table.table, page),
        owner=mark(table.owner, place[:, None]),
        number=mark(table.number, slot[None]),
        tokens=put(table.tokens, jnp.maximum(lengths, 0)),
        most=put(table.most, most),
    )
    return table, page


def moved(
    table: PageTable, *, alive: Array, places: int, pages: int
) -> tuple[PageTable, Array]:
    """The table of the rows that go on, whose pages lie side by side now.

    Args:
      pages: N', as many as they hold or more, up to N.

    Returns:
      Table of B' places and N' pages, and i32[N']: which page each was; N for none.
    """
    nobody, before = alive.shape[0], table.owner.shape[0]
    count = jnp.cumsum(alive, dtype=jnp.int32)
    going = _first(count, jnp.arange(1, places + 1, dtype=jnp.int32))
    used = jnp.cumsum(table.owner < nobody, dtype=jnp.int32)
    nth = jnp.arange(1, pages + 1, dtype=jnp.int32)
    source = _first(used, nth)  # N beyond those that are used

    def of(array: Array, index: Array, absent: int) -> Array:
        return array.at[index].get(mode="fill", fill_value=absent)

    return (
        dataclasses.replace(
            table,
            table=of(used - 1, of(table.table, going, before), pages),
            owner=of(count - 1, of(table.owner, source, nobody), places),
            number=of(table.number, source, 0),
            tokens=of(table.tokens, going, 0),
            most=of(table.most, going, 0),
        ),
        source,
    )


def _before(more: Array) -> Array:
    """bool[B, B]: row i stands before row k; of equal r the first place does."""
    row = jnp.arange(more.shape[0])
    tie = row[:, None] < row[None]
    return (more[:, None] < more[None]) | ((more[:, None] == more[None]) & tie)


def _slack(*, held: Array, more: Array, pages: Array | int, before: Array) -> Array:
    """i32[B]: pages left when a row has all that it may take, those before it none."""
    freed = before * held[:, None]
    return pages - held.sum() + freed.sum(axis=0, dtype=jnp.int32) - more


def _first(counted: Array, number: Array) -> Array:
    """The first index where a running count is `number`; its length where none is."""
    index = jnp.searchsorted(counted, number, side="left", method="compare_all")
    return index.astype(jnp.int32)
