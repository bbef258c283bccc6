"""The owners of pages: pages are granted as rows grow, and freed when a row ends.

No row may wait for ever. Let a row hold h pages and need at most r more for its longest
response, and let f pages be free. The rows are kept *safe*: in increasing order of r,
each row can have all pages that it may need once the rows before it have ended,

    f + Σ_{before i} h_j - r_i >= 0   for every row i.

A row gets a page, and a prompt comes in, only if the rows are safe afterwards. The
first row of a safe order always gets its page. So it runs until it ends, frees its
pages and leaves the others safe: some row always runs, and every response ends. A row
that does not get its page keeps the pages that it has and is not run.

This is the banker's algorithm for one resource (Dijkstra 1965, EWD 123), where the
claim of a row is its longest response. If a safe order exists, that of r is safe.
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
    owner: Array  # i32[N], the place of a page; B if it is free
    number: Array  # i32[N], index of a page among those of its place, from 0
    tokens: Array  # i32[B], tokens in the pages of a place
    most: Array  # i32[B], pages of a place's longest response; 0 if it is idle
    size: int = flax.struct.field(pytree_node=False)  # C, columns of a page

    @property
    def held(self) -> Array:
        """i32[B], number of pages of each place."""
        return (self.table < self.owner.shape[0]).sum(axis=1, dtype=jnp.int32)


def pages_of(tokens: Any, *, size: int) -> Any:
    """⌈tokens / size⌉, of an integer or of i32[...]."""
    return -(-tokens // size)


def arrivals_at_most(
    pages: int, *, size: int, prompt: int, new: int, group_size: int, shares: int = 1
) -> int:
    """How many prompts can come in at once, whatever their lengths, in whole groups.

    With no row at work all N = `pages` are free, and A prompts of p pages are safe if
    N >= J + (A - 1)·p, with J pages for a prompt and its longest response.

    Args:
      shares: number of such pools, for the error message.

    Returns:
      A, a multiple of group_size.

    Raises:
      InputError: there are too few pages for one group.
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
    """bool[], True if all rows can run to their end, one after another.

    Args:
      held: i32[B], h.
      more: i32[B], r. Both are 0 in idle places.
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
    # A page for row k takes one from the slack of every row before it, and of no other
    # row: row i allows as many pages to the rows after it as its slack.
    rank = wants + (before & wants[:, None]).sum(axis=0, dtype=jnp.int32)
    allowed = jnp.where(before, (slack + rank)[:, None], pages + places).min(axis=0)
    granted = wants & (rank <= allowed)
    # The k-th row that is granted a page gets the k-th free page. Both counts increase
    # by one at each row and page, so that searching matches them without a loop.
    free = table.owner == places
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
      table: has a column for the next token of every row that is going.
      going: bool[B], rows whose next token is run.
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
    """The table after one step; rows that ended free their pages.

    Args:
      going: bool[B], rows whose token was run.
      alive: bool[B], rows that have not ended.
    """
    pages, places = table.owner.shape[0], alive.shape[0]
    # A free page has the owner B: the appended entry says that it stays free.
    kept = jnp.append(alive, False)[table.owner]
    return dataclasses.replace(
        table,
        table=jnp.where(alive[:, None], table.table, pages),
        owner=jnp.where(kept, table.owner, places),
        tokens=jnp.where(alive, table.tokens + going, 0),
        most=jnp.where(alive, table.most, 0),
    )


def admissible(table: PageTable, *, lengths: Array, new: int) -> Array:
    """bool[], True if prompts of these lengths can come in.

    Args:
      lengths: i32[A], tokens of each prompt; below 0 for none.
    """
    taken, most = claim(lengths, size=table.size, new=new)
    # Checks whether the rows are safe after they have come in.
    held = jnp.concatenate([table.held, taken])
    more = jnp.concatenate([table.most, most]) - held
    return safe(held=held, more=more, pages=table.owner.shape[0])


def next_lengths(mask: Array, row: Array) -> Array:
    """Lengths of the prompts that come in one turn later.

    Args:
      mask: bool[N, P], of all prompts.
      row: i32[T, A], prompts that come in each turn; N or more for none.

    Returns:
      i32[T, A], tokens; -1 for no prompt.
    """
    rows = mask.shape[0]
    lengths = mask.sum(axis=1, dtype=jnp.int32)
    after = jnp.append(row[1:], jnp.full_like(row[:1], rows), axis=0)
    return lengths.at[after].get(mode="fill", fill_value=-1)


def claim(lengths: Array, *, size: int, new: int) -> tuple[Array, Array]:
    """i32[A] each: pages of prompts, and of prompts with their longest responses.

    Args:
      lengths: i32[A], tokens of each prompt; below 0 for none, which has 0 pages.
    """
    taken = pages_of(jnp.maximum(lengths, 0), size=size)
    most = pages_of(lengths + new - 1, size=size)  # the last token is never run
    return taken, jnp.where(lengths < 0, 0, most)


def admit(
    table: PageTable, *, place: Array, lengths: Array, new: int
) -> tuple[PageTable, Array]:
    """Gives prompts their pages.

    Args:
      table: has pages for them (`admissible`); their places are idle.
      place: i32[A], place of each prompt, all different; B for none.
      lengths: i32[A], tokens of each prompt; below 0 for none.

    Returns:
      The table, and i32[A, J], the pages of each prompt; N for none.
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
    """Moves the rows that go on into fewer places, and their pages side by side.

    Args:
      alive: bool[B], rows that go on.
      places: B', at least their number.
      pages: N', from the number of their pages to N.

    Returns:
      Table of B' places and N' pages, and i32[N'], the old page of each; N for none.
    """
    old_places, old_pages = alive.shape[0], table.owner.shape[0]
    count = jnp.cumsum(alive, dtype=jnp.int32)
    going = _first(count, jnp.arange(1, places + 1, dtype=jnp.int32))
    used = jnp.cumsum(table.owner < old_places, dtype=jnp.int32)
    nth = jnp.arange(1, pages + 1, dtype=jnp.int32)
    source = _first(used, nth)  # N beyond those that are used

    def of(array: Array, index: Array, absent: int) -> Array:
        return array.at[index].get(mode="fill", fill_value=absent)

    return (
        dataclasses.replace(
            table,
            table=of(used - 1, of(table.table, going, old_pages), pages),
            owner=of(count - 1, of(table.owner, source, old_places), places),
            number=of(table.number, source, 0),
            tokens=of(table.tokens, going, 0),
            most=of(table.most, going, 0),
        ),
        source,
    )


def _before(more: Array) -> Array:
    """bool[B, B]: row i comes before row k in the order of r, then of places."""
    row = jnp.arange(more.shape[0])
    tie = row[:, None] < row[None]
    return (more[:, None] < more[None]) | ((more[:, None] == more[None]) & tie)


def _slack(*, held: Array, more: Array, pages: Array | int, before: Array) -> Array:
    """i32[B]: pages left if row i takes r_i more and the rows before it have ended."""
    freed = before * held[:, None]
    return pages - held.sum() + freed.sum(axis=0, dtype=jnp.int32) - more


def _first(counted: Array, number: Array) -> Array:
    """The first index at which a running count reaches `number`; its length if none."""
    index = jnp.searchsorted(counted, number, side="left", method="compare_all")
    return index.astype(jnp.int32)
