"""Blockwise attention in plain JAX: an online softmax that skips hidden blocks.

Queries and keys are cut into blocks. A query block meets one key block after another
and keeps the largest logit, the sum and the weighted values so far, in float32, so that
memory grows with S and not with S². Key blocks after the queries, out of the window, or
of other segments alone are not visited: a packed row costs the squares of its texts,
and of a prompt that texts share the product of its length and theirs.

Source: Rabe & Staats 2021, arXiv:2112.05682; Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models import layout
from rlhf_jax.models.attention import blockwise_passes
from rlhf_jax.models.attention.blockwise_passes import Form, Masked
from rlhf_jax.models.caches import KeyValue
from rlhf_jax.models.positions import AttentionMask

Array = jax.Array
# Columns of a block. A CPU's caches hold the logits of small ones, and little of a
# block is masked; an accelerator's matrix units want larger ones.
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
    """softmax(scale · q·kᵀ)·v over what the mask allows, holding no [T, S].

    `jax.grad`, `jax.vmap` and the forward mode of a gradient (products with a Hessian)
    work. Forward mode by itself does not, nor a reverse pass through a reverse pass, as
    JAX has none of loops whose length depends on data; `xla` has both.

    Args:
      keys_values: [B, K, S, head_dim] each; H/K query heads in a row read the same
        keys. What stands at padding is not read, not even NaN.
      sinks: f32[H], as `engines.attend_to` has them.
      block: columns of a block; None is as measured for this backend.

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

    segments_q = mask.query_segments(queries)
    prefixes_q = mask.query_prefixes(queries)
    columns = mask.query_columns(queries)
    room = -queries % block_q
    columns = jnp.pad(columns, (0, room), mode="edge").reshape(-1, block_q)
    window = size if mask.window is None else mask.window
    if sinks is not None:  # of the queries in a block, group by group
        sinks = jnp.repeat(sinks.reshape(kv_heads, group), block_q, axis=1)
    out: Array = _attend(
        blocks(query, segments_q, block_q),
        blocks(key, mask.segments, block_k),
        blocks(value, mask.segments, block_k),
        Masked(
            segments_q=of_blocks(segments_q, block_q),
            prefixes_q=of_blocks(prefixes_q, block_q),
            segments_k=of_blocks(mask.segments, block_k),
            columns=columns,
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
    out, _ = blockwise_passes.forward((q, k, v), masked, sinks=sinks, form=form)
    return out


def _forward(
    q: Array, k: Array, v: Array, masked: Masked, sinks: Array | None, form: Form
) -> tuple[Array, Any]:
    out, normaliser = blockwise_passes.forward(
        (q, k, v), masked, sinks=sinks, form=form
    )
    return out, ((q, k, v), masked, out, normaliser, sinks)


def _backward(form: Form, residuals: Any, gradient: Array) -> tuple[Array | None, ...]:
    arrays, masked, out, normaliser, sinks = residuals
    of_sinks = None
    if sinks is not None:
        of_sinks = blockwise_passes.gradient_of_sinks(sinks, out, normaliser, gradient)
    kept = arrays, masked, out, normaliser
    blocks = blockwise_passes.backward(kept, gradient, form=form)
    return *blocks, None, of_sinks


_attend.defvjp(_forward, _backward)
