"""Keys and values of the columns of a row, and how new tokens are added to them."""

from __future__ import annotations

import functools
import math

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array


@flax.struct.dataclass
class Int8Columns:
    """Keys or values in int8, each vector with a scale: vector = values · scale.

    Products take the integers, and the scales their results: q·k = (q·values)·scale.
    """

    values: Array  # i8[B, K, S, head_dim], -127 to 127
    scales: Array  # f32[B, K, S]; no dimension of 1, which a TPU would pad to 128

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the vectors."""
        return self.values.shape


# Heads first: what a head reads for a row lies together. In the compute dtype.
KeyValue = tuple[Array, Array]  # each [B, K, S, head_dim]
Columns = Array | Int8Columns
Cached = tuple[Columns, Columns]  # keys and values as a cache has them, likewise


def quantise(x: Array) -> Int8Columns:
    """values = round(x / scale), scale = max|x| / 127 of each vector.

    Args:
      x: floats[B, K, S, head_dim].

    Returns:
      Int8Columns; |values · scale - x| <= scale / 2. A vector of zeros has scale 0.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / 127.0
    values = jnp.round(x / jnp.where(scales > 0, scales, 1.0)[..., None])
    return Int8Columns(values=values.astype(jnp.int8), scales=scales)


def plain(columns: Columns, *, dtype: jnp.dtype) -> tuple[Array, Array | None]:
    """What products read of keys or values in `dtype`, and f32[B, K, S] or None.

    Args:
      dtype: of the products; exact for integers of int8 in bfloat16 too.
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
    """f32 logits of products q·k, scaled and soft-capped.

    Args:
      key_scales: of keys in int8, from `plain`.
      scale: dimensionless; None is 1 / sqrt(head_dim).
      softcap: c of logits c·tanh(x / c) (Gemma 2, arXiv:2408.00118, section 2); None
        leaves them.
    """
    if key_scales is not None:
        products = products * key_scales[:, :, None]
    logits = products / math.sqrt(head_dim) if scale is None else products * scale
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def as_cached(fresh: Columns, *, cache: Columns) -> Columns:
    """Keys or values in the form that a cache has: quantised where it is."""
    if isinstance(cache, Int8Columns) and isinstance(fresh, Array):
        return quantise(fresh)
    return fresh


def append(cache: Cached, new: KeyValue, *, column: Array | int) -> Cached:
    """The cache with the keys and values of new tokens written from `column` on.

    Args:
      column: i32[], the same in all rows, or i32[B], of each row.
    """

    def put(all_: Array, one: Array) -> Array:
        update = jax.lax.dynamic_update_slice_in_dim
        if isinstance(column, int) or column.ndim == 0:
            return update(all_, one, column, axis=2)
        of_row = functools.partial(update, axis=1)
        return jax.vmap(of_row)(all_, one, column)

    def write(old: Columns, fresh: Array) -> Columns:
        return jax.tree.map(put, old, as_cached(fresh, cache=old))

    key, value = map(write, cache, new)
    return key, value
