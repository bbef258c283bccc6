"""Estimates of the KL times their importance weights, clipped and finite in float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked, surrogates
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import estimators
from rlhf_jax.functional.kl.choices import Penalty
from rlhf_jax.functional.kl.gradients import Estimator

Array = jax.Array


class Estimates(NamedTuple):
    """Estimates at their columns, and the shares that were clipped or capped."""

    kl: Float32[Array, "B S"]  # nats, 0 at columns without an estimate
    # (number of clipped estimates, number of estimates)
    clipfrac: tuple[Float32[Array, ""], Float32[Array, ""]]
    # (number of estimates capped to stay within float32, number of estimates)
    overflowfrac: tuple[Float32[Array, ""], Float32[Array, ""]]


def estimates(
    penalty: Penalty,
    *,
    log_ratio: Float32[Array, "B S"],
    log_weights: Float32[Array, "B S"] | None,
    mask: Bool[Array, "B S"],
    exact: Float32[Array, "B S"] | None,
    estimator: Estimator,
) -> Estimates:
    """w·(g + stop_gradient(v - g)): values v with the gradient of the estimates g.

    Args:
      penalty: its value_estimator gives v; per, importance_weights and clip are read.
      log_ratio: f32[B, S], nats, x of the estimators at each token.
      log_weights: f32[B, S], nats, log w of each token; None is w = 1.
      exact: f32[B, S], nats; required where an estimator is exact.

    Returns:
      Estimates and shares. The gradient reaches `log_ratio` and `exact`. It is 0 where
      the estimate was clipped.

    Raises:
      InputError: an estimator is exact and `exact` is None.

    >>> arrays = {"log_ratio": jnp.array([[9.0, 2.0, -1.0]]), "log_weights": None}
    >>> arrays |= {"mask": jnp.array([[False, True, True]]), "exact": None}
    >>> print(estimates(Penalty(), estimator="k1", **arrays).kl)
    [[ 0.  2. -1.]]
    >>> print(estimates(Penalty(clip=1.0), estimator="k1", **arrays).kl)
    [[ 0.  1. -1.]]
    >>> print(estimates(Penalty(per="response"), estimator="k1", **arrays).kl)
    [[0. 0. 1.]]
    """
    cells = _last(mask) if penalty.per == "response" else mask
    x = _placed(penalty, log_ratio, mask, cells)
    if exact is not None:
        exact = _placed(penalty, exact, mask, cells)
    log_weights = _log_importance(penalty, log_weights, mask, cells)
    # The tail of a sampled one has its tokens' weights already.
    of_exact = jnp.zeros_like(x) if penalty.weights_tail else log_weights

    def weighted(estimator: Estimator) -> Array:
        own = of_exact if estimator == "exact" else log_weights
        return _weighted(estimator, x, exact, own)

    value = weighted(penalty.value_estimator)
    unclipped = cells
    if penalty.clip is not None:
        unclipped = cells & (jnp.abs(value) <= penalty.clip)
        value = jnp.clip(value, -penalty.clip, penalty.clip)
        # Before the estimator: an infinite slope times 0 would be NaN.
        x = jnp.where(unclipped, x, 0.0)
        exact = None if exact is None else jnp.where(unclipped, exact, 0.0)
    slope = weighted(estimator)
    slope = jnp.where(unclipped, slope - jax.lax.stop_gradient(slope), 0.0)
    clipped = jnp.sum(cells & ~unclipped, dtype=jnp.float32)
    # Reported, as a penalty that hits float32's end no longer grows with the distance.
    capped = log_weights > _most(_estimate(estimator, x, exact))
    if "k3" in penalty.estimators_used:
        far = _far(x, log_weights)
        capped = jnp.where(far, log_weights - x > surrogates.LARGEST, capped)
    num_estimates = jnp.sum(cells, dtype=jnp.float32)
    return Estimates(
        # slope is 0 in value: the reported number is v, the gradient that of g.
        kl=jax.lax.stop_gradient(value) + slope,
        clipfrac=(clipped, num_estimates),
        overflowfrac=(jnp.sum(capped & unclipped, dtype=jnp.float32), num_estimates),
    )


def with_sampled_tail(
    head: Float32[Array, "B S"],
    inside: Bool[Array, "B S"],
    *,
    logprobs: Float32[Array, "B S"],
    ref_logprobs: Float32[Array, "B S"],
    log_weights: Float32[Array, "B S"] | None = None,
) -> Float32[Array, "B S"]:
    """Top-k KL with a sampled tail: head + 1[token not in K]·w·x, x = log(π/π_ref).

    The tail has the gradient w·x·∇log π. So value and gradient are unbiased for the KL
    at a prefix and Σ_v ∇π(v)·log(π(v)/π_ref(v)), its gradient, for every k: the head
    has the tokens of K, and the samples all others.

    Args:
      head, inside: those of `kl.head_from_hidden`, with the head's gradient.
      logprobs, ref_logprobs: f32[B, S], nats, of the sampled tokens.
      log_weights: f32[B, S], nats, log w of each token, π over its sampler; None is
        w = 1.

    Returns:
      f32[B, S], nats. The gradient reaches `head` and `logprobs`.

    Source: Zhang and Ba 2026, arXiv:2602.04417, top-k KL. The authors' code
    differentiates the head's P_v log(P_v/Q_v) whole, and the tail as here: its gradient
    has Σ_{v in K} ∇P_v beside that of the KL. Here neither has that term, whose sum
    over all tokens is 0.

    >>> arrays = {"logprobs": jnp.log(jnp.array([[0.5, 0.1]]))}
    >>> arrays |= {"ref_logprobs": jnp.log(jnp.array([[0.25, 0.2]]))}
    >>> inside = jnp.array([[True, False]])
    >>> print(with_sampled_tail(jnp.array([[0.3, 0.4]]), inside, **arrays))
    [[ 0.3   -0.293]]
    >>> weights = {"log_weights": jnp.log(jnp.array([[2.0, 2.0]]))}
    >>> print(with_sampled_tail(jnp.array([[0.3, 0.4]]), inside, **arrays, **weights))
    [[ 0.3   -0.986]]
    """
    checks.same_shape(head=head, inside=inside, logprobs=logprobs)
    x = estimators.k1(logprobs, ref_logprobs)
    if log_weights is None:
        log_weights = jnp.zeros_like(x)
    tail = jax.lax.stop_gradient(_times(x, log_weights))
    # 1 in value: the score of the sampled token.
    score = 1.0 + logprobs - jax.lax.stop_gradient(logprobs)
    return head + jnp.where(inside, 0.0, tail * score)


def _weighted(
    estimator: Estimator, x: Array, exact: Array | None, log_weights: Array
) -> Array:
    """The estimate times exp(log_weights), which is not differentiated."""
    if estimator != "k3":
        return _times(_estimate(estimator, x, exact), log_weights)
    far = _far(x, log_weights)
    near = _times(_estimate("k3", jnp.where(far, 0.0, x), exact), log_weights)
    # For large -x, k3 is exp(-x) up to rounding. Its product with the weight is
    # computed as one exponential, which may be finite where the factors are not.
    return jnp.where(
        far, surrogates.capped_exp(jnp.where(far, log_weights - x, 0.0)), near
    )


def _times(estimate: Array, log_weights: Array) -> Array:
    return jnp.exp(jnp.minimum(log_weights, _most(estimate))) * estimate


def _most(estimate: Array) -> Array:
    """The largest log-weight, nats, for which value and slope are finite in float32."""
    size = jnp.maximum(2.0, 4.0 * jnp.abs(jax.lax.stop_gradient(estimate)))
    return surrogates.LARGEST - jnp.log(size)


def _far(x: Array, log_weights: Array) -> Array:
    """Where k3 or its product with the weight is close to the largest float32."""
    return (x < -20) & (jnp.maximum(log_weights, 0.0) - x > surrogates.LARGE)


def _estimate(estimator: Estimator, x: Array, exact: Array | None) -> Array:
    match estimator:
        case "k1":
            return x
        case "k2":
            return estimators.k2(x, jnp.zeros_like(x))
        case "k3":
            return estimators.k3(x, jnp.zeros_like(x))
        case "exact":
            if exact is None:
                raise InputError(
                    "exact: expected the exact KL f32[B, S] for the exact estimator, "
                    "got log-probs only; pass kl.exact_from_hidden of both models' "
                    "hidden states, or choose k1, k2 or k3"
                )
            return exact


def _log_importance(
    penalty: Penalty, log_weights: Array | None, mask: Array, cells: Array
) -> Array:
    """f32[B, S], nats, without gradient; 0 where there are no weights."""
    if log_weights is None:
        return jnp.zeros(mask.shape, jnp.float32)
    # A weight says whose samples these are: the named gradients hold it fixed.
    log_weights = jax.lax.stop_gradient(log_weights)
    if penalty.importance_weights == "prefix" and penalty.per != "response":
        # Log-weights add up along the response: the ratio of everything up to the
        # token.
        log_weights = jnp.cumsum(jnp.where(mask, log_weights, 0.0), axis=1)
    return _placed(penalty, log_weights, mask, cells)


def _placed(penalty: Penalty, x: Array, mask: Array, cells: Array) -> Array:
    """x at the columns of estimates; per response, its sum over the response."""
    if penalty.per == "response":
        x = masked.masked_sum(x, mask=mask, axis=1)[:, None]
    return jnp.where(cells, x, 0.0)


def _last(mask: Array) -> Array:
    """bool[B, S], True at the last True of each row only."""
    columns = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
    last = jnp.max(columns, axis=1, where=mask, initial=-1, keepdims=True)
    return columns == last
