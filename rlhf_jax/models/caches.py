"""Caches of decoding: keys and values of the columns of a row, and how they grow.

Columns are numbered from 0. A cache of W places holds column c in place c mod W; until
a place is used twice it is a plain array of the first W columns. A local layer, which
sees a sliding window, keeps only the window:

    window 3, columns so far 0 to 4      place     0  1  2
                                         holds     3  4  2
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.models.config import ModelConfig

Array = jax.Array


@flax.struct.dataclass
class Int8Columns:
    """Keys or values in int8, each vector with a scale: vector = values · scale.

    Products read the integers; scales multiply the results, q·k = (q·values)·scale.
    """

    values: Array  # i8[B, K, S, head_dim], -127 to 127
    scales: Array  # f32[B, K, S]; no dimension of 1, which a TPU would pad to 128

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the vectors."""
        return self.values.shape


# Heads first: what a head reads of a row is contiguous. In the compute dtype.
KeyValue = tuple[Array, Array]  # each [B, K, S, head_dim]
Columns = Array | Int8Columns
Cached = tuple[Columns, Columns]  # keys and values as a cache stores them


@flax.struct.dataclass
class DeltaState:
    """The state of a DeltaNet layer, whose size does not depend on a row's length."""

    memory: Array  # f32[B, H, key_dim, value_dim]
    # The last conv_width - 1 inputs of the convolutions of query, key and value,
    # [B, conv_width - 1, width of the projection], in the compute dtype.
    tails: tuple[Array, ...]


Kept = Cached | DeltaState | tuple[()]  # of one layer; () if it reads another's
Caches = tuple[Kept, ...]  # of all layers; keys and values are [B, K, W, head_dim]


def blank_state(model: ModelConfig, *, rows: int) -> DeltaState:
    """The state before a text begins."""
    shape = model.delta_net
    assert shape is not None
    memory = rows, shape.num_value_heads, shape.key_dim, shape.value_dim

    def tail(width: int) -> Array:
        return jnp.zeros((rows, shape.conv_width - 1, width), model.dtype)

    keys = shape.num_key_heads * shape.key_dim
    values = shape.num_value_heads * shape.value_dim
    return DeltaState(
        memory=jnp.zeros(memory, jnp.float32),
        tails=(tail(keys), tail(keys), tail(values)),
    )


def blank(model: ModelConfig, layer: int, *, rows: int, columns: int) -> Kept:
    """The empty cache of a layer; () if it reads another's."""
    if model.is_recurrent(layer):
        return blank_state(model, rows=rows)
    if model.source(layer) is not None:
        return ()
    own = model.at(layer)
    shape = rows, own.num_kv_heads, columns, own.head_dim

    def zeros() -> Columns:
        if model.cache == "same":
            return jnp.zeros(shape, model.dtype)
        values, scales = jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32)
        return Int8Columns(values, scales)

    return zeros(), zeros()


def quantise(x: Array) -> Int8Columns:
    """values = round(x / scale), scale = max|x| / 127 of each vector.

    Args:
      x: floats[B, K, S, head_dim].

    Returns:
      Int8Columns; |values · scale - x| <= scale / 2. A vector of zeros has scale 0.
    """
    x = x.astype(jnp.float32)
    # A scale per vector: one large key does not cost the others their precision.
    scales = jnp.max(jnp.abs(x), axis=-1) / 127.0
    values = jnp.round(x / jnp.where(scales > 0, scales, 1.0)[..., None])
    return Int8Columns(values=values.astype(jnp.int8), scales=scales)


def plain(columns: Columns, *, dtype: jnp.dtype) -> tuple[Array, Array | None]:
    """Keys or values as products read them, and their scales f32[B, K, S] or None.

    Args:
      dtype: of the products; bfloat16 too represents int8 integers exactly.
    """
    if isinstance(columns, Int8Columns):
        return columns.values.astype(dtype), columns.scales
    return columns, None


def logits_of(
    products: Array,
    *,
    key_scales: Array | None,
    head_dim: int,
    scale: float | None,
    softcap: float | None,
) -> Array:
    """f32 attention logits from products q·k, scaled and soft-capped.

    Args:
      key_scales: scales of int8 keys, from `plain`.
      scale: dimensionless; None is 1 / sqrt(head_dim).
      softcap: c of logits c·tanh(x / c) (Gemma 2, arXiv:2408.00118, section 2); None is
        off.
    """
    if key_scales is not None:
        # Multiplies the results, [B, K, G·T, S], instead of head_dim times as many
        # numbers.
        products = products * key_scales[:, :, None]
    logits = products / math.sqrt(head_dim) if scale is None else products * scale
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def as_cached(fresh: Columns, *, cache: Columns) -> Columns:
    """Quantises new keys or values if the cache is in int8."""
    if isinstance(cache, Int8Columns) and isinstance(fresh, Array):
        return quantise(fresh)
    return fresh


def append(cache: Cached, new: KeyValue, *, column: Array | int) -> Cached:
    """Writes the keys and values of new tokens into the cache, from `column` on.

    Args:
      column: i32[], the same in all rows, or i32[B], one per row.
    """

    def put(all_: Array, one: Array) -> Array:
        update = jax.lax.dynamic_update_slice_in_dim
        if isinstance(column, int) or column.ndim == 0:
            return update(all_, one, column, axis=2)
        # Each row has its own column: `vmap` makes a scatter of the slices.
        of_row = functools.partial(update, axis=1)
        return jax.vmap(of_row)(all_, one, column)

    def write(old: Columns, fresh: Array) -> Columns:
        return jax.tree.map(put, old, as_cached(fresh, cache=old))

    key, value = map(write, cache, new)
    return key, value


FIRST_WIDTH = 128  # columns of the first cache


def growing_widths(size: int, *, first: int) -> tuple[int, ...]:
    """Successive widths of a growing cache, from `first` columns up to `size`.

    Widths double, so that all copies together are no larger than the last cache, and
    attention reads at most two and a half times the columns that are filled.
    """
    width, smaller = -(-(first + 1) // FIRST_WIDTH) * FIRST_WIDTH, []
    # A last step of less than a quarter is not worth another loop.
    while 5 * width < 4 * size:
        smaller.append(width)
        width *= 2
    return (*smaller, size)


def width(model: ModelConfig, layer: int, *, columns: int) -> int:
    """Places of a layer's cache: `columns`, or at most the window of a local layer."""
    if model.sliding_window is None or not model.is_local(layer):
        return columns
    return min(columns, model.sliding_window)


def placed(
    caches: Sequence[Kept], *, model: ModelConfig, columns: int, end: Array | int
) -> Caches:
    """Moves the keys and values of prompts into caches with room for `columns`.

    Args:
      caches: of every layer, [B, K, P, head_dim] each, of columns end - P to end - 1;
        quantised if `model.cache` is int8.
      columns: places of a layer that sees all columns, at least P.
    """

    def place(layer: int, kept: Cached) -> Cached:
        size = width(model, layer, columns=columns)

        def one(columns: Columns) -> Columns:
            if model.cache == "int8" and isinstance(columns, Array):
                columns = quantise(columns)
            return jax.tree.map(
                lambda leaf: at_end(leaf[:, :, -size:], size=size, end=end, axis=2),
                columns,
            )

        return one(kept[0]), one(kept[1])

    return _changed(caches, place)


def at_end(array: Array, *, size: int, end: Array | int, axis: int) -> Array:
    """Puts columns, the last before `end`, into a cache of `size` places, else 0."""
    columns = array.shape[axis]
    room = [(0, 0)] * array.ndim
    room[axis] = (0, size - columns)
    padded = jnp.pad(array, room)
    if isinstance(end, int) and (end - columns) % size == 0:
        return padded
    # Column c is in place c mod W, so that decoding continues where the prompt ended.
    return jnp.roll(padded, end - columns, axis=axis)


def widened(caches: Caches, *, model: ModelConfig, columns: int) -> Caches:
    """The caches with more places; no place may have been used twice."""

    def widen(layer: int, kept: Cached) -> Cached:
        more = width(model, layer, columns=columns) - kept[0].shape[2]

        def one(leaf: Array) -> Array:
            room = [(0, 0)] * leaf.ndim
            room[2] = (0, more)
            return jnp.pad(leaf, room)

        return jax.tree.map(one, kept)

    return _changed(caches, widen)


def _changed(caches: Sequence[Kept], change: Callable[[int, Cached], Cached]) -> Caches:
    """change(layer, keys and values) of the layers that have columns of their own."""
    return tuple(
        kept if isinstance(kept, DeltaState) or not kept else change(layer, kept)
        for layer, kept in enumerate(caches)
    )


def near(attend: Array, *, window: int, column: Array) -> Array:
    """Which places of a local layer's cache a new token may see.

    Args:
      attend: bool[B, W], columns that the token may see in global layers, its own
        included.
      window: columns that a local layer sees, the token's own included.

    Returns:
      bool[B, min(W, window)].
    """
    columns = attend.shape[1]
    size = min(columns, window)
    # The column that each place holds.
    number = column - (column - jnp.arange(size, dtype=jnp.int32)) % size
    return attend[:, number % columns]
