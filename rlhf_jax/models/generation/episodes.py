"""Episodes of several turns: places that draw, wait for an answer, and read it.

    place 0   p p p  a a E  o o  b b E          p: prompt, o: observed, E: a stop token
    place 1   p p    a a a a a E   . . .        waits for its answer
    column    0 1 2  3 4 5 ...                  of the row itself, without padding

`read` runs what stands in a row and was not drawn, its prompt or an observation, a few
columns at a time, and draws the first token of a turn behind it. `advance` draws on in
all places whose turn has not ended. The cache is kept: of an observation only its own
tokens are run, and the stop token before it.

Every row has its own columns, and all shapes are fixed. So the numbers of a row depend
on its own tokens and key, and not on when an answer came or who stood beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional.unused_ids import Ranges
from rlhf_jax.models import blocks, decoder, heads, leaves
from rlhf_jax.models.caches import Caches
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation import episode_places
from rlhf_jax.models.generation.episode_places import Arrivals, Episodes
from rlhf_jax.models.generation.sampling import Shaping, sample_token
from rlhf_jax.models.positions import angles

Array = jax.Array
Params = Any


def read(
    params: Params,
    state: Episodes,
    arrivals: Arrivals,
    *,
    layers: Sequence[Params],
    model: ModelConfig,
    stop_ids: tuple[int, ...],
    temperature: float,
    shaping: Shaping | None = None,
) -> Episodes:
    """The places with those columns read, and a token drawn behind them where asked.

    Args:
      params: the decoder's.
      state: Episodes[C].
      arrivals: Arrivals[A], for places whose turn has ended, or that are free.
      layers: of `cached_decoder.layers_to_decode` for C rows, once per rollout.
      model: static.
      stop_ids: tokens that end a turn, themselves kept.
      temperature: divides the logits, dimensionless.
      shaping: for evaluation only.

    Returns:
      Episodes[C]. Places that nothing arrives in are as they were.
    """
    place, size = arrivals.place, arrivals.tokens.shape[1]
    of = episode_places.rows(state, place)
    start = jnp.where(arrivals.begins, 0, of.length)
    cached = jnp.where(arrivals.begins, 0, of.cached)
    new = jnp.arange(size, dtype=jnp.int32)[None] < arrivals.count[:, None]
    length = start + arrivals.count
    blank = arrivals.begins[:, None]
    tokens = _written(of.tokens, arrivals.tokens, start)
    # One more than arrives: the token drawn last has not been run.
    hidden, caches = _extend(
        params,
        _slice(tokens, cached, size=size + 1),
        layers=layers,
        model=model,
        start=cached,
        caches=of.caches,
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
    )
    of = _drawn(
        of,
        heads.logits(params, hidden, model=model, spread=True),
        stop_ids=stop_ids,
        temperature=temperature,
        shaping=shaping,
        predicted=length > 0,
        unused=model.unused_ids,
    )
    return episode_places.put(state, of, place=place)


def advance(
    params: Params,
    state: Episodes,
    *,
    until: Array,
    steps: Array,
    layers: Sequence[Params],
    model: ModelConfig,
    stop_ids: tuple[int, ...],
    temperature: float,
    shaping: Shaping | None = None,
    axis: str | None = None,
) -> Episodes:
    """Draws on until at most so many turns go on, or for so many tokens.

    Args:
      params: the decoder's.
      state: Episodes[C].
      until: i32[], turns that go on.
      steps: i32[], tokens.
      layers, model, stop_ids, temperature, shaping: the arguments of `read`.
      axis: of a `shard_map`, along which all go on until none has too many turns, as
        devices that exchange something must for every token; None is each by itself.

    Returns:
      Episodes[C]. Of a place that draws nothing, all but the last column of its cache
      is as it was.
    """

    def too_many(state: Episodes) -> Array:
        found = state.drawing.sum() > until
        return found if axis is None else jax.lax.psum(found, axis) > 0

    def more(carry: tuple[Episodes, Array, Array]) -> Array:
        _, step, wanted = carry
        return wanted & (step < steps)

    def draw(carry: tuple[Episodes, Array, Array]) -> tuple[Episodes, Array, Array]:
        state, step, _ = carry
        # What was drawn last. A place that draws nothing writes where none attends: in
        # its own columns this step would round otherwise than `read`, which ran them.
        columns = state.tokens.shape[1]
        column = jnp.where(state.drawing, state.length - 1, columns - 1)
        hidden, caches = _extend(
            params,
            _slice(state.tokens, column, size=1),
            layers=layers,
            model=model,
            start=column,
            caches=state.caches,
        )
        state = dataclasses.replace(
            state,
            caches=caches,
            cached=jnp.where(state.drawing, state.length, state.cached),
        )
        logits = heads.logits(params, hidden[:, 0], model=model, spread=True)
        state = _drawn(
            state,
            logits,
            stop_ids=stop_ids,
            temperature=temperature,
            shaping=shaping,
        )
        return state, step + 1, too_many(state)

    first = state, jnp.zeros((), jnp.int32), too_many(state)
    state, _, _ = jax.lax.while_loop(more, draw, first)
    return state


def _drawn(
    state: Episodes,
    logits: Array,
    *,
    stop_ids: tuple[int, ...],
    temperature: float,
    shaping: Shaping | None,
    predicted: Array | None = None,
    unused: Ranges = (),
) -> Episodes:
    """A token more in every place whose turn goes on.

    Args:
      predicted: bool[C], a token stands before it; None is everywhere. Nothing predicts
        the first token of an empty prompt.
      unused: ids that no token has, which it leaves out.
    """
    number = state.length - state.prompt
    token, logprob, entropy = sample_token(
        logits,
        keys=jax.vmap(jax.random.fold_in)(state.keys, number),
        temperature=temperature,
        shaping=shaping,
        predicted=predicted,
        unused=unused,
    )
    columns = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None]
    here = state.drawing[:, None] & (columns == state.length[:, None])

    def put(old: Array, new: Array) -> Array:
        return jnp.where(here, new[:, None], old)

    length = state.length + state.drawing
    stopped = jnp.isin(token, jnp.asarray(stop_ids, jnp.int32))
    return dataclasses.replace(
        state,
        tokens=put(state.tokens, token),
        sampled=state.sampled | here,
        logprobs=put(state.logprobs, logprob),
        entropy=put(state.entropy, entropy),
        length=length,
        drawing=state.drawing & ~stopped & (length < state.limit),
    )


def _extend(
    params: Params,
    tokens: Array,
    *,
    layers: Sequence[Params],
    model: ModelConfig,
    start: Array,
    caches: Caches,
) -> tuple[Array, Caches]:
    """Hidden states of new tokens, against the columns before them.

    Args:
      tokens: i32[B, N].
      start: i32[B], the column of the first.
      caches: of every layer, W columns each.

    Returns:
      [B, N, D] after the final norm, and the caches with the new columns.
    """
    at = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    columns = jnp.arange(caches[0][0].shape[2], dtype=jnp.int32)[None, None]
    seen = columns <= at[:, :, None]
    everything = local = seen, angles(at, model=model)
    if model.sliding_window is not None:
        near = seen & (columns > at[:, :, None] - model.sliding_window)
        local = near, angles(at, model=model, local=True)
    x = decoder.embed(params, model=model, tokens=tokens, positions=at)
    updated = []
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        mask, rotary = local if model.is_local(number) else everything
        x, cache = blocks.Block(model).apply(
            {"params": leaves.read(layer)},
            x,
            mask=mask,
            rotary=rotary,
            cache=cache,
            column=start,
        )
        updated.append(cache)
    return decoder.final_norm(params, x, model=model), tuple(updated)


def _slice(array: Array, start: Array, *, size: int) -> Array:
    """[B, size] of [B, W], from a column of each row on."""
    return jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, size))(
        array, start
    )


def _written(array: Array, new: Array, start: Array) -> Array:
    """[B, W] with [B, N] from a column of each row on."""
    return jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))(
        array, new.astype(array.dtype), start, 0
    )
