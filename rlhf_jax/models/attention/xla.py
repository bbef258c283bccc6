"""Attention by XLA, which holds the logits of all heads, [B, H, T, S].

Shapes: B rows, T new tokens, S tokens attended to, H query heads, K key-value heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.models import layout
from rlhf_jax.models.attention.cache import Cached, KeyValue, logits_of, plain
from rlhf_jax.models.attention.record import AttentionMask, allowed

Array = jax.Array


def attend_xla(query: Array, keys_values: KeyValue, *, mask: AttentionMask) -> Array:
    """softmax(scale · q·kᵀ)·v over what the mask allows."""
    return attend_to(
        query,
        keys_values,
        attend=allowed(mask, queries=query.shape[2]),
        scale=mask.scale,
        softcap=mask.softcap,
    )


def attend_to(
    query: Array,
    keys_values: Cached,
    *,
    attend: Array,
    scale: float | None = None,
    softcap: float | None = None,
) -> Array:
    """softmax(scale · q·kᵀ)·v, over those keys that `attend` allows.

    Args:
      query: [B, H, T, head_dim].
      keys_values: [B, K, S, head_dim] each, also in int8; H/K query heads in a row
        read the same keys.
      attend: bool[B, T, S].
      scale, softcap: those of `cache.logits_of`.

    Returns:
      [B, H, T, head_dim], in query's dtype; logits and softmax are float32.
    """
    (key, key_scales), (value, value_scales) = (
        plain(columns, dtype=query.dtype) for columns in keys_values
    )
    rows, kv_heads, _, head_dim = key.shape
    group = query.shape[1] // kv_heads
    # Not the library's, whose heads lie behind the tokens: XLA:CPU then takes five
    # times as long over the sums in a softmax's gradient.
    # The query heads of a group stand below each other, as more tokens.
    grouped = query.reshape(rows, kv_heads, group * query.shape[2], head_dim)
    logits = jnp.einsum(
        "bktd,bksd->bkts", grouped, key, preferred_element_type=jnp.float32
    )
    logits = logits_of(
        logits, key_scales=key_scales, head_dim=head_dim, scale=scale, softcap=softcap
    )
    allowed = jnp.tile(attend, (1, group, 1))[:, None]
    # Not -inf: padding that may attend to nothing would be NaN.
    lowest = -0.7 * jnp.finfo(jnp.float32).max
    share = jax.nn.softmax(jnp.where(allowed, logits, lowest), axis=-1)
    if value_scales is not None:
        share = share * value_scales[:, :, None]
    y = layout.product(share.astype(value.dtype), value)
    return y.reshape(query.shape)
