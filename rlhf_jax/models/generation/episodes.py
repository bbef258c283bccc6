"""Episodes of several turns: places that draw, wait for an observation, and read it.

    place 0   p p p  a a E  o o  b b E          p: prompt, o: observed, E: a stop token
    place 1   p p    a a a a a E   . . .        waits for its observation
    column    0 1 2  3 4 5 ...                  of the row itself, without padding

`read` runs tokens that were not drawn, a prompt or an observation, a few columns at a
time, and draws the first token of the turn that follows. `advance` draws in all places
whose turn goes on. The cache is kept between turns: reading an observation runs only
its own tokens and the stop token before it.

Every row has its own columns, and all shapes are fixed. So the numbers of a row depend
on its own tokens and key, not on the time of an observation or on other rows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlhf_jax.models import cached_decoder
from rlhf_jax.models.cached_decoder import Seen
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import logits
from rlhf_jax.models.generation import episode_places, sampling
from rlhf_jax.models.generation.episode_places import Arrivals, Episodes
from rlhf_jax.models.generation.sampling import Decoder, Draw

Array = jax.Array


def read(
    decoder: Decoder, state: Episodes, arrivals: Arrivals, *, draw: Draw
) -> Episodes:
    """Reads the tokens that arrive, and draws the first token of turns that follow.

    Args:
      decoder: from `Decoder.to_decode` for C rows, once per rollout; it records experts
        if `state` has room for them.
      arrivals: Arrivals[A], for places whose turn has ended, or that are free.
      draw: its stop tokens end a turn, and are kept.

    Returns:
      Episodes[C]. Other places are unchanged.
    """
    params, model, layers, record = decoder
    place, size = arrivals.place, arrivals.tokens.shape[1]
    of = episode_places.rows(state, place)
    start = jnp.where(arrivals.begins, 0, of.length)
    cached = jnp.where(arrivals.begins, 0, of.cached)
    new = jnp.arange(size, dtype=jnp.int32)[None] < arrivals.count[:, None]
    length = start + arrivals.count
    blank = arrivals.begins[:, None]
    tokens = _written(of.tokens, arrivals.tokens, start)
    # One more column than arrives: the token drawn last has not been run.
    at = cached[:, None] + jnp.arange(size + 1, dtype=jnp.int32)[None]
    hidden, caches, chosen = cached_decoder.decode_step(
        params,
        layers=layers,
        model=model,
        tokens=_slice(tokens, cached, size=size + 1),
        positions=at,
        attend=_seen(at, length, columns=tokens.shape[1], model=model),
        caches=episode_places.begun(of.caches, arrivals.begins),
        column=cached,
        going=at < length[:, None],
        record=record,
    )
    last = jnp.maximum(length - 1 - cached, 0)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    of = dataclasses.replace(
        of,
        tokens=tokens,
        sampled=_written(of.sampled & ~blank, jnp.zeros_like(new), start),
        logprobs=_written(
            jnp.where(blank, 0.0, of.logprobs), jnp.zeros(new.shape), start
        ),
        entropy=_written(
            jnp.where(blank, 0.0, of.entropy), jnp.zeros(new.shape), start
        ),
        length=length,
        cached=length,
        prompt=jnp.where(arrivals.prompt, length, of.prompt),
        limit=length + arrivals.turn,
        drawing=arrivals.draws,
        keys=jnp.where(arrivals.begins, arrivals.keys, of.keys),
        caches=caches,
        experts=_recorded(of.experts, chosen, cached),
    )
    drawn = draw(
        logits(params, hidden, model=model, spread=True),
        keys=of.keys,
        number=of.length - of.prompt,
        predicted=length > 0,
    )
    return episode_places.put(state, episode_places.recorded(of, drawn), place=place)


def advance(
    decoder: Decoder,
    state: Episodes,
    *,
    until: Array,
    steps: Array,
    draw: Draw,
    axis: str | None = None,
) -> Episodes:
    """Draws until at most `until` turns go on, or for `steps` tokens.

    Args:
      decoder, draw: as in `read`.
      until: i32[], number of turns.
      steps: i32[], tokens of a row.
      axis: axis of a `shard_map` whose devices must take equal steps (`sampling.run`);
        None: each by itself.

    Returns:
      Episodes[C]. A place that draws nothing is unchanged, except for the last column
      of its cache.
    """
    columns, model = state.tokens.shape[1], decoder.model

    def more(carry: tuple[Episodes, Array]) -> Array:
        state, step = carry
        return (state.drawing.sum() > until) & (step < steps)

    def one_more(carry: tuple[Episodes, Array]) -> tuple[Episodes, Array]:
        state, step = carry
        # The column of the token drawn last. A place that draws nothing writes to a
        # column that nothing attends to: this step would round differently from `read`.
        column = jnp.where(state.drawing, state.length - 1, columns - 1)
        drawn, [caches] = sampling.step(
            [decoder],
            [state.caches],
            tokens=_slice(state.tokens, column, size=1)[:, 0],
            positions=column,
            attend=_seen(column[:, None], state.length, columns=columns, model=model),
            column=column,
            draw=draw,
            keys=state.keys,
            number=state.length - state.prompt,
            going=state.drawing,
        )
        chosen = None if drawn.experts is None else drawn.experts[:, None]
        state = dataclasses.replace(
            state,
            caches=caches,
            cached=jnp.where(state.drawing, state.length, state.cached),
            experts=_recorded(state.experts, chosen, column),
        )
        return episode_places.recorded(state, drawn), step + 1

    first = state, jnp.zeros((), jnp.int32)
    state, _ = sampling.run(first, advance=one_more, more=more, axis=axis)
    return state


def _seen(at: Array, length: Array, *, columns: int, model: ModelConfig) -> Seen:
    """What columns i32[B, N] see, in rows of W columns with i32[B] tokens."""
    column = jnp.arange(columns, dtype=jnp.int32)[None, None]
    everything = window = column <= at[:, :, None]
    if model.sliding_window is not None:
        window = everything & (column > at[:, :, None] - model.sliding_window)
    if not model.recurrent_layers:
        return Seen(everything, window)
    return Seen(everything, window, tokens=at < length[:, None])


def _slice(array: Array, start: Array, *, size: int) -> Array:
    """[B, size] of [B, W], from column i32[B] of each row."""
    return jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, size))(
        array, start
    )


def _recorded(
    experts: Array | None, chosen: Array | None, start: Array
) -> Array | None:
    """`_written` of experts, if they are recorded."""
    if experts is None or chosen is None:
        return None
    return _written(experts, chosen, start)


def _written(array: Array, new: Array, start: Array) -> Array:
    """Writes [B, N, ...] into [B, W, ...] from column i32[B] of each row."""
    return jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))(
        array, new.astype(array.dtype), start, 0
    )
