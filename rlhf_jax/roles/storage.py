"""How frozen parameters are stored: in which dtype, which memory, on which devices.

| way | asked for by |
|---|---|
| copy | nothing: the source's dtype and sharding |
| half | dtype bfloat16 or float16 |
| int8, weight-only | dtype int8; `embeddings` may keep tables in a float dtype |
| pinned host memory | memory "pinned_host": each layer is read when its turn comes |
| own sharding, own devices, the CPU | sharding |

Every way is a copy, and is read by the decoder through `leaves`.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import leaves
from rlhf_jax.models.leaves import Int8, OnHost

Array = jax.Array
Params = Any
Memory = Literal["device", "pinned_host"]


def store(
    params: Params,
    *,
    dtype: Any = None,
    embeddings: Any = None,
    memory: Memory | None = None,
    sharding: Any = None,
) -> Params:
    """A copy that shares no buffer with `params`.

    `jnp.asarray`, `astype` to the same dtype and `device_put` to the same sharding all
    alias, and an alias dies when the original is donated; an explicit copy does not.

    Args:
      params: pytree of arrays (NumPy or JAX), a decoder's or {"trunk", "score"}.
      dtype: of the copy's floating-point leaves; None keeps each leaf's own. int8 is
        for matrices: symmetric, a scale for every output channel (for every row of an
        embedding or an output head); norms, biases and a scalar head are float32.
      embeddings: dtype of embeddings and output head where `dtype` is int8; None is
        int8 too.
      memory: "pinned_host" keeps the copy in the host's memory; None is "device".
      sharding: a Sharding, or a pytree of them as `params`, for the copy; None keeps
        each leaf's.

    Raises:
      InputError: `embeddings` without int8, or a memory that these devices lack.
    """
    int8 = dtype is not None and jnp.dtype(dtype) == jnp.int8
    if embeddings is not None and not int8:
        raise InputError(
            f"embeddings: expected None where dtype is {dtype}, got {embeddings}; they "
            f"have a dtype of their own beside int8 only"
        )

    def copy(path: Any, leaf: Array) -> Any:
        leaf = jnp.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.array(leaf, copy=True)
        if not int8:
            return jnp.array(leaf, dtype=dtype, copy=True)
        names = [entry.key for entry in path]
        table = "embed" in names or "head" in names
        if table and embeddings is not None:
            return jnp.array(leaf, dtype=embeddings, copy=True)
        if table or ("layers" in names and leaf.ndim == 3):
            return quantise(leaf, axis=-1 if table else -2)
        return jnp.array(leaf, dtype=jnp.float32, copy=True)

    copied = jax.tree.map_with_path(copy, params)
    if sharding is not None:
        copied = jax.device_put(copied, sharding)
    return _to_host(copied) if memory == "pinned_host" else copied


def quantise(x: Array, *, axis: int) -> Int8:
    """Symmetric int8: scale = max|x| / 127 along `axis`, values = round(x / scale).

    Args:
      x: floats[...].
      axis: the one that shares a scale: a matrix's inputs, a row's columns.

    Returns:
      Int8; |values · scales - x| <= scale / 2. A scale of zeros is 0.

    Source: Dettmers et al. 2022, arXiv:2208.07339, section 2 (absmax, vector-wise).
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127.0
    values = jnp.round(x / jnp.where(scales > 0, scales, 1.0))
    return Int8(values=values.astype(jnp.int8), scales=scales)


def _to_host(copied: Params) -> Params:
    def move(leaf: Any) -> OnHost:
        placed = jax.tree.map(
            lambda array: jax.device_put(
                array, array.sharding.with_memory_kind("pinned_host")
            ),
            leaf,
        )
        return OnHost(placed)

    for device in jax.tree.leaves(copied)[0].sharding.device_set:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if "pinned_host" not in kinds:
            raise InputError(
                f"memory: expected one that {device.device_kind} has "
                f"({', '.join(kinds)}), got pinned_host; store on the device"
            )
    return jax.tree.map(move, copied, is_leaf=leaves.is_stored)


def nbytes(params: Params) -> int:
    """Bytes that the leaves hold, over all devices' shards counted once."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))
