"""Continuous batching: a waiting prompt takes the place of a finished response.

A decoding step costs the same whether its rows go on or have finished, and a plain
batch runs until its longest response ends. Here waiting prompts take the places of
finished rows, inside one program:

    place 0   a a a a c c c c c c e e ·       prompts a to f in two places
    place 1   b b b b b b b d d f f f f

All places write the same column of their caches, which is one slice as in `decode`. The
columns are a ring: a prompt that comes in takes the columns just before the next one,
and a mask says which columns belong to the row.

    column    0    1    2    3    4    5     P = 3, R = 4; column 1 comes next
    place 0   r0   ·    ·    p0   p1   p2    r1 is drawn, and will be run in column 1
    place 1   p2   ·    ·    ·    p0   p1    just came in: its r0 will be run there too

With `model.cache_pages` a place has no columns of its own. Its keys and values are in
pages of a pool that all places share (`page_table.py`): memory grows with the tokens
in use. A row without a free page waits, and draws its token in a later step.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.caches import at_end
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.experts import OWN
from rlhf_jax.models.generation import page_table, paged_caches, sampling
from rlhf_jax.models.generation.places import (
    Places,
    Responses,
    collect,
    come_in,
    empty,
    moved,
    none,
    recorded,
)
from rlhf_jax.models.generation.sampling import Decoder, Draw

Array = jax.Array
SHARE = 8  # prompts come in when an eighth of the places is free


def respond(
    decoder: Decoder,
    *,
    tokens: Array,
    mask: Array,
    keys: Array,
    places: int,
    max_new_tokens: int,
    draw: Draw,
    group_size: int,
    axis: str | None = None,
) -> Responses:
    """Samples a response to every prompt, `places` rows at a time.

    Args:
      tokens, mask: i32[N, P] and bool[N, P], left-padded prompts, equal in a group.
      keys: key[N], of the rows, independent of N.
      places: C, from group_size to N.
      group_size: neighbouring rows of the same prompt, which is run once.
      axis: axis of a `shard_map` whose shares must take equal steps (`sampling.run`);
        None: each by itself. Only for caches in pages.

    Returns:
      Responses[N, R], equal to those of a plain batch up to rounding, as each row is
      drawn with its own keys. Products of other sizes round differently, which changes
      a draw that falls between two tokens (at most one of 512 responses differed).

    Raises:
      InputError: fewer places than a group has rows, or more than there are rows.
    """
    model, (rows, prompt_size) = decoder.model, tokens.shape
    if not group_size <= places <= rows:
        raise InputError(
            f"continuous_batching: expected from {group_size} (the rows of one prompt) "
            f"to {rows} (all rows), got {places}; choose one of these, or None for a "
            f"place for every row"
        )
    arriving = prompts_at_a_time(
        model,
        places=places,
        prompt=prompt_size,
        new=max_new_tokens,
        group_size=group_size,
    )
    ring = prompt_size + max_new_tokens - 1  # the last token is never run
    paged = model.cache_pages is not None
    if model.cache_pages is not None:
        paged_caches.check(model, longest=ring)
    decoder = decoder.to_decode(rows=places)

    def keys_of(state: Places) -> Array:
        # An empty place has row N: any key will do, as its draw is not kept.
        return keys[jnp.minimum(state.row, rows - 1)]

    def prepare(tokens: Array, mask: Array, row: Array, column: Array) -> Places:
        """Runs prompts in the columns before `column`, and draws a token for each."""
        logits, caches, experts = sampling.read_prompts(
            decoder,
            tokens=tokens,
            mask=mask,
            group_size=group_size,
            columns=None if paged else ring,
            end=column,
        )
        state = Places(
            responses=none(row.shape[0], max_new_tokens, experts=experts),
            row=row,
            alive=jnp.ones(row.shape, bool),
            attend=None if paged else at_end(mask, size=ring, end=column, axis=1),
            caches=caches,
        )
        drawn = draw(
            logits,
            keys=keys_of(state),
            number=state.responses.lengths,
            predicted=mask[:, -1],
        )
        return recorded(state, drawn, going=state.alive)

    def advance(carry: tuple[Places, Array]) -> tuple[Places, Array]:
        """Runs the token drawn last, in `column` or in its page, and draws the next."""
        state, column = carry
        pages, attend, going = state.pages, state.attend, state.alive
        if pages is not None:
            pages, going = page_table.grant(pages, alive=going)
            seen = paged_caches.seen(pages, model=model, longest=ring, going=going)
            positions = pages.tokens
        else:
            assert attend is not None
            attend = seen = jax.lax.dynamic_update_slice_in_dim(
                attend, going[:, None], column % ring, axis=1
            )
            positions = jnp.maximum(attend.sum(axis=1, dtype=jnp.int32) - 1, 0)
        lengths = state.responses.lengths
        last = jnp.maximum(lengths - 1, 0)[:, None]
        drawn, [caches] = sampling.step(
            [decoder],
            [state.caches],
            tokens=jnp.take_along_axis(state.responses.tokens, last, axis=1)[:, 0],
            positions=positions,
            attend=seen,
            column=column,
            draw=draw,
            keys=keys_of(state),
            number=lengths,
            going=going,
        )
        state = dataclasses.replace(state, attend=attend, caches=caches)
        state = recorded(state, drawn, going=going)
        if pages is not None:
            pages = page_table.advanced(pages, going=going, alive=state.alive)
        return dataclasses.replace(state, pages=pages), column + 1

    def advance_until(
        state: Places,
        column: Array,
        *,
        until: Array | int,
        waiting: Array | None = None,
    ) -> tuple[Places, Array]:
        """Advances until at most `until` responses go on, and waiting prompts fit.

        Args:
          waiting: i32[A], tokens of the prompts that come next; below 0 for none.
        """

        def more(carry: tuple[Places, Array]) -> Array:
            state, _ = carry
            wanted = state.alive.sum() > until
            if waiting is not None and state.pages is not None:
                fit = page_table.admissible(
                    state.pages, lengths=waiting, new=max_new_tokens
                )
                wanted |= ~fit
            return wanted

        return sampling.run((state, column), advance=advance, more=more, axis=axis)

    def turn(
        carry: tuple[Places, Responses, Array],
        arrival: tuple[Array, Array, Array, Array, Array | None],
    ) -> tuple[tuple[Places, Responses, Array], None]:
        """Lets prompts in, then decodes until the next ones can come in."""
        state, done, column = carry
        tokens, mask, row, limit, waiting = arrival
        # A fixed number of places: shapes cannot depend on how many have finished.
        [free] = jnp.nonzero(~state.alive, size=arriving, fill_value=places)
        place = jnp.where(row < rows, free, places)
        done = collect(done, state, place=place)
        arrived = prepare(tokens, mask, row, column)
        state = come_in(
            state, arrived, place=place, mask=mask, model=model, longest=ring
        )
        state, column = advance_until(state, column, until=limit, waiting=waiting)
        return (state, done, column), None

    turns = -(-rows // arriving)
    sizes = (*fewer_places(places), 0)
    row = jnp.arange(turns * arriving, dtype=jnp.int32).reshape(turns, arriving)
    arrivals = (
        # The last turn may have fewer prompts: the rest are clipped, and marked by row
        # N below.
        jnp.take(tokens, row, axis=0, mode="clip"),
        jnp.take(mask, row, axis=0, mode="clip"),
        jnp.minimum(row, rows),
        # How many rows may go on when the next prompts come in, or when none is left.
        jnp.asarray(
            [
                *(places - min(arriving, rows - n * arriving) for n in range(1, turns)),
                sizes[0],
            ],
            jnp.int32,
        ),
        page_table.next_lengths(mask, row) if paged else None,
    )
    state = empty(
        # Only shapes: no prompt is run to make the empty places.
        jax.eval_shape(prepare, *(leaf[0] for leaf in arrivals[:3]), row[0, 0]),
        places=places,
        rows=rows,
        model=model,
        longest=ring,
    )
    experts = state.responses.experts
    if experts is not None:
        experts = jnp.full((rows, prompt_size, *experts.shape[2:]), OWN, jnp.int32)
    done = none(rows, max_new_tokens, experts=experts)
    carry = (state, done, jnp.zeros((), jnp.int32))
    (state, done, column), _ = jax.lax.scan(turn, carry, arrivals)
    # Once no prompt waits, the remaining rows move into fewer places: a step of 64 rows
    # for the last 4 would be mostly wasted.
    for size, limit in itertools.pairwise(sizes):
        done = collect(done, state, place=jnp.arange(state.row.shape[0]))
        state = moved(state, size=size, rows=rows, model=model, longest=ring)
        state, column = advance_until(state, column, until=limit)
    return collect(done, state, place=jnp.arange(state.row.shape[0]))


def prompts_at_a_time(
    model: ModelConfig, *, places: int, prompt: int, new: int, group_size: int
) -> int:
    """How many prompts come in at once: `refill_size`, or as many as fit the pages.

    Raises:
      InputError: not even one group fits, with its longest responses.
    """
    size = refill_size(places, group_size=group_size)
    if model.cache_pages is None:
        return size
    most = page_table.arrivals_at_most(
        model.cache_pages,
        size=model.page_size,
        prompt=prompt,
        new=new,
        group_size=group_size,
    )
    return min(size, most)


def refill_size(places: int, *, group_size: int) -> int:
    """How many prompts come in at once: an eighth of the places, in whole groups.

    With fewer, matrix products are too small; with more, places are idle for longer.
    """
    return group_size * max(1, places // SHARE // group_size)


def fewer_places(places: int) -> tuple[int, ...]:
    """Successive numbers of places once no prompt waits."""
    return tuple(size for size in (places // 4, places // 16) if size)
