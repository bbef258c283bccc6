"""Attention by cuDNN, on NVIDIA GPUs."""

from __future__ import annotations

import jax

from rlhf_jax.models.attention.cache import KeyValue
from rlhf_jax.models.attention.record import AttentionMask, allowed

Array = jax.Array


def attend_cudnn(query: Array, keys_values: KeyValue, *, mask: AttentionMask) -> Array:
    """Flash attention by cuDNN, which holds no logits and has no soft cap.

    Args:
      query: [B, H, T, head_dim], of the last T columns, in bfloat16.
      keys_values: [B, K, S, head_dim] each.
      mask: of S columns, without a soft cap.

    Returns:
      [B, H, T, head_dim], in query's dtype.
    """
    key, value = (array.swapaxes(1, 2) for array in keys_values)
    y = jax.nn.dot_product_attention(
        query.swapaxes(1, 2),
        key,
        value,
        mask=allowed(mask, queries=query.shape[2])[:, None],
        scale=mask.scale,
        implementation="cudnn",
    )
    return y.swapaxes(1, 2)
