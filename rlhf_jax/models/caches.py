"""What decoding keeps of a layer: keys and values of the columns that are seen again.

A column is known by its number, which only grows; a cache of W columns holds number c
in place c mod W. Where none has left yet that is a plain array of the first W columns.
A local layer, which sees a sliding window, keeps no more than that:

    window 3, columns so far 0 to 4      place     0  1  2
                                         holds     3  4  2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models.attention import Cached, Columns, quantise
from rlhf_jax.models.config import ModelConfig

Array = jax.Array
Caches = tuple[Cached, ...]  # of every layer, [B, K, W, head_dim] each
FIRST_WIDTH = 128  # columns of the first cache


def growing_widths(size: int, *, first: int) -> tuple[int, ...]:
    """Widths of the cache, one after another, for `first` columns and up to `size`.

    Doubling, so that all moves together copy no more than the last cache holds, and
    attention reads at most two and a half times the columns that are filled.
    """
    width, smaller = -(-(first + 1) // FIRST_WIDTH) * FIRST_WIDTH, []
    while 5 * width < 4 * size:
        smaller.append(width)
        width *= 2
    return (*smaller, size)


def width(model: ModelConfig, layer: int, *, columns: int) -> int:
    """Places of a layer's cache, where others have `columns`."""
    if model.sliding_window is None or not model.is_local(layer):
        return columns
    return min(columns, model.sliding_window)


def placed(
    caches: Sequence[Cached], *, model: ModelConfig, columns: int, end: Array | int
) -> Caches:
    """Caches of the columns before number `end`, as they came from the prompts.

    Args:
      caches: of every layer, [B, K, P, head_dim] each, of columns end - P to end - 1;
        with `model.cache` they are kept in int8.
      columns: places of a layer that sees all; P or more.
    """
    windows = []
    for layer, (key, value) in enumerate(caches):
        size = width(model, layer, columns=columns)

        def place(columns: Columns, size: int = size) -> Any:
            if model.cache == "int8" and isinstance(columns, Array):
                columns = quantise(columns)
            return jax.tree.map(
                lambda leaf: at_end(leaf[:, :, -size:], size=size, end=end, axis=2),
                columns,
            )

        windows.append((place(key), place(value)))
    return tuple(windows)


def at_end(array: Array, *, size: int, end: Array | int, axis: int) -> Array:
    """The columns of `array` as those before number `end`, in `size` places; else 0."""
    columns = array.shape[axis]
    room = [(0, 0)] * array.ndim
    room[axis] = (0, size - columns)
    padded = jnp.pad(array, room)
    if isinstance(end, int) and (end - columns) % size == 0:
        return padded
    return jnp.roll(padded, end - columns, axis=axis)


def widened(caches: Caches, *, model: ModelConfig, columns: int) -> Caches:
    """The caches with more places, none of which has been used twice."""
    windows = []
    for layer, (key, value) in enumerate(caches):
        more = width(model, layer, columns=columns) - key.shape[2]

        def widen(leaf: Array, more: int = more) -> Array:
            room = [(0, 0)] * leaf.ndim
            room[2] = (0, more)
            return jnp.pad(leaf, room)

        windows.append(jax.tree.map(widen, (key, value)))
    return tuple(windows)


def near(attend: Array, *, window: int, column: Array) -> Array:
    """Which places of a local layer's cache a new token may see.

    Args:
      attend: bool[B, W], places of the others that it may see, its own included.
      window: columns that are seen, its own included.

    Returns:
      bool[B, min(W, window)].
    """
    columns = attend.shape[1]
    size = min(columns, window)
    # The last number that each place was given.
    number = column - (column - jnp.arange(size, dtype=jnp.int32)) % size
    return attend[:, number % columns]
