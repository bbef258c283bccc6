"""The decoder a few tokens at a time, against a cache of keys and values.

The layers are taken apart once, before the loop: slicing the stack at every token costs
more than the layer itself. This takes a second copy of them while tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import traverse_util

from rlhf_jax.models import blocks, decoder, leaves
from rlhf_jax.models.attention import Cached, Pages
from rlhf_jax.models.caches import near
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.layers import unstack
from rlhf_jax.models.positions import angles

Array = jax.Array
Params = Any


class Seen(NamedTuple):
    """What new tokens see: bool[B, N, W] of cached columns, or pages."""

    everything: Array | Pages  # of layers that see all columns
    window: Array | Pages  # of local layers


def layers_to_decode(
    params: Params, *, model: ModelConfig, rows: int
) -> tuple[Params, ...]:
    """The layers as `decode_step` reads them fastest; once, before its loop.

    Args:
      rows: B, of that step.

    Returns:
      L layers. For more rows than `model.transposed_rows` they are unchanged; for as
      many or fewer "transposed" [out, in] stands in place of every "kernel" [in, out]
      that is not stored.
    """

    def transposed(layer: Params) -> Params:
        flat: Any = traverse_util.flatten_dict(layer)
        for path, leaf in tuple(flat.items()):
            if path[-1] == "kernel" and not leaves.is_stored(leaf):
                flat[*path[:-1], "transposed"] = flat.pop(path).T
        return traverse_util.unflatten_dict(flat)

    layers = unstack(params["layers"], num_layers=model.num_layers)
    return layers if rows > model.transposed_rows else tuple(map(transposed, layers))


def decode_step(
    params: Params,
    *,
    layers: Sequence[Params],
    model: ModelConfig,
    tokens: Array,
    positions: Array,
    attend: Array | Seen,
    caches: Sequence[Cached],
    column: Array,
) -> tuple[Array, tuple[Cached, ...]]:
    """N new tokens of every row, mostly one, against the cache.

    Args:
      params: the parameters; their stacked "layers" are not read.
      layers: from `layers_to_decode`.
      tokens, positions: i32[B, N], the new tokens and how many stand before each.
      attend: what they see; of one new token in a column of all rows bool[B, W], the
        columns that it may see, its own included.
      caches: per layer the keys and values, as `caches.py` has them, or pages.
      column: i32[], the number of the first new column, the same in all rows, or
        i32[B], of each row; not read of pages.

    Returns:
      Hidden states [B, N, D] after the final norm, in `model.dtype`, and the caches
      with the new columns written.
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
    updated = []
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        is_local = model.is_local(number)
        x, cache = blocks.Block(model).apply(
            {"params": leaves.read(layer)},
            x,
            mask=attend.window if is_local else attend.everything,
            rotary=local if is_local else far,
            cache=cache,
            column=column % cache[0].shape[2],
        )
        updated.append(cache)
    return decoder.final_norm(params, x, model=model), tuple(updated)
