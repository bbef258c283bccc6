"""Ring attention: devices that share the columns of a row pass their keys round.

In turn t device i has the keys and values of device i - t, and its queries attend to
them while they are sent to device i + 1. No device ever has more than S/c columns,
whereas gathering needs all S columns of keys, values and their gradients.

    turn         0  1  2  3         context=4
    device 0     0  3  2  1         whose keys the device has
    device 1     1  0  3  2
    device 2     2  1  0  3
    device 3     3  2  1  0

Columns are balanced (`axes.py`): after turn 0 every device computes half of the
products of its queries and keys in each turn.

Source: Liu et al. 2023, arXiv:2310.01889; balanced columns, Llama Team 2024,
arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models.axes import CONTEXT_AXIS

Array = jax.Array
Blocks = tuple[Array, ...]  # q, k, v
# Scope of kernels without a causal mask, in a compiled program.
WHOLE = "turn_without_causal_mask"
Owner = Array | None  # i32[], the device whose keys these are; None is this one


def forward(
    arrays: Blocks,
    turn: Callable[[Blocks, Owner], tuple[Array, Array]],
    *,
    count: int,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Attention to the keys of all devices, and the log-denominators of its softmax.

    Args:
      arrays: q [..., d], k and v, of this device.
      turn: maps (q, k, v) and the device whose keys these are to the attention over
        these keys, floats[..., d], and the log-denominators of its softmax, f32[...],
        which are very low but finite where a query sees none of the keys.
      count: c, devices.
      sinks: logits without a value, of a shape that broadcasts to f32[...]; or None.

    Returns:
      f32[..., d] and f32[...].
    """
    q, *keys_values = arrays

    def meet(turns: Array, so_far: tuple[Blocks, Array, Array]) -> tuple[Any, ...]:
        keys_values, out, normaliser = so_far
        # Sent before they are read: the transfer overlaps with the turn.
        following = _passed(keys_values, count=count)
        new, new_normaliser = turn((q, *keys_values), _owner(turns, count=count))
        return following, *_merged((out, normaliser), (new, new_normaliser))

    following = _passed(tuple(keys_values), count=count)
    out, normaliser = turn(arrays, None)
    so_far = following, out.astype(jnp.float32), normaliser
    _, out, normaliser = jax.lax.fori_loop(1, count, meet, so_far)
    if sinks is None:
        return out, normaliser
    whole = jnp.logaddexp(normaliser, sinks)
    return out * jnp.exp(normaliser - whole)[..., None], whole


def backward(
    arrays: Blocks, turn: Callable[[Blocks, Owner], Blocks], *, count: int
) -> Blocks:
    """Gradients of q, k and v; those of keys and values travel with their keys.

    Args:
      turn: maps (q, k, v) and the device whose keys these are to the gradients of all
        three, with the denominators over all keys. Gradients are summed in float32.

    Returns:
      In the shapes and dtypes of q, k and v.
    """
    q, *keys_values = arrays

    def meet(turns: Array, so_far: tuple[Blocks, Array, Blocks]) -> tuple[Any, ...]:
        keys_values, of_q, of_keys = so_far
        following = _passed(keys_values, count=count)
        # The sums so far arrive while this device computes its own gradients.
        of_keys = _passed(of_keys, count=count)
        more, *of_these = turn((q, *keys_values), _owner(turns, count=count))
        of_keys = tuple(a + b for a, b in zip(of_keys, of_these, strict=True))
        return following, of_q + more, of_keys

    following = _passed(tuple(keys_values), count=count)
    of_q, *of_keys = (x.astype(jnp.float32) for x in turn(arrays, None))
    _, of_q, of_keys = jax.lax.fori_loop(
        1, count, meet, (following, of_q, tuple(of_keys))
    )
    of_keys = _passed(of_keys, count=count)  # back to the device of these keys
    return tuple(
        gradient.astype(x.dtype)
        for gradient, x in zip((of_q, *of_keys), arrays, strict=True)
    )


def device(owner: Owner = None) -> Array:
    """i32[], the number of the owner along the axis; None is this device."""
    return jax.lax.axis_index(CONTEXT_AXIS) if owner is None else owner


def _merged(
    one: tuple[Array, Array], other: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Merges attention to two disjoint sets of keys."""
    normaliser = jnp.logaddexp(one[1], other[1])
    parts = [out * jnp.exp(part - normaliser)[..., None] for out, part in (one, other)]
    return parts[0] + parts[1], normaliser


def _passed(arrays: Blocks, *, count: int) -> Blocks:
    """Sends arrays to the next device."""
    way = [(device, (device + 1) % count) for device in range(count)]
    return jax.lax.ppermute(arrays, CONTEXT_AXIS, way)


def _owner(turn: Array, *, count: int) -> Array:
    """i32[], the device whose keys this one has in a turn."""
    return (device() - turn) % count
