"""Prompts a few columns at a time, against the cache that they fill.

    column       0  1  2  3  4  5  6  7        chunks of 3, one column of padding
    chunk     ·  0  0  1  1  1  2  2  2
    sees               all columns so far

Activations are those of a chunk, [B, N, ...], and logits of attention [B, H, N, P], of
which a whole pass has [B, P, ...] and, where it holds them, [B, H, P, P].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models import axes, blocks, decoder, leaves
from rlhf_jax.models.attention import KeyValue
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.positions import angles, positions_of

Array = jax.Array
Params = Any


def prefill(
    params: Params, *, model: ModelConfig, tokens: Array, mask: Array
) -> tuple[Array, KeyValue]:
    """Hidden states of the last column, and keys and values for a cache.

    Args:
      model: with `prefill_chunk` N columns are run at a time, else all at once.
      tokens, mask: i32[B, P] and bool[B, P], left-padded prompts.

    Returns:
      [B, D] after the final norm, and keys and values [L, B, K, P, head_dim] each, in
      `model.dtype`; what stands at padding has no meaning.

    Raises:
      InputError: as `decoder.prefill`.
    """
    size, chunk = tokens.shape[1], model.prefill_chunk
    if chunk is None or chunk >= size:
        hidden, key_values = decoder.prefill(
            params, model=model, tokens=tokens, mask=mask, first_column=size - 1
        )
        return hidden[:, -1], key_values
    room = -size % chunk
    tokens, mask = (jnp.pad(x, ((0, 0), (room, 0))) for x in (tokens, mask))
    rows, columns = tokens.shape
    tokens, positions = jnp.where(mask, tokens, 0), positions_of(mask)
    number = jnp.arange(columns, dtype=jnp.int32)
    window = columns if model.sliding_window is None else model.sliding_window

    local_layers = jnp.asarray([model.is_local(n) for n in range(model.num_layers)])

    def run(caches: KeyValue, start: Array) -> tuple[KeyValue, Array]:
        def own(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1)

        at, here = own(positions), (start + jnp.arange(chunk, dtype=jnp.int32))[:, None]
        visible = mask[:, None] & (number[None] <= here)[None]
        near = visible & (number[None] > here - window)[None]
        everything, narrow = (
            angles(at, model=model, local=local) for local in (False, True)
        )

        def layer(x: Array, one: tuple[Params, KeyValue, Array]) -> tuple[Array, Any]:
            params, cache, local = one
            x, cache = blocks.Block(model).apply(
                {"params": leaves.read(params)},
                x,
                mask=jnp.where(local, near, visible),
                rotary=jax.tree.map(
                    lambda few, all_: jnp.where(local, few, all_), narrow, everything
                ),
                cache=cache,
                column=start,
            )
            return axes.rows_apart(x), cache

        x = decoder.embed(params, model=model, tokens=own(tokens), positions=at)
        x, caches = jax.lax.scan(
            layer,
            axes.rows_apart(x),
            (params["layers"], caches, local_layers),
        )
        return caches, x[:, -1]

    shape = (model.num_layers, rows, model.num_kv_heads, columns, model.head_dim)
    empty = jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype)
    starts = jnp.arange(0, columns, chunk, dtype=jnp.int32)
    caches, last = jax.lax.scan(run, empty, starts)
    hidden = decoder.final_norm(params, last[-1][:, None], model=model)[:, 0]
    key, value = (leaf[:, :, :, room:] for leaf in caches)
    return hidden, (key, value)
