"""Grouped products as kernels for NVIDIA GPUs, where XLA expands `ragged_dot`.

    y[i] = x[i] · w[g(i)]         a program for each block of rows and tile of columns
    dw[g] = Σ x[i] dy[i]ᵀ         a program for each group and tile of its matrix

A program reads only the rows of one group, and no matrix of a group without rows.
The kernels are written in Pallas for Triton; off a GPU they are interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

Array = jax.Array
Ref = Any  # an array in the device's memory
Part = tuple[Any, Array]  # a slice, and bool[n] of its indices that are in range
BLOCKS = (128, 64, 32, 16)  # rows of a block
TILE = 128  # columns of an output tile
DEPTH = 32  # products that are summed at a time


def product(
    x: Array,
    w: Array,
    group: Array,
    start: Array,
    end: Array,
    *,
    block: int,
    transposed: bool = False,
    interpret: bool = False,
) -> Array:
    """[M, out] in x's dtype, from [M, in] and [G, in, out], summed in float32.

    Args:
      group, start, end: i32[N], the group of each block of at most `block` rows, its
        first row and the end of its group; nothing is computed where start >= end.
        Rows of no block have no meaning.
      transposed: w is [G, out, in].
    """
    rows, size_in = x.shape
    size_out = w.shape[1 if transposed else 2]
    width = min(TILE, max(16, pl.next_power_of_2(size_out)))

    def kernel(group: Ref, start: Ref, end: Ref, x: Ref, w: Ref, y: Ref) -> None:
        turn, column = pl.program_id(0), pl.program_id(1) * width
        at, own = start[turn], group[turn]
        own_rows = pl.ds(at, block), (at + _numbers(block) < end[turn])
        columns = pl.ds(column, width), column + _numbers(width) < size_out

        def add(step: Array, sums: Array) -> Array:
            depth = step * DEPTH
            inner = pl.ds(depth, DEPTH), depth + _numbers(DEPTH) < size_in
            part = _read(x, own_rows, inner)
            if transposed:
                return sums + _dot(part, _read(w, columns, inner, own).T)
            return sums + _dot(part, _read(w, inner, columns, own))

        steps = jnp.where(at < end[turn], jnp.int32(pl.cdiv(size_in, DEPTH)), 0)
        zeros = jnp.zeros((block, width), jnp.float32)
        _write(y, own_rows, columns, jax.lax.fori_loop(0, steps, add, zeros))

    grid = group.shape[0], pl.cdiv(size_out, width)
    shape = jax.ShapeDtypeStruct((rows, size_out), x.dtype)
    call = _call(kernel, grid=grid, shape=shape, interpret=interpret, arguments=5)
    return call(group, start, end, x, w)


def of_weights(
    x: Array, gradient: Array, start: Array, end: Array, *, interpret: bool = False
) -> Array:
    """[G, in, out] in x's dtype: Σ x[i] gradient[i]ᵀ over the rows of each group.

    Args:
      start, end: i32[G], the first row of each group and the row after its last.
    """
    sizes = x.shape[1], gradient.shape[1]
    tiles = [min(TILE, max(16, pl.next_power_of_2(size))) for size in sizes]

    def kernel(start: Ref, end: Ref, x: Ref, gradient: Ref, w: Ref) -> None:
        group = pl.program_id(0)
        first, last = start[group], end[group]
        tile_in, tile_out = (
            (pl.ds(at * tile, tile), at * tile + _numbers(tile) < size)
            for at, tile, size in zip(
                (pl.program_id(1), pl.program_id(2)), tiles, sizes, strict=True
            )
        )

        def add(step: Array, sums: Array) -> Array:
            at = first + step * DEPTH
            rows = pl.ds(at, DEPTH), at + _numbers(DEPTH) < last
            part, above = _read(x, rows, tile_in), _read(gradient, rows, tile_out)
            return sums + _dot(part.T, above)

        steps = pl.cdiv(last - first, DEPTH)
        zeros = jnp.zeros(tuple(tiles), jnp.float32)
        sums = jax.lax.fori_loop(0, steps, add, zeros)
        _write(w, tile_in, tile_out, sums, group)

    grid = (
        start.shape[0],
        *(pl.cdiv(*pair) for pair in zip(sizes, tiles, strict=True)),
    )
    shape = jax.ShapeDtypeStruct((start.shape[0], *sizes), x.dtype)
    call = _call(kernel, grid=grid, shape=shape, interpret=interpret, arguments=4)
    return call(start, end, x, gradient)


def _call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    shape: jax.ShapeDtypeStruct,
    interpret: bool,
    arguments: int,
) -> Callable[..., Array]:
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole] * arguments,
        out_specs=whole,
        out_shape=shape,
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    )


def _numbers(count: int) -> Array:
    return jnp.arange(count, dtype=jnp.int32)


def _read(ref: Ref, rows: Part, columns: Part, *group: Array) -> Array:
    in_range = rows[1][:, None] & columns[1][None]
    return triton.load(ref.at[*group, rows[0], columns[0]], mask=in_range, other=0.0)


def _write(ref: Ref, rows: Part, columns: Part, values: Array, *group: Array) -> None:
    in_range = rows[1][:, None] & columns[1][None]
    at = ref.at[*group, rows[0], columns[0]]
    triton.store(at, values.astype(ref.dtype), mask=in_range)


def _dot(a: Array, b: Array) -> Array:
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return triton.dot(a, b, precision=exact)
