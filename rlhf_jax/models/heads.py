"""From hidden states to logits over the vocabulary, or to one number."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional import unused_ids
from rlhf_jax.models import axes, layout, leaves
from rlhf_jax.models.config import ModelConfig

Array = jax.Array
Params = Any


def vocabulary_head(params: Params, *, model: ModelConfig) -> Array:
    """[V', D], the output head: the token embedding when the two are tied."""
    head = params["embed"]["tokens"] if model.tied_head else params["head"]["kernel"]
    return leaves.read(head)


def logits(
    params: Params, hidden: Array, *, model: ModelConfig, spread: bool = False
) -> Array:
    """f32[..., V] over the true vocabulary, accumulated in float32 and soft-capped.

    Ids that no token has (`model.unused_ids`) are at -inf.

    Args:
      hidden: [..., D], after the final norm.
      spread: rows go to all devices that share the vocabulary too, each of them whole
        (`axes.rows_spread`), for a draw from every row.
    """
    head = vocabulary_head(params, model=model).astype(hidden.dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    if rows.shape[0] <= model.transposed_rows:
        padded = layout.transposed_product(rows, head)
    else:
        padded = jnp.matmul(rows, head.T, preferred_element_type=jnp.float32)
    if spread:
        padded = axes.rows_spread(padded)
    logits = padded[:, : model.vocab_size]
    if model.logit_softcap is not None:
        logits = model.logit_softcap * jnp.tanh(logits / model.logit_softcap)
    logits = unused_ids.masked(logits, model.unused_ids)
    return logits.reshape(*hidden.shape[:-1], model.vocab_size)


def init_score(key: Array, *, model: ModelConfig) -> Params:
    """A scalar head ~ N(0, 1/(D+1)), bias 0, for a reward model.

    Source: Stiennon et al. 2020, arXiv:2009.01325, appendix B.1.
    """
    std = 1 / math.sqrt(model.hidden_size + 1)
    kernel = std * jax.random.normal(key, (model.hidden_size,), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros((), jnp.float32)}


def zero_score(*, model: ModelConfig) -> Params:
    """A scalar head of zeros, for a critic that starts at value 0 everywhere.

    Source: Ziegler et al. 2019, arXiv:1909.08593 (lm-human-preferences).
    """
    return {
        "kernel": jnp.zeros((model.hidden_size,), jnp.float32),
        "bias": jnp.zeros((), jnp.float32),
    }


def scores(params: Params, hidden: Array) -> Array:
    """f32[...]: hidden · kernel + bias, in float32."""
    params = leaves.read(params)
    kernel = params["kernel"].astype(jnp.float32)
    rows = hidden.astype(jnp.float32).reshape(-1, hidden.shape[-1])
    flat = rows @ kernel + params["bias"].astype(jnp.float32)
    return flat.reshape(hidden.shape[:-1])
