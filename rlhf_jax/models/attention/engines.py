"""The engine of attention over whole rows, by the name that a model has."""

from __future__ import annotations

import jax

from rlhf_jax.models.attention.blockwise import attend_blockwise
from rlhf_jax.models.attention.cache import KeyValue
from rlhf_jax.models.attention.cudnn import attend_cudnn
from rlhf_jax.models.attention.per_device import attend_per_device
from rlhf_jax.models.attention.record import AttentionMask
from rlhf_jax.models.attention.xla import attend_xla
from rlhf_jax.models.config import ModelConfig

Array = jax.Array


def attend(
    query: Array, keys_values: KeyValue, *, mask: AttentionMask, model: ModelConfig
) -> Array:
    """softmax(scale · q·kᵀ)·v over what the mask allows, by `model.attention`.

    Args:
      query: [B, H, T, head_dim], of the last T columns.
      keys_values: [B, K, S, head_dim] each; H/K query heads in a row read the same
        keys.
      mask: of S columns.

    Returns:
      [B, H, T, head_dim], in query's dtype; finite at padding.
    """
    if model.attention == "blockwise":
        return attend_per_device(query, keys_values, mask=mask, engine=attend_blockwise)
    if model.attention == "cudnn":
        return attend_per_device(query, keys_values, mask=mask, engine=attend_cudnn)
    return attend_xla(query, keys_values, mask=mask)
