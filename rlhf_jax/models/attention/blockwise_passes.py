"""The two passes of blockwise attention: forward and backward.

Shapes: B rows; n, m blocks of queries and keys; K key-value heads; Q queries in a block
of all G heads that share keys, head by head; k columns in a block of keys; d head_dim.

    q        [B, n, K, Q, d]         k, v        [B, m, K, k, d]
    segments_q  i32[B, n, Q / G]     segments_k  i32[B, m, k]
    prefixes_q  i32[B, n, Q / G], the segments that queries see besides their own
    columns_q   i32[n, Q / G], of the queries, increasing
    columns_k   i32[m, k], of the keys, increasing

Logits are transposed, [K, k, Q]: a softmax then reduces over the first of two
dimensions, which a CPU does in vectors, and all products are of plain matrices.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Array = jax.Array
Blocks = tuple[Array, ...]  # q, k, v

HIDDEN = -1e30  # a logit that is masked
# Scopes of the loops whose length depends on the mask, in a compiled program.
KEY_BLOCKS, QUERY_BLOCKS = "visited_key_blocks", "visited_query_blocks"
LEAST = -5e29  # initial maximum: masked logits become exp(HIDDEN - LEAST) = 0


class Masked(NamedTuple):
    """Which queries attend to which keys."""

    segments_q: Array  # i32[B, n, Q / G], 0 at padding
    prefixes_q: Array  # i32[B, n, Q / G], 0 is none
    segments_k: Array  # i32[B, m, k], 0 at padding
    columns_q: Array  # i32[n, Q / G], of the queries, increasing
    columns_k: Array  # i32[m, k], of the keys, increasing
    window: Array  # i32[], columns

    def of_keys(self, device: Array) -> Masked:
        """The record for the keys of one device, from arrays stacked over devices."""
        segments_k, columns_k = self.segments_k[device], self.columns_k[device]
        return self._replace(segments_k=segments_k, columns_k=columns_k)


class Form(NamedTuple):
    """Static arguments of a call."""

    scale: float  # multiplies q·k
    softcap: float | None
    passed: int = 1  # devices that pass keys round


def forward(
    arrays: Blocks,
    masked: Masked,
    *,
    sinks: Array | None = None,
    form: Form,
    dtype: DTypeLike | None = None,
) -> tuple[Array, Array]:
    """The output of attention, and the logarithm of each softmax's denominator.

    Args:
      sinks: f32[K, Q], logits without a value; None: no sinks.
      dtype: of the output; None is q's.

    Returns:
      [B, n, K, Q, d], 0 where nothing is attended to; f32[B, n, K, Q], `LEAST` there.
    """
    q, k, v = arrays
    dtype = q.dtype if dtype is None else dtype
    rows, blocks, kv_heads, queries, head_dim = q.shape
    num_keys = k.shape[1]
    order, count = visited(masked, of_keys=False)
    keys, values = _flat(k), _flat(v.mT)

    def of_queries(_: None, one: tuple[Array, ...]) -> tuple[None, tuple[Array, Array]]:
        number, q, order, count = one
        row, i = number // blocks, number % blocks

        def meet(turn: Array, so_far: tuple[Array, ...]) -> tuple[Array, ...]:
            largest, total, out = so_far
            j = order[turn]
            key, value = (_at(x, row * num_keys + j) for x in (keys, values))
            s, _ = _logits(key, q, masked, row, i, j, form=form)
            # Online softmax: rescales the sums when the maximum grows.
            new = jnp.maximum(largest, s.max(axis=1))
            p = jnp.exp(s - new[:, None])
            shrunk = jnp.exp(largest - new)
            out = out * shrunk[:, None] + _product(value, p.astype(v.dtype))
            return new, total * shrunk + p.sum(axis=1), out

        none = jnp.zeros((kv_heads, queries), jnp.float32)
        out = jnp.zeros((kv_heads, head_dim, queries), jnp.float32)
        with jax.named_scope(KEY_BLOCKS):
            largest, total, out = jax.lax.fori_loop(
                0, count, meet, (none + LEAST, none, out)
            )
        if sinks is not None:
            new = jnp.maximum(largest, sinks)
            shrunk, largest = jnp.exp(largest - new), new
            total, out = total * shrunk + jnp.exp(sinks - new), out * shrunk[:, None]
        # Padding that sees no key has no denominator.
        live = total > 0
        total = jnp.where(live, total, 1)
        normaliser = jnp.where(live, largest + jnp.log(total), LEAST)
        return None, ((out / total[:, None]).astype(dtype), normaliser)

    every = _numbers(rows * blocks), _flat(q.mT), order, count
    _, (out, normaliser) = jax.lax.scan(of_queries, None, every)
    out = out.reshape(rows, blocks, *out.shape[1:]).mT
    return out, normaliser.reshape(q.shape[:-1])


def backward(
    residuals: Any, gradient: Array, *, form: Form, dtype: DTypeLike | None = None
) -> Blocks:
    """Gradients of q, k and v.

    A key block visits one query block after another, and sums the gradients of its keys
    and values in place; those of the queries are summed block by block.

    Args:
      residuals: arguments and results of `forward`; if the softmax is over more keys
        than k, the results over all of them.
      gradient: [B, n, K, Q, d], of the output of `forward`.
      dtype: of the gradients; None is that of q, k and v.

    Returns:
      In the shapes of q, k and v.
    """
    (q, k, v), masked, out, normaliser = residuals
    dtype = q.dtype if dtype is None else dtype
    rows, blocks, *_ = q.shape
    num_keys = k.shape[1]
    # Σ p·dp of the softmax's gradient, from the output instead of all S probabilities.
    share = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    order, count = visited(masked, of_keys=True)
    of_queries = tuple(map(_flat, (q, q.mT, gradient, gradient.mT, normaliser, share)))

    def of_keys(of_q: Array, one: tuple[Array, ...]) -> tuple[Array, Any]:
        number, k, transposed, v, order, count = one
        row, j = number // num_keys, number % num_keys

        def meet(turn: Array, so_far: tuple[Array, ...]) -> tuple[Array, ...]:
            of_q, of_k, of_v = so_far
            i = order[turn]
            place = row * blocks + i
            query, query_t, grad, grad_t, normaliser, share = (
                _at(x, place) for x in of_queries
            )
            s, slope = _logits(k, query_t, masked, row, i, j, form=form)
            # Recomputed from q and k: probabilities are never kept for the gradient.
            p = jnp.exp(s - normaliser[:, None])
            of_s = p * (_product(v, grad_t) - share[:, None]) * slope
            of_s = of_s.astype(q.dtype)
            of_v += _product(p.astype(grad.dtype), grad)
            of_k += _product(of_s, query)
            more = _at(of_q, place) + _product(transposed, of_s)
            of_q = jax.lax.dynamic_update_index_in_dim(of_q, more, place, axis=0)
            return of_q, of_k, of_v

        zero = jnp.zeros(k.shape, jnp.float32)
        with jax.named_scope(QUERY_BLOCKS):
            of_q, of_k, of_v = jax.lax.fori_loop(0, count, meet, (of_q, zero, zero))
        return of_q, (of_k.astype(dtype), of_v.astype(dtype))

    every = (
        *(_numbers(rows * num_keys), _flat(k), _flat(k.mT), _flat(v)),
        *(order, count),
    )
    of_q = jnp.zeros(of_queries[1].shape, jnp.float32)
    of_q, (of_k, of_v) = jax.lax.scan(of_keys, of_q, every)
    of_q = of_q.mT.reshape(q.shape).astype(dtype)
    return of_q, of_k.reshape(k.shape), of_v.reshape(v.shape)


def gradient_of_sinks(
    sinks: Array, out: Array, normaliser: Array, gradient: Array
) -> Array:
    """f32[K, Q]: -p Σ out·gradient of every query, p the probability of its sink."""
    share = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    # A query that sees no key has out 0.
    return -(jnp.exp(sinks[None, None] - normaliser) * share).sum(axis=(0, 1))


def _logits(
    key: Array,
    query: Array,
    masked: Masked,
    row: Array,
    i: Array,
    j: Array,
    *,
    form: Form,
) -> tuple[Array, Array | float]:
    """Logits s of key block j [K, k, d] and query block i [K, d, Q], and ds / d(q·k).

    Returns:
      f32[K, k, Q], `HIDDEN` where masked; the derivative where not.
    """
    segments_q, prefixes_q = (
        _block(x, row, i) for x in (masked.segments_q, masked.prefixes_q)
    )
    segments_k = _block(masked.segments_k, row, j)
    group = query.shape[-1] // segments_q.shape[0]
    s = _product(key, query) * form.scale
    slope: Array | float = form.scale
    if form.softcap is not None:
        bent = jnp.tanh(s / form.softcap)
        s, slope = form.softcap * bent, form.scale * (1 - jnp.square(bent))
    distance = _at(masked.columns_q, i)[None, :] - _at(masked.columns_k, j)[:, None]
    visible = segments_q[None, :] == segments_k[:, None]
    visible |= prefixes_q[None, :] == segments_k[:, None]
    visible &= (segments_k > 0)[:, None] & (distance >= 0) & (distance < masked.window)
    return jnp.where(jnp.tile(visible, (1, group))[None], s, HIDDEN), slope


def _product(a: Array, b: Array) -> Array:
    """[K, x, y] · [K, y, z], summed in float32."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def visited(masked: Masked, *, of_keys: bool) -> tuple[Array, Array]:
    """The key blocks that each query block sees; with `of_keys` the other way round.

    Returns:
      i32[B · n, m], numbers of all key blocks, those that are seen first; i32[B · n],
      how many are seen. With `of_keys` i32[B · m, n] and i32[B · m].
    """
    first_k, last_k = masked.columns_k[:, 0], masked.columns_k[:, -1]
    first_q, last_q = masked.columns_q[:, :1], masked.columns_q[:, -1:]
    within = (first_k[None, :] <= last_q) & (first_q - last_k[None, :] < masked.window)
    least, largest = _bounds(masked.segments_k)
    met = jnp.zeros((), bool)
    for segments in (masked.segments_q, masked.prefixes_q):
        first, last = _bounds(segments)
        met |= (first[:, :, None] <= largest[:, None, :]) & (
            least[:, None, :] <= last[:, :, None]
        )
    met &= within[None]
    if of_keys:
        met = met.swapaxes(1, 2)
    # Seen blocks come first: a loop of `count` turns visits no other.
    order = jnp.argsort(~met, axis=2, stable=True).astype(jnp.int32)
    return _flat(order), _flat(met.sum(axis=2, dtype=jnp.int32))


def _bounds(segments: Array) -> tuple[Array, Array]:
    """The smallest and the largest segment of each block, without padding."""
    token = segments > 0
    least = jnp.where(token, segments, jnp.iinfo(jnp.int32).max).min(axis=2)
    return least, jnp.where(token, segments, -1).max(axis=2)


def _flat(x: Array) -> Array:
    """[B, n, ...] -> [B · n, ...]."""
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])


def _at(x: Array, place: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, place, keepdims=False)


def _block(x: Array, row: Array, number: Array) -> Array:
    """Block `number` of a row, [B, n, w] -> [w]."""
    width = x.shape[2]
    return jax.lax.dynamic_slice(x, (row, number, 0), (1, 1, width)).reshape(width)


def _numbers(count: int) -> Array:
    return jnp.arange(count, dtype=jnp.int32)
