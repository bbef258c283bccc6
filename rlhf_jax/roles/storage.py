"""How frozen parameters are stored: copied, in which dtype, under which sharding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Params = Any


def store(params: Params, *, dtype: Any = None, sharding: Any = None) -> Params:
    """A copy that shares no buffer with `params`.

    `jnp.asarray`, `astype` to the same dtype and `device_put` to the same sharding all
    alias, and an alias dies when the original is donated; an explicit copy does not.

    Args:
      params: pytree of arrays (NumPy or JAX).
      dtype: of the copy's floating-point leaves; None keeps each leaf's own.
      sharding: a Sharding, or a pytree of them, for the copy; None keeps each leaf's.
    """

    def copy(leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.array(leaf, dtype=dtype if floating else None, copy=True)

    copied = jax.tree.map(copy, params)
    return copied if sharding is None else jax.device_put(copied, sharding)


def nbytes(params: Params) -> int:
    """Bytes that the leaves hold, over all devices' shards counted once."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))
