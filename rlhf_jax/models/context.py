"""The columns of a row over the devices of a mesh's `context` axis.

    chunks of a row     0  1  2  3  4  5  6  7          context=4
    in order            0  0  1  1  2  2  3  3          device that has the chunk
    balanced            0  1  2  3  3  2  1  0

Records stay [B, S]. While a decoder runs on whole rows, the columns of each device are
rows of their own, [B·c, S/c], sharded over the axes of rows and over `context`: what is
computed token by token (projections, norms, MLP, log-probs) then needs nothing of other
devices, and is partitioned as more rows are. Attention alone gathers keys and values of
the whole row (`attention/per_device.py`).

The columns are `balanced` within the decoder, so that each device has as many of the
keys before its queries as any other, and in order elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from rlhf_jax.models import axes

Array = jax.Array
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Cut:
    """How columns are cut, while something is traced on a mesh with `context`."""

    rows: tuple[str, ...]  # axes that share the rows
    count: int  # c, devices that share the columns of a row

    def width(self, columns: int) -> int:
        """S' ≥ S, the least number of columns that 2c divides."""
        return -(-columns // (2 * self.count)) * 2 * self.count

    @property
    def by_row(self) -> PartitionSpec:
        """Of [B, ...]."""
        return PartitionSpec(self.rows or None)

    @property
    def by_column(self) -> PartitionSpec:
        """Of [B, S', ...] whose columns lie on `context`."""
        return PartitionSpec(self.rows or None, axes.CONTEXT_AXIS)

    @property
    def by_part(self) -> PartitionSpec:
        """Of [B·c, ...], the parts of rows."""
        return PartitionSpec((*self.rows, axes.CONTEXT_AXIS))

    def apart(self, x: Array) -> Array:
        """[B·c, ...] with each part on its device."""
        return jax.lax.with_sharding_constraint(x, self.by_part)

    def parts(self, x: Array) -> Array:
        """[B, S', ...] -> [B·c, S'/c, ...], columns in order; nothing moves."""
        return self._relabelled(x, self.by_column, self.by_part)

    def whole(self, x: Array) -> Array:
        """The inverse of `parts`."""
        return self._relabelled(x, self.by_part, self.by_column)

    def balanced_parts(self, x: Array) -> Array:
        """[B, S', ...] -> [B·c, S'/c, ...], balanced; of what every device has."""
        return self.parts(x[:, balanced(x.shape[1], count=self.count)])

    def whole_of_balanced(self, x: Array) -> Array:
        """The inverse of `balanced_parts`: each device sends two chunks."""
        count = self.count

        def in_order(x: Array) -> Array:
            first, second = jnp.split(x, 2, axis=1)
            # Chunks i and 2c - 1 - i: one of them is even, and one is odd.
            first_is_even = jax.lax.axis_index(axes.CONTEXT_AXIS) % 2 == 0
            # A permutation has one sender per receiver: the halves go as two of them.
            even = jnp.where(first_is_even, first, second)
            odd = jnp.where(first_is_even, second, first)
            ways = [
                [(min(chunk, 2 * count - 1 - chunk), chunk // 2) for chunk in chunks]
                for chunks in (range(0, 2 * count, 2), range(1, 2 * count, 2))
            ]
            moved = [
                jax.lax.ppermute(half, axes.CONTEXT_AXIS, way)
                for half, way in zip((even, odd), ways, strict=True)
            ]
            return jnp.concatenate(moved, axis=1)

        return self._mapped(in_order, x, self.by_part, self.by_column)

    def _relabelled(self, x: Array, at: PartitionSpec, to: PartitionSpec) -> Array:
        return self._mapped(lambda x: x, x, at, to)

    def _mapped(
        self,
        function: Callable[[Array], Array],
        x: Array,
        at: PartitionSpec,
        to: PartitionSpec,
    ) -> Array:
        mesh = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            function, mesh=mesh, in_specs=at, out_specs=to, check_vma=False
        )(x)


def cut_of(rows: int) -> Cut | None:
    """The cut of so many rows on the mesh that is set; None without a context axis."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or mesh.axis_types[0] != AxisType.Auto:
        return None
    sizes = dict(mesh.shape)
    count = sizes.get(axes.CONTEXT_AXIS, 1)
    if count == 1:
        return None
    return Cut(axes.row_axes(sizes, rows=rows), count)


def per_token(function: Callable[..., Tree], *arrays: Array) -> Tree:
    """function(*arrays) of what is computed token by token, each device its columns.

    Args:
      function: of [N, T, ...] arrays; returns [N, T] arrays. It may not look at other
        tokens. On a mesh with a context axis N is B·c and T is S/c.

    Returns:
      Arrays [B, S].
    """
    rows, columns = arrays[0].shape[:2]
    cut = cut_of(rows)
    if cut is None:
        return function(*arrays)
    room = cut.width(columns) - columns
    results = function(*(cut.parts(padded(x, room)) for x in arrays))

    def back(x: Array) -> Array:
        return cut.whole(x)[:, :columns]

    return jax.tree.map(back, results)


def per_prediction(
    function: Callable[..., Tree],
    *hidden: Array,
    tokens: Array,
    first_column: int,
) -> Tree:
    """function(*hidden, tokens, first_column=), each device its columns.

        column t            0    1    2    3
        is about            a    b    c    d     tokens[:, t], given hidden[:, t - 1]
        a device has             h1   h2         hidden states of its columns
        and computes             c    d          what is predicted by them

    Args:
      function: of hidden states [N, T, D] each and tokens i32[N, T]; returns [N, T]
        arrays, whose column t is about tokens[:, t] given hidden[:, t - 1] alone and
        which are 0 before `first_column`, at least 1.

    Returns:
      Arrays [B, S], 0 before `first_column`.
    """
    if cut_of(tokens.shape[0]) is None:
        return function(*hidden, tokens, first_column=first_column)

    def of_part(*arrays: Array) -> Tree:
        *hidden, following = arrays
        about = jnp.pad(following, ((0, 0), (1, 0)))  # column 0 is about nothing
        results = function(*(padded(x, 1) for x in hidden), about, first_column=1)
        return jax.tree.map(lambda x: x[:, 1:], results)

    results = per_token(of_part, *hidden, padded(tokens[:, 1:], 1))
    predicted = jnp.arange(tokens.shape[1], dtype=jnp.int32) >= first_column

    def shifted(x: Array) -> Array:
        x = jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
        return jnp.where(predicted[None], x, 0)

    return jax.tree.map(shifted, results)


def padded(x: Any, room: int) -> Any:
    """[B, S, ...] with columns of zeros at the right."""
    return jnp.pad(x, ((0, 0), (0, room), *((0, 0),) * (x.ndim - 2)))


def balanced(columns: int, *, count: int) -> np.ndarray:
    """i32[S], the columns of device 0, of device 1, and so on.

    >>> print(balanced(8, count=2))
    [0 1 6 7 2 3 4 5]
    """
    chunks = np.arange(columns, dtype=np.int32).reshape(2 * count, -1)
    pairs = [(i, 2 * count - 1 - i) for i in range(count)]
    return chunks[np.array(pairs).reshape(-1)].reshape(-1)


def in_order(x: Array, *, count: int) -> Array:
    """[B, h, S, d] of balanced columns, in order; static slices."""
    rows, heads, columns, size = x.shape
    pairs = x.reshape(rows, heads, count, 2, -1, size)
    first, second = pairs[:, :, :, 0], pairs[:, :, ::-1, 1]
    return jnp.concatenate([first, second], axis=2).reshape(rows, heads, columns, size)
