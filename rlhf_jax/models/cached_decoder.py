"""Runs the decoder a few tokens at a time, against a cache of keys and values.

The stacked layers are taken apart once, before the loop: slicing the stack at every
token costs more than the layer itself. Decoding so holds a second copy of the layers.

Prompts may be read N columns at a time. Activations are then [B, N, ...] and attention
logits [B, H, N, P], instead of [B, P, ...] and, with the xla engine, [B, H, P, P]:

    column       0  1  2  3  4  5  6  7        chunks of 3, one column of padding
    chunk     ·  0  0  1  1  1  2  2  2
    sees               all columns so far
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from rlhf_jax.models import axes, blocks, decoder, leaves
from rlhf_jax.models.attention import KeyValue, Pages
from rlhf_jax.models.caches import Caches, DeltaState, Kept, blank_state, near
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.experts import Given
from rlhf_jax.models.layers import block_of, in_periods, unstack
from rlhf_jax.models.positions import angles, positions_of, unless

Array = jax.Array
Params = Any


class Seen(NamedTuple):
    """What new tokens attend to: bool[B, N, W] over cached columns, or pages."""

    everything: Array | Pages  # for layers that see all columns
    window: Array | Pages  # for local layers
    # bool[B, N], True at tokens, for recurrent layers, whose state padding must not
    # change. None: all are tokens.
    tokens: Array | None = None


def params_to_decode(params: Params, *, model: ModelConfig) -> Params:
    """Converts the output head to `model.dtype`, once, before the decode loop.

    A GPU's compiler would convert it at every token.
    """
    table, name = ("embed", "tokens") if model.tied_head else ("head", "kernel")
    head = params[table][name]
    if leaves.is_stored(head):
        return params
    return {**params, table: {**params[table], name: head.astype(model.dtype)}}


def layers_to_decode(
    params: Params, *, model: ModelConfig, rows: int
) -> tuple[Params, ...]:
    """Converts the layers to what `decode_step` reads fastest, once, before the loop.

    Args:
      rows: B, of that step.

    Returns:
      L layers, with matrices in `model.dtype`. For at most `model.transposed_rows` rows
      every "kernel" [in, out] that is a plain array is replaced by a "transposed"
      [out, in].
    """

    def ready(layer: Params) -> Params:
        flat: Any = traverse_util.flatten_dict(layer)
        for path, leaf in tuple(flat.items()):
            if leaves.is_stored(leaf) or leaf.ndim < 2:  # norms compute in float32
                continue
            flat[path] = axes.beside_kernel(leaf.astype(model.dtype), path)
            matrix = path[-1] == "kernel" and leaf.ndim == 2  # not one of each expert
            if matrix and rows <= model.transposed_rows:
                flat[*path[:-1], "transposed"] = flat.pop(path).T
        return traverse_util.unflatten_dict(flat)

    return tuple(map(ready, unstack(params["layers"], model=model)))


def decode_step(
    params: Params,
    *,
    layers: Sequence[Params],
    model: ModelConfig,
    tokens: Array,
    positions: Array,
    attend: Array | Seen,
    caches: Sequence[Kept],
    column: Array,
    record: bool = False,
) -> tuple[Array, Caches, Array | None]:
    """Runs N new tokens of every row, usually one, against the cache.

    Args:
      params: from `params_to_decode`; the stacked "layers" are not read.
      layers: from `layers_to_decode`.
      tokens, positions: i32[B, N], the new tokens and the number of tokens before each.
      attend: what the tokens see. With one new token per row, in the same column, this
        may be bool[B, W], the columns that it sees, its own included.
      caches: keys and values of every layer as `caches.py` lays them out, or pages; the
        state of a recurrent layer.
      column: i32[], the number of the first new column, the same in all rows, or
        i32[B], one per row; not read with pages.

    Returns:
      Hidden states [B, N, D] after the final norm, in `model.dtype`; the caches with
      the new columns written; and with `record` the experts of the tokens,
      i32[B, N, L, k].
    """
    if not isinstance(attend, Seen):
        everything = window = attend[:, None]
        if model.sliding_window is not None:
            window = near(attend, window=model.sliding_window, column=column)[:, None]
        attend = Seen(everything, window)
    far = local = angles(positions, model=model)
    if model.sliding_window is not None:
        local = angles(positions, model=model, local=True)
    x = decoder.embed(params, model=model, tokens=tokens, positions=positions)
    updated: list[Kept] = []
    chosen = []
    recording = Given(tokens=jnp.ones(tokens.shape, bool) if record else None)
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        if isinstance(cache, DeltaState):
            output: Any = block_of(model, recurrent=True).apply(
                {"params": leaves.read(layer)},
                x,
                mask=attend.tokens,
                rotary=None,
                cache=cache,
            )
            x, state = output
            updated.append(state)
            continue
        is_local = model.is_local(number)
        rotary = local if is_local else far
        (x, key_values), routing = blocks.apply(
            blocks.Block(model),
            leaves.read(layer),
            x,
            experts=recording,
            mask=attend.window if is_local else attend.everything,
            rotary=None if model.is_unrotated(number) else rotary,
            cache=cache,
            # A cache of W places is a ring; a local layer has as many as its window.
            column=column % cache[0].shape[2],
        )
        updated.append(key_values)
        if routing is not None:
            chosen.append(routing.chosen)
    hidden = decoder.final_norm(params, x, model=model)
    return hidden, tuple(updated), jnp.stack(chosen, axis=2) if record else None


def prefill(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    record: bool = False,
) -> tuple[Array, Any, Array | None]:
    """Runs prompts, for hidden states of the last column and the caches of all layers.

    Args:
      model: `prefill_chunk` says how many columns run at a time; None is all.
      tokens, mask: i32[B, P] and bool[B, P], left-padded prompts.

    Returns:
      [B, D] after the final norm; keys and values [L, B, K, P, head_dim] each, in
      `model.dtype`, or with recurrent layers the dictionary that `layers.run` returns;
      with `record` experts i32[B, P, L, k]. Values at padding have no meaning.

    Raises:
      InputError: as `decoder.prefill`.
    """
    size, chunk = tokens.shape[1], model.prefill_chunk
    if chunk is None or chunk >= size:
        hidden, key_values, routing = decoder.prefill(
            params,
            model=model,
            tokens=tokens,
            mask=mask,
            first_column=size - 1,
            record=record,
        )
        chosen = None if routing is None else routing.chosen
        return hidden[:, -1], key_values, chosen
    # Pads on the left, where prompts are padded anyway: all chunks have one shape.
    room = -size % chunk
    tokens, mask = (jnp.pad(x, ((0, 0), (room, 0))) for x in (tokens, mask))
    rows, columns = tokens.shape
    tokens, positions = jnp.where(mask, tokens, 0), positions_of(mask)
    number = jnp.arange(columns, dtype=jnp.int32)
    window = columns if model.sliding_window is None else model.sliding_window

    local_layers = jnp.asarray([model.is_local(n) for n in range(model.num_layers)])
    unrotated = jnp.asarray(model.unrotated_layers) if model.unrotated_layers else None

    def run(caches: Any, start: Array) -> tuple[Any, Any]:
        def own(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1)

        at, here = own(positions), (start + jnp.arange(chunk, dtype=jnp.int32))[:, None]
        visible = mask[:, None] & (number[None] <= here)[None]
        # bool[B, N, P], for local layers: columns within the window of each new one.
        near = visible & (number[None] > here - window)[None]
        everything, narrow = (
            angles(at, model=model, local=local) for local in (False, True)
        )

        def layer(
            x: Array, one: tuple[Params, KeyValue, Any, Any]
        ) -> tuple[Array, Any]:
            params, cache, local, unrotated = one
            sees = jnp.where(local, near, visible)
            rotary: Any = jax.tree.map(
                lambda few, all_: jnp.where(local, few, all_), narrow, everything
            )
            if unrotated is not None:
                rotary = unless(unrotated, rotary)
            (x, cache), routing = blocks.apply(
                blocks.Block(model),
                leaves.read(params),
                x,
                experts=Given(tokens=own(mask) if record else None),
                mask=sees,
                rotary=rotary,
                cache=cache,
                column=start,
            )
            chosen = None if routing is None else routing.chosen
            return axes.rows_apart(x), (cache, chosen)

        def of_kinds(
            x: Array, one: Sequence[Any], number: int
        ) -> tuple[Array, dict[str, Any]]:
            params, kept = one
            if not model.is_recurrent(number):
                no_positions = jnp.asarray(True) if model.is_unrotated(number) else None
                flags = jnp.asarray(model.is_local(number)), no_positions
                x, (cache, _) = layer(x, (params, kept["attention"], *flags))
                return x, {"attention": cache}
            x, state = block_of(model, recurrent=True).apply(
                {"params": leaves.read(params)},
                x,
                mask=own(mask),
                rotary=None,
                cache=kept["delta_net"],
            )
            return axes.rows_apart(x), {"delta_net": state}

        x = decoder.embed(params, model=model, tokens=own(tokens), positions=at)
        x, chosen = axes.rows_apart(x), None
        if model.recurrent_layers:
            stacks = params["layers"], caches
            x, caches = in_periods(
                of_kinds, x, stacks, model=model, period=model.period
            )
        else:
            x, (caches, chosen) = jax.lax.scan(
                layer, x, (params["layers"], caches, local_layers, unrotated)
            )
        return caches, (x[:, -1], chosen)

    of_attention = len(model.layers_of("attention"))
    shape = (of_attention, rows, model.num_kv_heads, columns, model.head_dim)
    empty: Any = jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype)
    if model.recurrent_layers:
        states = [blank_state(model, rows=rows)] * len(model.layers_of("delta_net"))
        empty = {
            "attention": empty,
            "delta_net": jax.tree.map(lambda *parts: jnp.stack(parts), *states),
        }
    starts = jnp.arange(0, columns, chunk, dtype=jnp.int32)
    # One chunk after another: each attends to the cache of those before.
    caches, (last, chosen) = jax.lax.scan(run, empty, starts)
    hidden = decoder.final_norm(params, last[-1][:, None], model=model)[:, 0]
    # Drops the added padding: caches hold P columns, as after a whole pass.
    key, value = caches["attention"] if model.recurrent_layers else caches
    key_values = key[:, :, :, room:], value[:, :, :, room:]
    if model.recurrent_layers:
        return hidden, caches | {"attention": key_values}, None
    if chosen is not None:  # [chunks, L, B, N, k]
        chosen = jnp.moveaxis(chosen, (2, 0, 3, 1), (0, 1, 2, 3))
        chosen = chosen.reshape(rows, columns, *chosen.shape[3:])[:, room:]
    return hidden, key_values, chosen
