"""The critic: the value of every state a response passes through.

    {"trunk": a decoder's parameters (a head is not read),
     "score": {"kernel": [D], "bias": []}}

A reward model has the same parameters and reads the last token alone (`rewards.py`), so
either can start from the other.
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
    """A critic on a copy of the policy's trunk whose values start at 0 (OAI)."""
    trunk = {name: params[name] for name in ("embed", "layers", "final_norm")}
    # A copy: policy and critic are both donated to the update, and must share no
    # buffer.
    return {"trunk": storage.store(trunk), "score": decoder.zero_score(model=model)}


def on_policy_trunk(*, model: ModelConfig) -> Params:
    """A critic that is a head alone, on the policy's trunk; values start at 0 (OAI).

    {"score": {"kernel": [D], "bias": []}}: the trunk is the policy's own, and the value
    loss trains it too.
    """
    return {"score": decoder.zero_score(model=model)}


def from_reward_model(params: Params) -> Params:
    """A critic that starts as a copy of the reward model (N+)."""
    return storage.store(params)


def from_base(key: Array, *, model: ModelConfig, lora: LoRA) -> Params:
    """A critic of adapters over the policy's base, whose values start at 0.

    Args:
      key: of the adapters' A, drawn at random; B is 0.
      model: the shape of the base, which is an argument of its own when it runs.
      lora: which matrices have adapters, and of which rank.

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
      first_column: values of earlier columns are not wanted and are the bias alone; the
        prompt's width gives those of the response.
      packing: of these rows: the trunk runs on packed rows, and only states that the
        packing reads have a value. None runs on the padded ones.

    Returns:
      f32[B, S], reward units; 0 where no token stands just before.

    Raises:
      InputError: first_column is below 1: column 0 has no state before it.
    """
    checks.positive(first_column=first_column)
    texts = texts_of(tokens, mask, first_column=first_column, packing=packing)
    hidden = texts.hidden_states(params["trunk"], model=model)
    return texts.padded(values_of_hidden(params["score"], hidden, mask=texts.mask))


def values_of_hidden(score: Params, hidden: Array, *, mask: Array) -> Array:
    """`values` from hidden states that are at hand, for instance of a shared trunk.

    Args:
      hidden: floats[B, S, D], the trunk's.
    """
    # f32[B, S]: V of the state after each token.
    after = axes.per_token(functools.partial(decoder.scores, score), hidden)
    # Column t has seen tokens[:, t]
    before, known = (
        jnp.pad(array[:, :-1], ((0, 0), (1, 0))) for array in (after, mask)
    )
    return jnp.where(known, before, 0.0)
