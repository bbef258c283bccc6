"""The engine of attention over whole rows, by the name that a model has."""

from __future__ import annotations

import jax

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import engine_choice
from rlhf_jax.models.attention.blockwise import attend_blockwise
from rlhf_jax.models.attention.cache import KeyValue
from rlhf_jax.models.attention.cudnn import attend_cudnn
from rlhf_jax.models.attention.per_device import Engine, attend_per_device
from rlhf_jax.models.attention.record import AttentionMask
from rlhf_jax.models.attention.splash import attend_splash
from rlhf_jax.models.attention.xla import attend_xla
from rlhf_jax.models.config import ModelConfig

Array = jax.Array
# Those that a device computes for rows and heads of its own; xla is partitioned.
ENGINES: dict[str, Engine] = {
    "blockwise": attend_blockwise,
    "splash": attend_splash,
    "cudnn": attend_cudnn,
}


def attend(
    query: Array, keys_values: KeyValue, *, mask: AttentionMask, model: ModelConfig
) -> Array:
    """softmax(scale · q·kᵀ)·v over what the mask allows, by the model's engine.

    Args:
      query: [B, H, T, head_dim], of the last T columns.
      keys_values: [B, K, S, head_dim] each; H/K query heads in a row read the same
        keys.
      mask: of S columns.

    Returns:
      [B, H, T, head_dim], in query's dtype; finite at padding.

    Raises:
      InputError: texts share a prefix, which only xla can compute.
    """
    engine, _ = engine_choice.choose(model, columns=keys_values[0].shape[2])
    if engine == "xla":
        return attend_xla(query, keys_values, mask=mask)
    if mask.prefixes is not None:
        raise InputError(
            f"expected attention xla for texts that share a prefix, got {engine}; "
            f"choose xla, or let no texts share one"
        )
    return attend_per_device(query, keys_values, mask=mask, engine=ENGINES[engine])
