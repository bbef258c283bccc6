"""The critic: the value of every state that a response passes through.

    {"trunk": a decoder's parameters (the head is not read),
     "score": {"kernel": [D], "bias": []}}

A reward model has the same parameters and reads only the last token
(`rewards/model.py`), so either can start as a copy (`storage.store`) of the other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks
from rlhf_jax.models import axes, decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA, init
from rlhf_jax.models.packing import Packing, texts_of
from rlhf_jax.roles.reference import storage

Array = jax.Array
Params = Any


def from_policy(params: Params, *, model: ModelConfig) -> Params:
    """A critic on a copy of the policy's trunk, with values that start at 0 (OAI)."""
    trunk = {name: params[name] for name in ("embed", "layers", "final_norm")}
    # A copy: the update donates both policy and critic, which must share no buffer.
    return {"trunk": storage.store(trunk), "score": decoder.zero_score(model=model)}


def on_policy_trunk(*, model: ModelConfig) -> Params:
    """A critic that is only a head on the policy's trunk; values start at 0 (OAI).

    {"score": {"kernel": [D], "bias": []}}: the value loss also trains the policy's
    trunk.
    """
    return {"score": decoder.zero_score(model=model)}


def from_base(key: Array, *, model: ModelConfig, lora: LoRA) -> Params:
    """A critic of adapters over the policy's base, with values that start at 0.

    Args:
      key: draws the adapters' A; B is 0.
      model: the shape of the base.
      lora: which matrices have adapters, and their rank.

    Returns:
      {"trunk": adapters f32, "score": {"kernel": f32[D], "bias": f32[]}}, for
      `adapted_params`, which merges base and trunk.

    Raises:
      InputError: a pattern of `lora` matches no matrix of the model.
    """
    trunk = init(key, model=model, lora=lora)
    return {"trunk": trunk, "score": decoder.zero_score(model=model)}


def values(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    first_column: int = 1,
    packing: Packing | None = None,
) -> Array:
    """Value of the state just before each token, and of the finished response.

        column    0    1    2    3    4
        tokens    ·   The  cat  sat   ·
        values    0    0  V(The) V(The cat) V(The cat sat)

    Args:
      first_column: values of earlier columns are not computed and are only the bias;
        the prompt's width gives the response.
      packing: of these rows: the trunk runs on packed rows, and only states that the
        packing reads have a value. None runs on padded rows.

    Returns:
      f32[B, S], reward units; 0 in columns without a token just before them.

    Raises:
      InputError: first_column is below 1: column 0 has no state before it.
    """
    checks.positive(first_column=first_column)
    texts = texts_of(tokens, mask, first_column=first_column, packing=packing)
    hidden = texts.hidden_states(params["trunk"], model=model)
    return texts.padded(values_of_hidden(params["score"], hidden, mask=texts.mask))


def values_of_hidden(score: Params, hidden: Array, *, mask: Array) -> Array:
    """`values` from hidden states that are computed already, as by a shared trunk.

    Args:
      hidden: floats[B, S, D], of the trunk.
    """
    # f32[B, S]: V of the state after each token.
    after = axes.per_token(functools.partial(decoder.scores, score), hidden)
    # Column t of `after` has seen tokens[:, t].
    before, known = (
        jnp.pad(array[:, :-1], ((0, 0), (1, 0))) for array in (after, mask)
    )
    return jnp.where(known, before, 0.0)
