"""Parameters that are not plain arrays on the device: in int8, or in host memory.

Either stands in a parameter tree where an array would, and is a pytree itself, so that
`lax.scan` slices it by layer as it slices an array. The decoder reads each layer as it
comes to it: what is held is small or far, and one layer at a time is neither.

    {"kernel": Int8(values i8[L, in, out], scales f32[L, 1, out])}  --scan-->  read
    {"kernel": OnHost(f32[L, in, out])}                             --scan-->  read
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array


@flax.struct.dataclass
class Int8:
    """Weight-only int8, symmetric: parameter = values · scales."""

    values: Array  # i8[...], -127 to 127
    scales: Array  # f32, 1 along the axis that shares a scale, else as `values`

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameters."""
        return self.values.shape

    def read(self) -> Array:
        """f32[...], the parameters."""
        return self.values.astype(jnp.float32) * self.scales

    def rows(self, index: Array) -> Array:
        """f32[*index.shape, D]: rows of a table; no other row is read."""
        # Gathered first: the table is never unpacked whole.
        return self.values[index].astype(jnp.float32) * self.scales[index]


@flax.struct.dataclass
class OnHost:
    """A leaf, or an `Int8`, that lives in the host's memory."""

    held: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameters."""
        return self.held.shape

    def read(self) -> Array:
        """The parameters, brought to the device."""
        return read(jax.device_put(self.held, jax.memory.Space.Device))

    def rows(self, index: Array) -> Array:
        """Rows of a table, which is brought to the device whole."""
        return rows(jax.device_put(self.held, jax.memory.Space.Device), index)


def misfits(arrays: Mapping[str, Any], *, shapes: Mapping[str, Any]) -> list[str]:
    """A line for every array that is missing, unknown or not of its shape, by name."""
    problems = [f"missing: {name}" for name in shapes if name not in arrays]
    for name, array in arrays.items():
        if name not in shapes:
            problems.append(f"unknown: {name} {list(array.shape)}")
        elif tuple(array.shape) != tuple(shapes[name]):
            problems.append(
                f"misshapen: {name}, expected {list(shapes[name])}, got "
                f"{list(array.shape)}"
            )
    return problems


def is_stored(leaf: Any) -> bool:
    """True for a leaf that has to be read before it is an array."""
    return isinstance(leaf, Int8 | OnHost)


def any_stored(tree: Any) -> bool:
    """True if a leaf of the tree has to be read."""
    return any(map(is_stored, jax.tree.leaves(tree, is_leaf=is_stored)))


def read(tree: Any) -> Any:
    """The tree with every leaf a plain array on the device."""
    return jax.tree.map(
        lambda leaf: leaf.read() if is_stored(leaf) else leaf, tree, is_leaf=is_stored
    )


def rows(table: Any, index: Array) -> Array:
    """[*index.shape, D]: rows of an embedding, however it is stored."""
    return table.rows(index) if is_stored(table) else table[index]
