"""Places of episodes: their state, tokens that arrive, and copies of a prompt."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.models.caches import Caches, DeltaState, blank
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation.sampling import Drawn

Array = jax.Array


@flax.struct.dataclass
class Episodes:
    """C places, each with the row of an episode; donate it."""

    tokens: Array  # i32[C, W], without padding; no meaning from `length` on
    sampled: Array  # bool[C, W], True if drawn, False for prompts and observations
    logprobs: Array  # f32[C, W], nats, of the distribution each token was drawn from
    entropy: Array  # f32[C, W], nats, of that distribution
    length: Array  # i32[C], tokens so far
    cached: Array  # i32[C], columns in the cache, without the token drawn last
    prompt: Array  # i32[C], tokens of the prompt
    limit: Array  # i32[C], length at which the turn is cut
    drawing: Array  # bool[C], True while the turn goes on
    keys: Array  # key[C], of the rows
    caches: Caches  # of every layer, W columns each
    # i32[C, W, L, k], of the tokens that have been run: no meaning from `cached` on.
    # None unless requested.
    experts: Array | None = None


@flax.struct.dataclass
class Arrivals:
    """Tokens that A places are to read, at most N in each."""

    place: Array  # i32[A]; C is none
    tokens: Array  # i32[A, N]
    count: Array  # i32[A], number of tokens
    begins: Array  # bool[A], True if a new episode begins with them
    prompt: Array  # bool[A], True if they belong to its prompt
    draws: Array  # bool[A], True if a turn follows, False if more tokens do
    turn: Array  # i32[A], most tokens of the turn
    keys: Array  # key[A], of the rows


def empty(
    model: ModelConfig,
    *,
    places: int,
    columns: int,
    key: Array,
    record_experts: bool = False,
) -> Episodes:
    """Places without an episode.

    Args:
      columns: W, the columns of the longest row plus those that `read` takes at a time.
      key: key[], any key.
      record_experts: make room for the experts of every token of a mixture.
    """
    experts = None
    if record_experts:
        assert model.experts is not None  # recipes require it for replay
        shape = (places, columns, model.num_layers, model.experts.per_token)
        experts = jnp.zeros(shape, jnp.int32)

    return Episodes(
        tokens=jnp.zeros((places, columns), jnp.int32),
        sampled=jnp.zeros((places, columns), bool),
        logprobs=jnp.zeros((places, columns), jnp.float32),
        entropy=jnp.zeros((places, columns), jnp.float32),
        length=jnp.ones(places, jnp.int32),
        cached=jnp.zeros(places, jnp.int32),
        prompt=jnp.zeros(places, jnp.int32),
        limit=jnp.zeros(places, jnp.int32),
        drawing=jnp.zeros(places, bool),
        keys=jnp.broadcast_to(key, (places,)),
        caches=tuple(
            blank(model, layer, rows=places, columns=columns)
            for layer in range(model.num_layers)
        ),
        experts=experts,
    )


def rows(state: Episodes, place: Array) -> Episodes:
    """Episodes[A] of Episodes[C], those in places i32[A]."""
    inside = jnp.minimum(place, state.length.shape[0] - 1)
    return jax.tree.map(lambda leaf: leaf[inside], state)


def begun(caches: Caches, begins: Array) -> Caches:
    """Resets the caches of rows in which a new episode begins, bool[A].

    Only recurrent states: columns are written before they are attended to.
    """

    def blank(leaf: Array) -> Array:
        at = begins.reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(at, jnp.zeros_like(leaf), leaf)

    return tuple(
        jax.tree.map(blank, kept) if isinstance(kept, DeltaState) else kept
        for kept in caches
    )


def put(state: Episodes, rows: Episodes, *, place: Array) -> Episodes:
    """Puts Episodes[A] into places i32[A]; C is none."""
    return jax.tree.map(
        lambda old, row: old.at[place].set(row, mode="drop"), state, rows
    )


def recorded(state: Episodes, drawn: Drawn) -> Episodes:
    """Records the token drawn in every place whose turn goes on."""
    columns = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None]
    here = state.drawing[:, None] & (columns == state.length[:, None])
    length = state.length + state.drawing
    return dataclasses.replace(
        drawn.put(state, here=here),
        sampled=state.sampled | here,
        length=length,
        drawing=state.drawing & ~drawn.stops & (length < state.limit),
    )


def copied(state: Episodes, *, source: Array, place: Array, keys: Array) -> Episodes:
    """Copies places that have read a prompt to others.

    Args:
      source: i32[A], places that have read it.
      place: i32[A], places to copy to; C is none.
      keys: key[A], of the copies.
    """
    return put(state, dataclasses.replace(rows(state, source), keys=keys), place=place)
