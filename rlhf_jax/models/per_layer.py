"""Embeddings that every layer has of its own of each token (Gemma 3n, Gemma 4).

    {"per_layer": [V', L·P], "per_layer_mix": {"kernel": [D, L·P], "scale": [P]}}

stand beside the token embedding. `blocks.PerLayer` is where a layer reads its part.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models import blocks, layout, leaves
from rlhf_jax.models.config import ModelConfig

Array = jax.Array
Params = Any  # nested dict of arrays


def tables(key: Array, *, model: ModelConfig) -> Params:
    """Random float32 parameters, as above; none of a model without."""
    if model.per_layer_width is None:
        return {}
    width = model.num_layers * model.per_layer_width
    table_key, mix_key = jax.random.split(key)

    def normal(key: Array, rows: int) -> Array:
        return blocks.INIT_STD * jax.random.normal(key, (rows, width), jnp.float32)

    mix = {
        "kernel": normal(mix_key, model.hidden_size),
        "scale": jnp.ones(model.per_layer_width, jnp.float32),
    }
    return {
        "per_layer": normal(table_key, model.padded_vocab_size),
        "per_layer_mix": mix,
    }


def inputs(params: Params, x: Array, *, model: ModelConfig, tokens: Array) -> Array:
    """(norm(x W / sqrt(D)) + sqrt(P) e(tokens)) / sqrt(2), a part for every layer.

    Args:
      params: of a decoder with `model.per_layer_width`.
      x: [B, T, D], of `decoder.embed`.
      tokens: i32[B, T].

    Returns:
      [L, B, T, P] in `model.dtype`. The gradient reaches params and x.

    Source: as `Gemma4TextModel.project_per_layer_inputs` of transformers 5.
    """
    embed, width = params["embed"], model.per_layer_width
    assert width is not None
    own = leaves.rows(embed["per_layer"], tokens).astype(model.dtype)
    own = own * jnp.asarray(width**0.5, model.dtype)
    mix = leaves.read(embed["per_layer_mix"])
    rows = x.reshape(-1, x.shape[-1])
    mixed = layout.product(rows, mix["kernel"].astype(x.dtype))
    mixed = mixed * jnp.asarray(model.hidden_size**-0.5, x.dtype)
    norm = {"params": {"scale": mix["scale"]}}
    mixed: Any = blocks.Norm(model).apply(norm, mixed.reshape(len(rows), -1, width))
    both = (mixed + own.reshape(mixed.shape)) * jnp.asarray(2**-0.5, x.dtype)
    return jnp.moveaxis(both.reshape(*tokens.shape, -1, width), 2, 0)
