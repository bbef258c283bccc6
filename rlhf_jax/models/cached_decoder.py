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

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from rlhf_jax.models import axes, blocks, decoder, leaves, per_layer
from rlhf_jax.models.attention import Pages
from rlhf_jax.models.caches import Caches, DeltaState, Kept, KeyValue, blank_state, near
from rlhf_jax.models.config import ATTENTIONS, ModelConfig
from rlhf_jax.models.experts import Given
from rlhf_jax.models.layers import Sights, block_of, in_periods, unstack
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
    mix = params["embed"].get("per_layer_mix")
    if mix is not None and not leaves.is_stored(mix["kernel"]):
        kernel = mix["kernel"].astype(model.dtype)
        kernel = axes.beside_kernel(kernel, ("per_layer_mix", "kernel"))
        mix = {**mix, "kernel": kernel}
        params = {**params, "embed": {**params["embed"], "per_layer_mix": mix}}
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
    going: Array | None = None,
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
      going: bool[B, N], False at tokens whose hidden state has no use, as those of a
        row that has ended: they go to no expert of a mixture. None: all are of use.

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
    rotary = near_rotary = angles(positions, model=model)
    if model.sliding_window is not None:
        near_rotary = angles(positions, model=model, local=True)
    sights = Sights(
        everything=(attend.everything, rotary),
        window=(attend.window, near_rotary),
        recurrent=attend.tokens,
    )
    x = decoder.embed(params, model=model, tokens=tokens, positions=positions)
    own_inputs = None
    if model.per_layer_width is not None:
        own_inputs = per_layer.inputs(params, x, model=model, tokens=tokens)
    updated: list[Kept] = []
    chosen = []
    given = Given(None if model.experts is None else going, record=record)
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        (mask, rotary), source = sights.of(number, model=model), model.source(number)
        cache: Any = cache if source is None else updated[source]
        at = column
        if not isinstance(cache, DeltaState):
            # A cache of W places is a ring; a local layer has as many as its window.
            at = column % cache[0].shape[2]
        (x, kept), routing = blocks.apply(
            block_of(model, number),
            leaves.read(layer),
            x,
            experts=given,
            mask=mask,
            rotary=rotary,
            cache=cache,
            column=at,
            per_layer=None if own_inputs is None else own_inputs[number],
        )
        updated.append(kept if source is None else ())
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
      [B, D] after the final norm; {module: keys and values of P columns}, as
      `layers.run`, in `model.dtype`; with `record` experts i32[B, P, L, k], `OWN` at
      padding. Other values at padding have no meaning.

    Raises:
      InputError: as `decoder.prefill`.
    """
    size, chunk = tokens.shape[1], model.prefill_chunk
    if chunk is None or chunk >= size:
        hidden, kept, routing = decoder.prefill(
            params,
            model=model,
            tokens=tokens,
            mask=mask,
            first_column=size - 1,
            record=record,
        )
        chosen = None if routing is None else routing.chosen
        return hidden[:, -1], kept, chosen
    # Pads on the left, where prompts are padded anyway: all chunks have one shape.
    room = -size % chunk
    tokens, mask = (jnp.pad(x, ((0, 0), (room, 0))) for x in (tokens, mask))
    rows, columns = tokens.shape
    tokens, positions = jnp.where(mask, tokens, 0), positions_of(mask)
    number = jnp.arange(columns, dtype=jnp.int32)
    window = columns if model.sliding_window is None else model.sliding_window

    local_layers = jnp.asarray([model.is_local(n) for n in range(model.num_layers)])

    def run(caches: Any, start: Array) -> tuple[Any, Any]:
        def own(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1)

        given = Given(None if model.experts is None else own(mask), record=record)
        at, here = own(positions), (start + jnp.arange(chunk, dtype=jnp.int32))[:, None]
        visible = mask[:, None] & (number[None] <= here)[None]
        # bool[B, N, P], for local layers: columns within the window of each new one.
        near = visible & (number[None] > here - window)[None]
        everything, narrow = (
            angles(at, model=model, local=local) for local in (False, True)
        )
        sights = Sights(
            (visible, everything),
            (near, narrow),
            recurrent=own(mask) if model.recurrent_layers else None,
        )

        def layer(
            x: Array, one: Sequence[Any], number: int, shared: Any
        ) -> tuple[Array, dict[str, Any]]:
            (params, kept, inputs), module = one, model.mixer(number)
            sees: Any
            rotary: Any
            sees, rotary = sights.of(number, model=model)
            if "local" in inputs:
                sees, rotary = jax.tree.map(
                    functools.partial(jnp.where, inputs["local"]),
                    sights.window,
                    sights.everything,
                )
            if "unrotated" in inputs:
                rotary = unless(inputs["unrotated"], rotary)
            source: Any = shared.get(model.is_local(number))
            (x, cache), routing = blocks.apply(
                block_of(model, number),
                leaves.read(params),
                x,
                experts=given,
                mask=sees,
                rotary=rotary,
                cache=kept[module] if source is None else source,
                column=start,
                per_layer=inputs.get("per_layer"),
            )
            new = {module: cache} if source is None else {}
            new |= {} if routing is None else {"chosen": routing.chosen}
            return axes.rows_apart(x), new

        x = decoder.embed(params, model=model, tokens=own(tokens), positions=at)
        inputs = {}
        if model.per_layer_width is not None:
            own_inputs = per_layer.inputs(params, x, model=model, tokens=own(tokens))
            inputs["per_layer"] = own_inputs
        if not model.by_kind:  # one loop over all layers: arrays say which is what
            inputs["local"] = local_layers
            if model.unrotated_layers:
                inputs["unrotated"] = jnp.asarray(model.unrotated_layers)
        stacks = params["layers"], caches, inputs
        x, caches = in_periods(layer, axes.rows_apart(x), stacks, model=model)
        chosen = caches.pop("chosen", None)
        return caches, (x[:, -1], chosen)

    blank = _blank(model, rows=rows, columns=columns)
    starts = jnp.arange(0, columns, chunk, dtype=jnp.int32)
    # One chunk after another: each attends to the cache of those before.
    caches, (last, chosen) = jax.lax.scan(run, blank, starts)
    hidden = decoder.final_norm(params, last[-1][:, None], model=model)[:, 0]

    def own_columns(kept: Any) -> Any:
        """Without the added padding: P columns, as after a whole pass."""
        if isinstance(kept, DeltaState):
            return kept
        return tuple(x[:, :, :, room:] for x in kept)

    if chosen is not None:  # [chunks, L, B, N, k]
        chosen = jnp.moveaxis(chosen, (2, 0, 3, 1), (0, 1, 2, 3))
        chosen = chosen.reshape(rows, columns, *chosen.shape[3:])[:, room:]
    return hidden, {name: own_columns(kept) for name, kept in caches.items()}, chosen


def _blank(model: ModelConfig, *, rows: int, columns: int) -> dict[str, Any]:
    """What `layers.run` keeps, before the first column: zeros."""

    def zeros(layers: Sequence[int]) -> KeyValue:
        own = model.at(layers[0])
        shape = (len(layers), rows, own.num_kv_heads, columns, own.head_dim)
        return jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype)

    blank: dict[str, Any] = {
        name: zeros(layers)
        for name in ATTENTIONS
        if (layers := model.layers_of(name)) and model.source(layers[0]) is None
    }
    if model.recurrent_layers:
        states = [blank_state(model, rows=rows)] * len(model.layers_of("delta_net"))
        blank["delta_net"] = jax.tree.map(lambda *parts: jnp.stack(parts), *states)
    return blank
