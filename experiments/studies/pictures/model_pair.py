"""Responses and log-probs of a policy and a reference of one shape."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax import policy
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.packing import texts_of

Array = jax.Array
Params = Any


class Pair(NamedTuple):
    """A policy and a reference of one shape."""

    policy: Params
    reference: Params
    model: ModelConfig


@functools.partial(jax.jit, static_argnames=("model", "max_new_tokens"))
def answer(
    params: Params,
    tokens: Array,
    *,
    model: ModelConfig,
    key: Array,
    max_new_tokens: int,
) -> Array:
    """i32[B, P + R]: every row of i32[B, P], followed by a response of R tokens."""
    rows = tokens.shape[0]
    prompts = Prompts(
        tokens=tokens,
        mask=jnp.ones(tokens.shape, bool),
        index=jnp.arange(rows, dtype=jnp.int32),
        sample=jnp.zeros(rows, jnp.int32),
    )
    return rollout.rollout(
        params,
        model=model,
        prompts=prompts,
        key=key,
        max_new_tokens=max_new_tokens,
        stop_ids=(),
        temperature=1.0,
    ).tokens


def logprobs_and_kl(pair: Pair, tokens: Array) -> dict[str, Array]:
    """f32[B, S] each, nats: log π, log π_ref and exact KL, 0 in the first column."""
    texts = texts_of(tokens, jnp.ones(tokens.shape, bool))
    states, logprobs = [], []
    for params in (pair.policy, pair.reference):
        hidden = texts.hidden_states(params, model=pair.model)
        logprobs_of_role, _ = policy.logprobs_from_hidden(
            params, hidden, texts=texts, model=pair.model
        )
        states.append(hidden)
        logprobs.append(logprobs_of_role)
    exact = policy.exact_kl(
        *(pair.policy, states[0], pair.reference, states[1]),
        texts=texts,
        model=pair.model,
    )
    return {"logprobs": logprobs[0], "ref_logprobs": logprobs[1], "exact": exact}
