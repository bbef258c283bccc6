"""The gradients that a penalty may have, by autodiff of sums over all responses.

The sums use only the logits of the library, so that `gradients.certify` compares two
independent computations.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from worlds import enumerable

from certificates.penalty_claims import TOP_K
from rlhf_jax import policy
from rlhf_jax.functional.kl import gradients
from rlhf_jax.models.config import ModelConfig

Array = jax.Array
Params = Any
Per = Literal["token", "response", "length"]
Key = tuple[str, Per]  # (name of a gradient, unit of one estimate)


class _Tables(NamedTuple):
    """Log-probs of all responses y, columns t and tokens v, nats.

    After the end of a response every token is equally likely and `taken` is 0.
    """

    words: Array  # f32[N, 4, 4], log π(v | y_<t)
    ref_words: Array  # f32[N, 4, 4], log π_ref(v | y_<t)
    taken: Array  # f32[N, 4], log π(y_t | y_<t)
    ref_taken: Array
    lengths: Array  # f32[N], tokens


@functools.partial(
    jax.jit, static_argnames=("model", "ref_model", "temperature", "stop_ids")
)
def of_penalties(
    params: Params,
    ref_params: Params,
    *,
    model: ModelConfig,
    temperature: float,
    stop_ids: tuple[int, ...] = (),
    ref_model: ModelConfig | None = None,
) -> dict[Key, Params]:
    """The gradients with respect to `params` that `Penalty.terms` names.

    Args:
      params, ref_params: parameters of policy and reference.
      model, temperature, stop_ids, ref_model: static; `ref_model` None is `model`.
    """

    def sums(params: Params) -> dict[Key, Array]:
        tables = _tables(
            params,
            ref_params,
            model=model,
            ref_model=ref_model,
            temperature=temperature,
            stop_ids=stop_ids,
        )
        sums_of: dict[Key, Array] = {}
        for per in ("token", "response"):
            for name, value in _sums(tables, whole=per == "response").items():
                sums_of[name, per] = value
        for name, value in _divided(tables).items():
            sums_of[name, "length"] = value
        return sums_of

    values, pull = jax.vjp(sums, params)
    names = list(values)

    def of(one_hot: Array) -> Params:
        return pull(dict(zip(names, one_hot, strict=True)))[0]

    # One cotangent at a time: with `vmap` over cotangents (and so `jax.jacrev`) XLA for
    # CPU, as of JAX 0.10.2, miscompiles the gradient of a normalisation.
    gradients = jax.lax.map(of, jnp.eye(len(names)))
    return {
        name: jax.tree.map(lambda leaf, i=i: leaf[i], gradients)
        for i, name in enumerate(names)
    }


def _sums(tables: _Tables, *, whole: bool) -> dict[str, Array]:
    """{name: f32[], nats}, to be differentiated; `whole` changes only k2."""
    words, ref_words, taken, ref_taken, _ = tables
    own = jnp.exp(taken.sum(axis=1))  # π(y), differentiated
    fixed = jax.lax.stop_gradient(own)
    reference = jnp.exp(ref_taken.sum(axis=1))
    x = taken - ref_taken
    log_ratio = x.sum(axis=1)
    squares = log_ratio**2 if whole else (x**2).sum(axis=1)
    reverse = (jnp.exp(words) * (words - ref_words)).sum(axis=(1, 2))
    forward = (jnp.exp(ref_words) * (ref_words - words)).sum(axis=(1, 2))
    square = (jnp.exp(ref_words) * 0.5 * (words - ref_words) ** 2).sum(axis=(1, 2))
    bucketed = _bucketed(words, ref_words).sum(axis=1)
    return {
        gradients.FULL_REVERSE: own @ log_ratio,
        gradients.FULL_FORWARD: -(reference @ log_ratio),
        gradients.FIXED_REVERSE: fixed @ reverse,
        gradients.FIXED_FORWARD: fixed @ forward,
        gradients.MEAN_K2: 0.5 * (own @ squares),
        gradients.OWN_PREFIX_FORWARD: own @ forward,
        gradients.REFERENCE_MEAN_K2: 0.5 * (reference @ squares),
        gradients.FIXED_K2: fixed @ square,
        gradients.TOP_K + gradients.FULL_REVERSE: own @ bucketed,
        gradients.TOP_K + gradients.FIXED_REVERSE: fixed @ bucketed,
    }


def _divided(tables: _Tables) -> dict[str, Array]:
    """{name: f32[], nats}: each response's term of two of the sums, over its length.

    The length is not differentiated, so where lengths differ the gradient is that of no
    KL.
    """
    _, _, taken, ref_taken, lengths = tables
    fixed = jax.lax.stop_gradient(jnp.exp(taken.sum(axis=1)) / lengths)
    x = taken - ref_taken
    to_go = jax.lax.stop_gradient(jnp.cumsum(x[:, ::-1], axis=1)[:, ::-1])
    return {
        gradients.FULL_REVERSE: fixed @ (taken * to_go).sum(axis=1),
        gradients.FIXED_REVERSE: fixed @ (0.5 * x**2).sum(axis=1),
    }


def _bucketed(words: Array, ref_words: Array) -> Array:
    """f32[N, 4]: reverse KL over the TOP_K likeliest words and one bucket."""
    order = jnp.argsort(-jax.lax.stop_gradient(words), axis=-1)
    p, q = (
        jnp.take_along_axis(jnp.exp(table), order, axis=-1)
        for table in (words, ref_words)
    )
    p, q = (
        jnp.concatenate(
            [
                probabilities[..., :TOP_K],
                probabilities[..., TOP_K:].sum(axis=-1, keepdims=True),
            ],
            axis=-1,
        )
        for probabilities in (p, q)
    )
    return (p * jnp.log(p / q)).sum(axis=-1)


@functools.partial(
    jax.jit, static_argnames=("model", "ref_model", "temperature", "stop_ids")
)
def _tables(
    params: Params,
    ref_params: Params,
    *,
    model: ModelConfig,
    temperature: float,
    stop_ids: tuple[int, ...],
    ref_model: ModelConfig | None = None,
) -> _Tables:
    tokens = enumerable.every_tokens(stop_ids)
    mask = enumerable.every_mask(stop_ids)
    within = mask[:, enumerable.PROMPT :, None]
    words, ref_words = (
        jax.nn.log_softmax(
            policy.logits(model_params, model=shape, tokens=tokens, mask=mask)[:, :-1]
            / temperature
        )
        for model_params, shape in (
            (params, model),
            (ref_params, model if ref_model is None else ref_model),
        )
    )
    chosen = tokens[:, enumerable.PROMPT :, None]
    taken, ref_taken = (
        jnp.where(within, jnp.take_along_axis(logprobs, chosen, axis=-1), 0.0)[..., 0]
        for logprobs in (words, ref_words)
    )
    # Equal for policy and reference, so that padding adds no divergence.
    behind = jnp.log(jnp.full(enumerable.VOCABULARY, 1 / enumerable.VOCABULARY))
    words, ref_words = (
        jnp.where(within, logprobs, behind[None, None, :])
        for logprobs in (words, ref_words)
    )
    lengths = within[..., 0].sum(axis=1, dtype=jnp.float32)
    return _Tables(words, ref_words, taken, ref_taken, lengths)


def means(
    params: Params,
    ref_params: Params,
    *,
    model: ModelConfig,
    temperature: float,
    stop_ids: tuple[int, ...] = (),
) -> dict[str, float]:
    """Means under the policy, nats per response, summed in float64."""
    tables = _tables(
        params, ref_params, model=model, temperature=temperature, stop_ids=stop_ids
    )
    taken, ref_taken = (
        np.asarray(logprobs, np.float64)
        for logprobs in (tables.taken, tables.ref_taken)
    )
    probabilities, x = np.exp(taken.sum(axis=1)), taken - ref_taken
    return {
        "kl": float(probabilities @ x.sum(axis=1)),
        "k2": float(probabilities @ (0.5 * x**2).sum(axis=1)),
        "k2 of responses": float(probabilities @ (0.5 * x.sum(axis=1) ** 2)),
    }
