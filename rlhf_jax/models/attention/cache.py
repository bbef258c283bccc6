"""Keys and values of the columns of a row, and how new tokens are added to them."""

from __future__ import annotations

import jax

Array = jax.Array
# Heads first: what a head reads for a row lies together. In the compute dtype.
KeyValue = tuple[Array, Array]  # each [B, K, S, head_dim]


def append(cache: KeyValue, new: KeyValue, *, column: Array | int) -> KeyValue:
    """The cache with the keys and values of new tokens written from `column` on."""
    key, value = (
        jax.lax.dynamic_update_slice_in_dim(old, fresh, column, axis=2)
        for old, fresh in zip(cache, new, strict=True)
    )
    return key, value
