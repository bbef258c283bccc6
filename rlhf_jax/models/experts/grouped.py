"""Grouped products: every row times the matrix of its group; no row is dropped.

    rows, sorted by group     0 0 0 1 3 3       sizes  3 1 0 2
    y[i] = x[i] · w[group of i]

TPUs use `jax.lax.ragged_dot`. XLA:CPU expands it to every group times every row, so a
CPU runs a loop over blocks of rows instead:

    blocks of 2       [0 0] [0 ·] [1 ·] [3 3]

Each block is multiplied by one matrix, and only blocks that hold a row are visited. On
TPUs the gradient of w is such a loop too, as XLA expands the transpose of `ragged_dot`.
NVIDIA GPUs use our own kernels (`kernels.py`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
# Sizes of a block in rows. The largest that an even share of the rows fills is used, so
# that blocks have few empty rows.
BLOCKS = (128, 64, 32, 16, 8)  # on a CPU
LARGE = 1024, 512, 256, *BLOCKS  # elsewhere


TURNS = "expected_turns_"  # scope of a loop, with its turns if the load is even


class Load(NamedTuple):
    """The expected load of the groups, which sizes blocks; plans count work with it."""

    rows: int  # rows that belong to a group
    groups: float  # groups that have a row

    @property
    def scope(self) -> str:
        """Name of the `jax.named_scope` around products of this load."""
        return f"rows_{self.rows}_of_{self.groups:.4f}_groups"

    @classmethod
    def of_scope(cls, text: str) -> Load | None:
        """Reads the load from the last such scope in a text; None without one."""
        matches = re.findall(r"rows_(\d+)_of_([\d.]+)_groups", text)
        return cls(int(matches[-1][0]), float(matches[-1][1])) if matches else None

    def turns(self, block: int) -> int:
        """Number of blocks that hold a row if the load is even."""
        own = round(self.rows / self.groups, 3)  # 128 of 7.9999999999 are 16
        return math.ceil(self.groups * math.ceil(own / block))


def grouped_product(
    x: Array, w: Array, *, sizes: Array, load: Load | None = None
) -> Array:
    """y[i] = x[i] · w[g(i)], where rows of group 0 come first, then those of group 1.

    Rows beyond Σ sizes belong to no group: their y and the gradient of their x have no
    meaning and may be infinite or NaN. They affect neither other rows nor the gradient
    of w.

    Reverse mode, `jax.vmap` and forward mode over a gradient work; forward mode alone
    and reverse over reverse do not.

    Args:
      x: floats[M, in].
      w: [G, in, out], of the same dtype.
      sizes: i32[G], rows of each group; Σ sizes <= M.
      load: the expected load, which changes only speed and rounding; None is M rows in
        all groups.

    Returns:
      [M, out] of x's dtype, summed in float32.
    """
    if load is None:
        load = Load(x.shape[0], min(x.shape[0], w.shape[0]))
    engines = {"cpu": _blocked, "cuda": _kernel, "default": _ragged}
    return jax.lax.platform_dependent(
        x, w, sizes, **{k: functools.partial(f, load=load) for k, f in engines.items()}
    )


def _block_size(rows: int, groups: int, *, blocks: tuple[int, ...] = BLOCKS) -> int:
    return next((size for size in blocks if rows >= size * groups), blocks[-1])


def _plan(sizes: Array, *, rows: int, block: int) -> tuple[Array, ...]:
    """Group, start and end of group of every block, i32[n]; the number of blocks."""
    groups = sizes.shape[0]
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    of_group = -(-sizes // block)
    last = jnp.cumsum(of_group, dtype=jnp.int32)
    # A group with rows leaves at most block - 1 places empty.
    most = (rows + min(groups, rows) * (block - 1)) // block
    number = jnp.arange(most, dtype=jnp.int32)
    group = jnp.searchsorted(last, number, side="right").astype(jnp.int32)
    group = jnp.minimum(group, groups - 1)
    turn = number - (last - of_group)[group]
    start = (ends - sizes)[group] + turn * block
    return group, start, ends[group], last[-1]


def _loop(
    turn: Callable[[Array, Array], Array], start: Array, *, count: Array, expected: int
) -> Array:
    with jax.named_scope(f"{TURNS}{expected}"):
        return jax.lax.fori_loop(0, count, turn, start)


def _visited(
    x: Array, w: Array, sizes: Array, *, load: Load, transposed: bool = False
) -> Array:
    rows, groups = x.shape[0], w.shape[0]
    block = _block_size(load.rows, groups)
    group, start, _, count = _plan(sizes, rows=rows, block=block)
    # Room for the last block, which may reach beyond the rows.
    x = jnp.pad(x, ((0, block), (0, 0)))
    y = jnp.zeros((rows + block, w.shape[1 if transposed else 2]), x.dtype)

    def meet(turn: Array, y: Array) -> Array:
        at = start[turn]
        part = jax.lax.dynamic_slice_in_dim(x, at, block)
        matrix = jax.lax.dynamic_index_in_dim(w, group[turn], keepdims=False)
        matrix = matrix.T if transposed else matrix
        product = jnp.matmul(part, matrix, preferred_element_type=jnp.float32)
        # The next group overwrites what a block computes for its rows.
        return jax.lax.dynamic_update_slice_in_dim(y, product.astype(y.dtype), at, 0)

    return _loop(meet, y, count=count, expected=load.turns(block))[:rows]


def _of_weights(
    x: Array, gradient: Array, sizes: Array, *, load: Load, blocks: tuple[int, ...]
) -> Array:
    """f32[G, in, out]: Σ x[i] gradient[i]ᵀ over the rows of each group."""
    rows, groups = x.shape[0], sizes.shape[0]
    block = _block_size(load.rows, groups, blocks=blocks)
    group, start, end, count = _plan(sizes, rows=rows, block=block)
    x, gradient = (jnp.pad(a, ((0, block), (0, 0))) for a in (x, gradient))
    place = jnp.arange(block, dtype=jnp.int32)

    def meet(turn: Array, so_far: Array) -> Array:
        at, own = start[turn], group[turn]
        # Rows of the next group, or of no group, add nothing.
        in_group = (at + place < end[turn])[:, None]
        part, above = (
            jnp.where(in_group, jax.lax.dynamic_slice_in_dim(a, at, block), 0)
            for a in (x, gradient)
        )
        laid_out = jax.lax.optimization_barrier(part.T)
        more = jnp.matmul(laid_out, above, preferred_element_type=jnp.float32)
        sums = jax.lax.dynamic_index_in_dim(so_far, own, keepdims=False) + more
        return jax.lax.dynamic_update_index_in_dim(so_far, sums, own, 0)

    zeros = jnp.zeros((groups, x.shape[1], gradient.shape[1]), jnp.float32)
    return _loop(meet, zeros, count=count, expected=load.turns(block))


def _dot(
    x: Array, w: Array, sizes: Array, *, load: Load, transposed: bool = False
) -> Array:
    with jax.named_scope(load.scope):
        return jax.lax.ragged_dot(x, w.swapaxes(1, 2) if transposed else w, sizes)


def _bilinear(
    function: Callable[..., Array], *, static: tuple[int, ...]
) -> Callable[..., Array]:
    """function(a, b, sizes, ...), linear in a and in b, with its derivative."""
    own = jax.custom_jvp(function, nondiff_argnums=static)

    @own.defjvp
    def _(*arguments: Any) -> tuple[Array, Array]:
        *options, (a, b, sizes), (da, db, _) = arguments
        moved = own(da, b, sizes, *options) + own(a, db, sizes, *options)
        return own(a, b, sizes, *options), moved

    return own


@functools.partial(_bilinear, static=(3, 4))
def _visited_by_kernel(
    x: Array, w: Array, sizes: Array, load: Load, transposed: bool = False
) -> Array:
    # Imported here and below: dense models need no Pallas.
    from rlhf_jax.models.experts import kernels

    block = _block_size(load.rows, w.shape[0], blocks=kernels.BLOCKS)
    group, start, end, count = _plan(sizes, rows=x.shape[0], block=block)
    number = jnp.arange(group.shape[0], dtype=jnp.int32)
    end = jnp.where(number < count, end, 0)
    with jax.named_scope(load.scope):
        return kernels.product(
            *(x, w, group, start, end), block=block, transposed=transposed
        )


@functools.partial(_bilinear, static=(3,))
def _of_weights_by_kernel(x: Array, gradient: Array, sizes: Array, load: Load) -> Array:
    from rlhf_jax.models.experts import kernels

    end = jnp.cumsum(sizes, dtype=jnp.int32)
    with jax.named_scope(load.scope):
        return kernels.of_weights(x, gradient, end - sizes, end)


class Engine(NamedTuple):
    """The product of rows with matrices, and the gradient of the matrices."""

    product: Callable[..., Array]  # also with transposed matrices
    of_weights: Callable[..., Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def _with(engine: Engine, x: Array, w: Array, sizes: Array, load: Load) -> Array:
    return engine.product(x, w, sizes, load=load)


def _forward(
    engine: Engine, x: Array, w: Array, sizes: Array, load: Load
) -> tuple[Array, tuple[Array, Array, Array]]:
    # Not `_with`, which has no derivative along a direction.
    return engine.product(x, w, sizes, load=load), (x, w, sizes)


def _backward(
    engine: Engine, load: Load, residuals: Any, gradient: Array
) -> tuple[Array, Array, None]:
    x, w, sizes = residuals
    of_x = engine.product(gradient, w, sizes, load=load, transposed=True)
    of_w = engine.of_weights(x, gradient, sizes, load=load)
    return of_x, of_w.astype(w.dtype), None


_with.defvjp(_forward, _backward)
_blocked, _ragged, _kernel = (
    functools.partial(_with, Engine(product, of_weights))
    for product, of_weights in (
        (_visited, functools.partial(_of_weights, blocks=BLOCKS)),
        (_dot, functools.partial(_of_weights, blocks=LARGE)),
        (_visited_by_kernel, _of_weights_by_kernel),
    )
)
