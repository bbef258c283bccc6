"""The engine of attention over whole rows, by the name that a model has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import engine_choice
from rlhf_jax.models.attention.cache import KeyValue
from rlhf_jax.models.attention.record import AttentionMask
from rlhf_jax.models.attention.xla import attend_xla
from rlhf_jax.models.config import ModelConfig

if TYPE_CHECKING:
    from rlhf_jax.models.attention.per_device import Engine

Array = jax.Array


def attend(
    query: Array, keys_values: KeyValue, *, mask: AttentionMask, model: ModelConfig
) -> Array:
    """softmax(scale · q·kᵀ)·v over what the mask allows, by the model's engine.

    Args:
      query: [B, H, T, head_dim], of the last T columns. With a cut of the columns
        [B·c, H, S/c, head_dim], the balanced parts of rows (`context.py`).
      keys_values: [B, K, S, head_dim] each; H/K query heads in a row read the same
        keys. With a cut as the queries.
      mask: of S columns.

    Returns:
      In the shape and dtype of query; finite at padding.

    Raises:
      InputError: texts share a prefix, which splash cannot compute, and no engine of
        columns that are cut; or the engine cannot compute a cut row.
    """
    engine, _ = engine_choice.choose(model, columns=mask.columns)
    if mask.cut is not None:
        engine_choice.refuse_context(engine)
    if engine == "xla" and mask.cut is None:
        return attend_xla(query, keys_values, mask=mask)
    whole = mask.cut is None and engine in engine_choice.PREFIXES
    if mask.prefixes is not None and not whole:
        count = 1 if mask.cut is None else mask.cut.count
        raise InputError(
            f"expected attention {', '.join(engine_choice.PREFIXES)} on a mesh without "
            f"a context axis for texts that share a prefix, got {engine} with "
            f"context={count}; change it, or let no texts share one"
        )
    from rlhf_jax.models.attention.per_device import attend_per_device

    one_device = _engine(engine)
    return attend_per_device(query, keys_values, mask=mask, engine=one_device)


def _engine(name: str) -> Engine:
    """What a device computes for rows and heads of its own.

    xla, whose operations are partitioned, needs that for columns alone.
    """
    # A run has one engine, mostly xla without this: the others are not imported.
    match name:
        case "blockwise":
            from rlhf_jax.models.attention.blockwise import attend_blockwise

            return attend_blockwise
        case "splash":
            from rlhf_jax.models.attention.splash import attend_splash

            return attend_splash
        case "cudnn":
            from rlhf_jax.models.attention.cudnn import attend_cudnn

            return attend_cudnn
    return attend_xla
