"""Splash attention: JAX's flash attention for TPUs, a Pallas kernel.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention

from rlhf_jax.models.axes import balanced
from rlhf_jax.models.caches import KeyValue
from rlhf_jax.models.positions import AttentionMask, with_static_window

Array = jax.Array
LANES = 128  # a block has a multiple of this many columns
# Most columns of a block. A block's logits are kept in a TPU core's own memory.
BLOCK, BLOCK_COMPUTE = 1024, 512
# Most logits of a head for a backward pass of one kernel. It keeps a gradient of the
# queries for each block of keys, which grows with their number; two kernels do not.
FUSED = 8192**2


def attend_splash(
    query: Array,
    keys_values: KeyValue,
    *,
    mask: AttentionMask,
    sinks: Array | None = None,
    interpret: bool = False,
) -> Array:
    """softmax(scale · q·kᵀ)·v over what the mask allows, without a [T, S] array.

    Blocks that causality or the window hides are not visited. Queries are scaled in
    their own dtype. JAX has only reverse mode for this kernel.

    Args:
      mask: of S columns; a traced window needs `windows`.
      sinks: f32[H], as in `engines.attend_to`.
      interpret: runs the kernel's operations one by one, on any backend, for tests.

    Returns:
      [B, H, T, head_dim], in query's dtype; finite at padding if the inputs are.
    """
    size, queries = keys_values[0].shape[2], query.shape[2]
    block = block_columns(size)
    room = -size % block
    # The last T queries are padded on the left to all columns. With a cut, the kernel
    # gets the columns of the queries instead.
    before, after = size - queries, room
    block_q, segments_q = block, jnp.pad(mask.segments, ((0, 0), (0, room)))
    if mask.share is not None:
        block_q = block_columns(queries)
        before, after = 0, -queries % block_q
        segments_q = jnp.pad(mask.query_segments(queries), ((0, 0), (0, after)))

    def padded(x: Array, before: int, after: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), (before, after), (0, 0)))

    scale = 1 / math.sqrt(query.shape[-1]) if mask.scale is None else mask.scale
    # The kernel takes no scale of logits: it multiplies the queries.
    scaled = padded((query * scale).astype(query.dtype), before, after)
    key, value = (padded(x, 0, room) for x in keys_values)
    segments = jnp.pad(mask.segments, ((0, 0), (0, room)))

    def attend(mask: AttentionMask) -> Array:
        kernel = _kernel(
            heads=query.shape[1],
            queries=queries,
            columns=size + room,
            blocks=(block_q, block),
            mask=mask,
            interpret=interpret,
        )

        def row(query: Array, key: Array, value: Array, ids: tuple[Array, ...]) -> Any:
            ids = splash_attention.SegmentIds(*ids)
            return kernel(query, key, value, segment_ids=ids, sinks=sinks)

        # The kernel computes all heads of one row.
        return jax.vmap(row)(scaled, key, value, (segments_q, segments))

    # The kernel's tables of blocks are made at trace time, for one window.
    y = with_static_window(mask, attend)
    return y[:, :, before : before + queries]


def block_columns(columns: int) -> int:
    """Columns of a block, a multiple of the lanes of a TPU."""
    return min(BLOCK, -(-columns // LANES) * LANES)


def _kernel(
    *,
    heads: int,
    queries: int,
    columns: int,
    blocks: tuple[int, int],
    mask: AttentionMask,
    interpret: bool,
) -> Callable[..., Any]:
    block_q, _ = blocks
    of_queries = np.arange(columns, dtype=np.int32)
    shares = 1
    if mask.cut is not None:
        shares = mask.cut.count
        of_queries = balanced(mask.columns, count=shares).reshape(shares, queries)
        # Padding gets column 0, from which a query still attends to something.
        of_queries = np.pad(of_queries, ((0, 0), (0, -queries % block_q))).reshape(-1)
    shape = (of_queries.size, columns)
    causal = splash_attention.CausalMask(shape)
    if mask.window is not None:
        assert isinstance(mask.window, int)  # by `with_static_window`
        causal = splash_attention.LocalMask(shape, (mask.window - 1, 0), 0)
    # Causality by the columns of queries in their row, not by their place in the block.
    causal.q_sequence = of_queries
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([causal] * heads),
        block_sizes=block_sizes(*blocks, pairs=of_queries.size // shares * columns),
        head_shards=1,
        q_seq_shards=shares,
        attn_logits_soft_cap=mask.softcap,
        interpret=interpret,
    )
    if mask.share is None:
        return kernel
    return jax.tree.map(functools.partial(_share, mask.share, shares), kernel)


def block_sizes(block_q: int, block: int, *, pairs: int) -> splash_attention.BlockSizes:
    """Block sizes of a kernel with `pairs` logits per head."""
    compute = math.gcd(block, BLOCK_COMPUTE)
    fused = pairs <= FUSED
    return splash_attention.BlockSizes(
        block_q=block_q,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block_q,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        block_q_dq=None if fused else block_q,
        block_kv_dq=None if fused else block,
        use_fused_bwd_kernel=fused,
    )


def _share(share: Array, shares: int, blocks: Array) -> Array:
    """The part of a kernel's table that belongs to the queries of a device.

    Args:
      blocks: i32[c·T] columns of queries, or [1, c·n, m] of blocks; cut as by the
        kernel's own `manual_sharding_spec`.
    """
    axis = 0 if blocks.ndim == 1 else 1
    size = blocks.shape[axis] // shares
    return jax.lax.dynamic_slice_in_dim(blocks, share * size, size, axis)
