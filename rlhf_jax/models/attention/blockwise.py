"""Blockwise attention in plain JAX: an online softmax that skips hidden blocks.

Queries and keys are cut into blocks. A query block visits one key block after another
and keeps the largest logit, the sum and the weighted values so far, in float32, so that
memory grows with S and not with S². Key blocks after the queries, outside the window or
only of other segments are skipped: the cost of a packed row is the sum of the squares
of its texts' lengths, plus the product with the length of a prompt that texts share.

Source: Rabe & Staats 2021, arXiv:2112.05682; Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models import layout
from rlhf_jax.models.attention import blockwise_passes, ring_passes
from rlhf_jax.models.attention.blockwise_passes import Blocks, Form, Masked
from rlhf_jax.models.attention.ring_passes import Owner
from rlhf_jax.models.caches import KeyValue
from rlhf_jax.models.positions import AttentionMask

Array = jax.Array
# Columns of a block. Small blocks fit a CPU's caches and waste little on masked logits;
# an accelerator's matrix units need larger ones.
BLOCK = {"cpu": 128}
BLOCK_ELSEWHERE = 512


def block_columns(backend: str) -> int:
    """Columns of a block on a backend: "cpu", "gpu" or "tpu"."""
    return BLOCK.get(backend, BLOCK_ELSEWHERE)


def attend_blockwise(
    query: Array,
    keys_values: KeyValue,
    *,
    mask: AttentionMask,
    sinks: Array | None = None,
    block: int | None = None,
) -> Array:
    """softmax(scale · q·kᵀ)·v over what the mask allows, without a [T, S] array.

    `jax.grad`, `jax.vmap` and forward mode over a gradient (products with a Hessian)
    work. Forward mode alone and reverse over reverse do not: JAX cannot differentiate
    loops whose length depends on data. `xla` has both.

    Args:
      query: [B, H, T, head_dim].
      keys_values: [B, K, S, head_dim] each; H/K consecutive query heads read the same
        keys. Values at padding are ignored, even NaN. If keys are passed round,
        [B, K, S/c, head_dim], of the columns of the queries.
      sinks: f32[H], as in `engines.attend_to`.
      block: columns of a block; None is the measured best for the backend.

    Returns:
      [B, H, T, head_dim], in query's dtype; 0 at padding.
    """
    key, value = keys_values
    rows, heads, queries, head_dim = query.shape
    kv_heads, size = key.shape[1], key.shape[2]
    group = heads // kv_heads
    if block is None:
        mesh = jax.sharding.get_abstract_mesh()
        block = block_columns(layout.backend_of(mesh))
    block_q, block_k = (min(block, -(-count // 8) * 8) for count in (queries, size))
    form = Form(
        scale=1 / math.sqrt(head_dim) if mask.scale is None else mask.scale,
        softcap=mask.softcap,
        passed=mask.cut.count if mask.cut is not None and mask.passed else 1,
    )

    def blocks(x: Array, segments: Array, width: int) -> Array:
        """[B, h, n, head_dim] -> [B, blocks, K, h/K · width, head_dim]."""
        x = jnp.where((segments > 0)[:, None, :, None], x, 0)
        room = -x.shape[2] % width
        x = jnp.pad(x, ((0, 0), (0, 0), (0, room), (0, 0)))
        x = x.reshape(rows, kv_heads, -1, x.shape[2] // width, width, head_dim)
        x = x.transpose(0, 3, 1, 2, 4, 5)
        return x.reshape(*x.shape[:3], -1, head_dim)

    def of_blocks(segments: Array, width: int) -> Array:
        room = -segments.shape[1] % width
        padded = jnp.pad(segments, ((0, 0), (0, room)))
        return padded.reshape(segments.shape[0], -1, width)

    def in_blocks(columns: Array, width: int) -> Array:
        room = -columns.shape[0] % width
        return jnp.pad(columns, (0, room), mode="edge").reshape(-1, width)

    segments_q = mask.query_segments(queries)
    prefixes_q = mask.query_prefixes(queries)
    window = mask.columns if mask.window is None else mask.window
    segments_k, columns_k = mask.segments, jnp.arange(mask.columns, dtype=jnp.int32)
    of_keys = of_blocks(segments_k, block_k), in_blocks(columns_k, block_k)
    if form.passed > 1:
        segments_k = segments_q
        of_keys = jax.vmap(
            lambda columns: (
                of_blocks(jnp.take(mask.segments, columns, axis=1), block_k),
                in_blocks(columns, block_k),
            )
        )(mask.columns_of_devices(queries))
    if sinks is not None:  # one per query of a block, head by head
        sinks = jnp.repeat(sinks.reshape(kv_heads, group), block_q, axis=1)
    out: Array = _attend(
        blocks(query, segments_q, block_q),
        blocks(key, segments_k, block_k),
        blocks(value, segments_k, block_k),
        Masked(
            segments_q=of_blocks(segments_q, block_q),
            prefixes_q=of_blocks(prefixes_q, block_q),
            segments_k=of_keys[0],
            columns_q=in_blocks(mask.query_columns(queries), block_q),
            columns_k=of_keys[1],
            window=jnp.asarray(window, jnp.int32),
        ),
        sinks,
        form,
    )
    out = out.reshape(rows, -1, kv_heads, group, block_q, head_dim)
    out = out.transpose(0, 2, 3, 1, 4, 5).reshape(rows, heads, -1, head_dim)
    return out[:, :, :queries]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: Array, k: Array, v: Array, masked: Masked, sinks: Array | None, form: Form
) -> Array:
    out, _ = _forward(q, k, v, masked, sinks, form)
    return out


def _forward(
    q: Array, k: Array, v: Array, masked: Masked, sinks: Array | None, form: Form
) -> tuple[Array, Any]:
    if form.passed == 1:
        out, normaliser = blockwise_passes.forward(
            (q, k, v), masked, sinks=sinks, form=form
        )
        return out, ((q, k, v), masked, out, normaliser, sinks)

    def turn(arrays: Blocks, owner: Owner) -> tuple[Array, Array]:
        of_these = masked.of_keys(ring_passes.device(owner))
        return blockwise_passes.forward(arrays, of_these, form=form, dtype=jnp.float32)

    of_blocks = None if sinks is None else sinks[None, None]
    out, normaliser = ring_passes.forward(
        (q, k, v), turn, count=form.passed, sinks=of_blocks
    )
    out = out.astype(q.dtype)
    return out, ((q, k, v), masked, out, normaliser, sinks)


def _backward(form: Form, residuals: Any, gradient: Array) -> tuple[Array | None, ...]:
    arrays, masked, out, normaliser, sinks = residuals
    of_sinks = None
    if sinks is not None:
        of_sinks = blockwise_passes.gradient_of_sinks(sinks, out, normaliser, gradient)
    if form.passed == 1:
        residuals = arrays, masked, out, normaliser
        blocks = blockwise_passes.backward(residuals, gradient, form=form)
        return *blocks, None, of_sinks

    def turn(arrays: Blocks, owner: Owner) -> Blocks:
        of_these = masked.of_keys(ring_passes.device(owner))
        return blockwise_passes.backward(
            (arrays, of_these, out, normaliser), gradient, form=form, dtype=jnp.float32
        )

    blocks = ring_passes.backward(arrays, turn, count=form.passed)
    return *blocks, None, of_sinks


_attend.defvjp(_forward, _backward)
