"""Splash attention: JAX's flash attention for TPUs, a Pallas kernel.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

from rlhf_jax.models.attention.cache import KeyValue
from rlhf_jax.models.attention.record import AttentionMask, with_static_window

Array = jax.Array
LANES = 128  # columns that a block is a multiple of
# Largest block, columns. A block's logits are kept in a TPU core's own memory.
BLOCK, BLOCK_COMPUTE = 1024, 512
# Columns up to which the backward pass is one kernel. It keeps the gradient of the
# queries once for each block of keys, which grows with S²; two kernels do not.
FUSED = 8192


def attend_splash(
    query: Array, keys_values: KeyValue, *, mask: AttentionMask, interpret: bool = False
) -> Array:
    """softmax(scale · q·kᵀ)·v over what the mask allows, holding no [T, S].

    Blocks that causality or the window hides are not visited. Queries are scaled in
    their own dtype. JAX has reverse mode alone of this kernel.

    Args:
      query: [B, H, T, head_dim], of the last T columns.
      keys_values: [B, K, S, head_dim] each; K divides H.
      mask: of S columns; a traced window has its values in `windows`.
      interpret: the kernel's operations one by one, on any backend, for tests.

    Returns:
      [B, H, T, head_dim], in query's dtype; finite at padding where what comes in is.
    """
    size, queries = keys_values[0].shape[2], query.shape[2]
    block = min(BLOCK, -(-size // LANES) * LANES)
    room = -size % block

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), (size - x.shape[2], room), (0, 0)))

    scale = 1 / math.sqrt(query.shape[-1]) if mask.scale is None else mask.scale
    scaled = padded((query * scale).astype(query.dtype))
    key, value = map(padded, keys_values)
    segments = jnp.pad(mask.segments, ((0, 0), (0, room)))

    def attend(mask: AttentionMask) -> Array:
        kernel = _kernel(
            heads=query.shape[1],
            columns=size + room,
            block=block,
            mask=mask,
            interpret=interpret,
        )

        def row(query: Array, key: Array, value: Array, segments: Array) -> Array:
            ids = splash_attention.SegmentIds(segments, segments)
            return kernel(query, key, value, segment_ids=ids)

        return jax.vmap(row)(scaled, key, value, segments)

    y = with_static_window(mask, attend)
    return y[:, :, size - queries : size]


def _kernel(
    *, heads: int, columns: int, block: int, mask: AttentionMask, interpret: bool
) -> Callable[..., Any]:
    shape = (columns, columns)
    causal: splash_attention.Mask = splash_attention.CausalMask(shape)
    if mask.window is not None:
        assert isinstance(mask.window, int)  # as `with_static_window` has it
        causal = splash_attention.LocalMask(shape, (mask.window - 1, 0), 0)
    compute = math.gcd(block, BLOCK_COMPUTE)
    fused = columns <= FUSED
    return splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([causal] * heads),
        block_sizes=splash_attention.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=compute,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=compute,
            block_q_dq=None if fused else block,
            block_kv_dq=None if fused else block,
            use_fused_bwd_kernel=fused,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=mask.softcap,
        interpret=interpret,
    )
