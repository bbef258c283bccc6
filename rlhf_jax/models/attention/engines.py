"""Attention over whole rows by the engine that a model names, and the xla engine.

The xla engine materialises the logits of all heads, [B, H, T, S], and also attends from
new tokens to a cache. Shapes: B rows, T new tokens, S tokens attended to, H query
heads, K key-value heads.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import layout
from rlhf_jax.models.caches import Cached, KeyValue, logits_of, plain
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.positions import AttentionMask, allowed

if TYPE_CHECKING:
    from rlhf_jax.models.attention.per_device import Engine

Array = jax.Array


def attend_xla(
    query: Array,
    keys_values: KeyValue,
    *,
    mask: AttentionMask,
    sinks: Array | None = None,
) -> Array:
    """softmax(scale · q·kᵀ)·v over what the mask allows."""
    return attend_to(
        query,
        keys_values,
        attend=allowed(mask, queries=query.shape[2]),
        scale=mask.scale,
        softcap=mask.softcap,
        sinks=sinks,
    )


def attend_to(
    query: Array,
    keys_values: Cached,
    *,
    attend: Array,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """softmax(scale · q·kᵀ)·v over the keys that `attend` allows.

    Args:
      query: [B, H, T, head_dim].
      keys_values: [B, K, S, head_dim] each, possibly in int8; H/K consecutive query
        heads read the same keys.
      attend: bool[B, T, S].
      scale, softcap: as in `caches.logits_of`.
      sinks: f32[H], a logit of each head that is in the denominator of its softmax and
        has no value (gpt-oss, arXiv:2508.10925, section 2.2); None: no sinks.

    Returns:
      [B, H, T, head_dim], in query's dtype; logits and softmax are float32.
    """
    (key, key_scales), (value, value_scales) = (
        plain(columns, dtype=query.dtype) for columns in keys_values
    )
    rows, kv_heads, _, head_dim = key.shape
    group = query.shape[1] // kv_heads
    # Not `jax.nn.dot_product_attention`, whose heads come after the tokens: XLA:CPU
    # then takes five times as long over the sums in a softmax's gradient.
    # The query heads of a group become more tokens of one head.
    grouped = query.reshape(rows, kv_heads, group * query.shape[2], head_dim)
    # f32[B, K, G·T, S]: keys are read once per group of query heads, not repeated.
    logits = jnp.einsum(
        "bktd,bksd->bkts", grouped, key, preferred_element_type=jnp.float32
    )
    logits = logits_of(
        logits, key_scales=key_scales, head_dim=head_dim, scale=scale, softcap=softcap
    )
    allowed = jnp.tile(attend, (1, group, 1))[:, None]
    # Not -inf, which would be NaN at padding, where nothing is allowed.
    lowest = -0.7 * jnp.finfo(jnp.float32).max
    logits = jnp.where(allowed, logits, lowest)
    if sinks is None:
        share = jax.nn.softmax(logits, axis=-1)
    else:
        of_head = jnp.repeat(sinks.reshape(kv_heads, group), query.shape[2], axis=1)
        share = beside_sink(logits, of_head.astype(jnp.float32)[None, ..., None])
    if value_scales is not None:
        share = share * value_scales[:, :, None]
    # In the compute dtype: products with bfloat16 values gain nothing from more digits.
    y = layout.product(share.astype(value.dtype), value)
    return y.reshape(query.shape)


def beside_sink(logits: Array, sink: Array) -> Array:
    """exp(l_j) / (exp(sink) + Σ_j exp(l_j)) over the last axis.

    Args:
      logits: f32[..., S].
      sink: f32[..., 1], broadcast against the logits.
    """
    largest = jnp.maximum(logits.max(axis=-1, keepdims=True), sink)
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.exp(logits - largest)
    return weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - largest))


def attend(
    query: Array,
    keys_values: KeyValue,
    *,
    mask: AttentionMask,
    model: ModelConfig,
    sinks: Array | None = None,
) -> Array:
    """softmax(scale · q·kᵀ)·v over what the mask allows, by the model's engine.

    Args:
      query: [B, H, T, head_dim], of the last T columns. With a cut
        [B·c, H, S/c, head_dim], the balanced parts of rows (`axes.py`).
      keys_values: [B, K, S, head_dim] each; H/K consecutive query heads read the same
        keys. With a cut [B·c, K, S/c, head_dim].
      mask: of S columns.
      sinks: f32[H], as in `attend_to`.

    Returns:
      In the shape and dtype of query; finite at padding.

    Raises:
      InputError: texts share a prefix with splash, with ring or with a cut; or the
        engine cannot compute rows that devices share.
    """
    # Chosen at trace time by shapes and backend: the program has no branch.
    count = 1 if mask.cut is None else mask.cut.count
    engine, _ = layout.choose(model, columns=mask.columns, context=count)
    if mask.cut is not None:
        layout.refuse_context(engine, context=count)
        mask = dataclasses.replace(mask, passed=engine == "ring")
    if engine == "xla" and mask.cut is None:
        return attend_xla(query, keys_values, mask=mask, sinks=sinks)
    whole = mask.cut is None and engine in layout.PREFIXES
    if mask.prefixes is not None and not whole:
        raise InputError(
            f"expected attention {', '.join(layout.PREFIXES)} on a mesh without "
            f"a context axis for texts that share a prefix, got {engine} with "
            f"context={count}; change it, or let no texts share one"
        )
    from rlhf_jax.models.attention.per_device import attend_per_device

    one_device = _engine(engine)
    return attend_per_device(
        query, keys_values, mask=mask, engine=one_device, sinks=sinks
    )


def _engine(name: str) -> Engine:
    """The function that a device calls for its rows and heads.

    xla needs it only with a cut: otherwise the compiler partitions its operations.
    """
    # A run uses one engine: the others are not imported.
    match name:
        case "blockwise":
            from rlhf_jax.models.attention.blockwise import attend_blockwise

            return attend_blockwise
        case "splash":
            from rlhf_jax.models.attention.splash import attend_splash

            return attend_splash
        case "ring":
            from rlhf_jax.models.attention.ring_attention import attend_ring

            return attend_ring
        case "cudnn":
            from rlhf_jax.models.attention.cudnn import attend_cudnn

            return attend_cudnn
    return attend_xla
