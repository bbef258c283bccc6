"""Parameters that are not plain arrays on the device: in int8, or in host memory.

Both take the place of an array in a parameter tree and are pytrees themselves, so that
`lax.scan` slices them by layer. The decoder reads one layer at a time, when its turn
comes, so that the whole model is never on the device in full precision.

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
    scales: Array  # f32, the shape of `values` but 1 along the axis that shares a scale

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameters."""
        return self.values.shape

    def read(self) -> Array:
        """f32[...], the parameters."""
        return self.values.astype(jnp.float32) * self.scales

    def rows(self, index: Array) -> Array:
        """f32[*index.shape, D]: rows of a table; only these are converted."""
        return self.values[index].astype(jnp.float32) * self.scales[index]


@flax.struct.dataclass
class OnHost:
    """An array or an `Int8` in the host's memory."""

    held: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameters."""
        return self.held.shape

    def read(self) -> Array:
        """The parameters, brought to the device."""
        return read(jax.device_put(self.held, jax.memory.Space.Device))

    def rows(self, index: Array) -> Array:
        """Rows of a table, which is brought to the device whole."""
        return rows(jax.device_put(self.held, jax.memory.Space.Device), index)


def misfits(arrays: Mapping[str, Any], *, shapes: Mapping[str, Any]) -> list[str]:
    """Describes every array that is missing, unknown or of the wrong shape, by name."""
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
    """Whether a leaf is in int8 or on the host, and has to be read first."""
    return isinstance(leaf, Int8 | OnHost)


def any_stored(tree: Any) -> bool:
    """Whether any leaf of the tree has to be read first."""
    return any(map(is_stored, jax.tree.leaves(tree, is_leaf=is_stored)))


def read(tree: Any) -> Any:
    """Reads every leaf into a plain array on the device."""
    return jax.tree.map(
        lambda leaf: leaf.read() if is_stored(leaf) else leaf, tree, is_leaf=is_stored
    )


def rows(table: Any, index: Array) -> Array:
    """[*index.shape, D]: rows of an embedding, however it is stored."""
    return table.rows(index) if is_stored(table) else table[index]
