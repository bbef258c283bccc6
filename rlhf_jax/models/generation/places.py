"""Places of continuous batching: responses come in, are drawn, move, are collected."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.models import axes
from rlhf_jax.models.caches import Caches
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.experts import OWN
from rlhf_jax.models.generation import page_table, paged_caches
from rlhf_jax.models.generation.page_table import PageTable
from rlhf_jax.models.generation.sampling import Drawn

Array = jax.Array


@flax.struct.dataclass
class Responses:
    """Responses from their first column on; 0 after their end."""

    tokens: Array  # i32[N, R]
    logprobs: Array  # f32[N, R], nats
    entropy: Array  # f32[N, R], nats
    lengths: Array  # i32[N], tokens of each response, the stop token included
    # i32[N, P + R, L, k], also of the prompt's columns, as in `decode.Generated`.
    experts: Array | None = None


@flax.struct.dataclass
class Places:
    """C places, with responses under way, or finished and not yet replaced."""

    responses: Responses  # [C, R], so far
    row: Array  # i32[C], number of the response's prompt; N before the first one
    alive: Array  # bool[C], True while the response goes on
    attend: Array | None  # bool[C, W], columns of the ring that belong to the row
    caches: Caches  # of every layer; W columns, or at most the window
    pages: PageTable | None = None  # owners of the caches' pages; None: rings


def none(rows: int, size: int, *, experts: Array | None = None) -> Responses:
    """Empty responses.

    Args:
      experts: i32[rows, P, L, k], of their prompts; None records no experts.
    """
    if experts is not None:
        room = ((0, 0), (0, size), (0, 0), (0, 0))
        experts = jnp.pad(experts, room, constant_values=OWN)
    return Responses(
        tokens=jnp.zeros((rows, size), jnp.int32),
        logprobs=jnp.zeros((rows, size), jnp.float32),
        entropy=jnp.zeros((rows, size), jnp.float32),
        lengths=jnp.zeros(rows, jnp.int32),
        experts=experts,
    )


def empty(
    shapes: Places, *, places: int, rows: int, model: ModelConfig, longest: int
) -> Places:
    """`places` free places, shaped like those of `shapes`."""
    if model.cache_pages is not None:
        shapes = dataclasses.replace(shapes, caches=())
    state = jax.tree.map(
        lambda leaf: axes.rows_apart(jnp.zeros((places, *leaf.shape[1:]), leaf.dtype)),
        shapes,
    )
    state = dataclasses.replace(state, row=jnp.full(places, rows, jnp.int32))
    if model.cache_pages is None:
        return state
    slots = page_table.pages_of(longest, size=model.page_size)
    pages = min(model.cache_pages, places * slots)
    return dataclasses.replace(
        state,
        caches=paged_caches.empty(model, places=places, pages=pages, longest=longest),
        pages=page_table.empty(
            places=places, pages=pages, size=model.page_size, longest=longest
        ),
    )


def recorded(state: Places, drawn: Drawn, *, going: Array) -> Places:
    """Records the token drawn in every place that is going, bool[C]."""
    lengths, size = state.responses.lengths, state.responses.tokens.shape[1]
    here = going[:, None] & (jnp.arange(size)[None] == lengths[:, None])
    experts = state.responses.experts
    if experts is not None and drawn.experts is not None:
        # The experts are those of the token before, which was run to draw this one.
        ran = jnp.where(going, experts.shape[1] - size + lengths - 1, experts.shape[1])
        experts = jax.vmap(lambda old, at, new: old.at[at].set(new, mode="drop"))(
            experts, ran, drawn.experts
        )
    lengths = lengths + going
    responses = drawn.put(state.responses, here=here)
    return dataclasses.replace(
        state,
        responses=dataclasses.replace(responses, lengths=lengths, experts=experts),
        # A response ends with a stop token, or in its last column.
        alive=state.alive & ~(drawn.stops & going) & (lengths < size),
    )


def come_in(
    state: Places,
    arrived: Places,
    *,
    place: Array,
    mask: Array,
    model: ModelConfig,
    longest: int,
) -> Places:
    """Puts prompts into free places.

    Args:
      state: has pages for these prompts (`page_table.admissible`).
      arrived: [A], prompts with their caches, not in pages.
      place: i32[A], the place of each; C is none.
      mask: bool[A, P], tokens of the prompts.
    """

    def put(old: Places, new: Places) -> Places:
        # Place C is out of bounds, so that its update is dropped.
        return jax.tree.map(
            lambda old, new: old.at[place].set(new, mode="drop"), old, new
        )

    if state.pages is None:
        return put(state, arrived)
    lengths = mask.sum(axis=1, dtype=jnp.int32)
    pages, page = page_table.admit(
        state.pages,
        place=place,
        # A response may end with its first token.
        lengths=jnp.where(arrived.alive & (place < state.row.shape[0]), lengths, -1),
        new=longest - mask.shape[1] + 1,
    )
    caches = paged_caches.filled(
        state.caches,
        arrived.caches,
        model=model,
        lengths=lengths,
        longest=longest,
        page=page,
        place=place,
    )
    return dataclasses.replace(
        put(
            dataclasses.replace(state, caches=(), pages=None),
            dataclasses.replace(arrived, caches=()),
        ),
        caches=caches,
        pages=pages,
    )


def moved(
    state: Places, *, size: int, rows: int, model: ModelConfig, longest: int
) -> Places:
    """Moves the responses that go on, at most `size`, into `size` places."""
    [going] = jnp.nonzero(state.alive, size=size)  # filled up with copies of place 0
    kept = jnp.arange(size) < state.alive.sum()
    pages, caches = state.pages, state.caches
    if pages is not None:
        slots = pages.table.shape[1]
        pages, page = page_table.moved(
            pages,
            alive=state.alive,
            places=size,
            pages=min(pages.owner.shape[0], size * slots),
        )
        caches = paged_caches.moved(
            caches, model=model, longest=longest, page=page, place=going
        )
        state = dataclasses.replace(state, caches=(), pages=None)
    state = jax.tree.map(lambda leaf: axes.rows_apart(leaf[going]), state)
    state = dataclasses.replace(state, row=jnp.where(kept, state.row, rows), alive=kept)
    if pages is None:
        return state
    return dataclasses.replace(state, caches=caches, pages=pages)


def collect(done: Responses, state: Places, *, place: Array) -> Responses:
    """Writes the responses in some places into `done`."""
    nowhere = done.lengths.shape[0]
    row = state.row.at[place].get(mode="fill", fill_value=nowhere)
    return jax.tree.map(
        lambda old, new: old.at[row].set(
            new.at[place].get(mode="fill", fill_value=0), mode="drop"
        ),
        done,
        state.responses,
    )
