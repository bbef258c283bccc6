"""Selection of the tokens that are trained on, by entropy or covariance.

A step of the policy gradient lowers the entropy by about the covariance of log π and
A. A small share of the tokens has nearly all of it:

    Clip-Cov   some tokens with a large covariance get no gradient
    KL-Cov     tokens with the largest covariances are held to π_old by
               |log π - log π_old|

`top_share` of entropies trains only on tokens at which the policy is unsure.
"""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.aggregation import Mean, aggregate

Array = jax.Array
Scalar = checks.Scalar
Stats = masked.Stats
ROUNDING = 1e-5  # nats


def covariances(
    *,
    logprobs: Float32[Array, "*shape"],
    advantages: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float32[Array, "*shape"]:
    """(log π(y_i) - mean log π)·(A_i - mean A) for every token i of a batch.

    Returns:
      f32[B, S], nats times reward units, 0 outside the mask. Nothing has a gradient.

    Source: Cui et al. 2025, arXiv:2505.22617, the token-wise covariance.

    >>> arrays = {"logprobs": jnp.array([[-1.0, -3.0]])}
    >>> arrays |= {"advantages": jnp.array([[2.0, 0.0]])}
    >>> print(covariances(**arrays, mask=jnp.ones((1, 2), bool)))
    [[1. 1.]]
    >>> print(covariances(**arrays, mask=jnp.array([[True, False]])))  # of one token
    [[0. 0.]]
    """
    checks.masked_floats(mask, logprobs=logprobs, advantages=advantages)

    def about_mean(x: Array) -> Array:
        x = jnp.where(mask, x, 0.0)
        return jnp.where(mask, x - masked.masked_mean(x, mask=mask), 0.0)

    return jax.lax.stop_gradient(about_mean(logprobs) * about_mean(advantages))


def top_share(
    x: Float32[Array, "*shape"],
    *,
    mask: Bool[Array, "*shape"],
    share: Scalar,
    among: Bool[Array, "*shape"] | None = None,
) -> Bool[Array, "*shape"]:
    """Marks the max(1, ⌊share·N⌋) tokens with the largest x, N the tokens of the mask.

    Args:
      x: f32[B, S]: entropies, covariances (KL-Cov) or random numbers (Clip-Cov).
      share: share of the tokens of the mask, above 0 and at most 1.
      among: bool[B, S], tokens that may be chosen; all of them if there are fewer. None
        is the mask.

    Returns:
      bool[B, S]; ties at the threshold are all chosen. Nothing has a gradient.

    Source: Wang et al. 2025, arXiv:2506.01939 (entropies, share 0.2); Cui et al. 2025,
    arXiv:2505.22617 (covariances).

    >>> x, mask = jnp.array([[0.1, 2.0, 0.5, 9.0]]), jnp.array([[True] * 3 + [False]])
    >>> print(top_share(x, mask=mask, share=0.7))  # 2 of 3
    [[False  True  True False]]
    >>> print(top_share(x, mask=mask, share=0.7, among=x < 1))  # only two are there
    [[ True False  True False]]
    """
    checks.positive(share=share)
    checks.fraction(share=share)
    checks.masked_floats(mask, x=x)
    inside = mask if among is None else mask & among
    x = jnp.where(inside, x, -jnp.inf)
    count = jnp.floor(share * mask.sum(dtype=jnp.float32)).astype(jnp.int32)
    # A sort, as `top_k` needs a static count.
    least = jnp.sort(x, axis=None)[x.size - jnp.maximum(count, 1)]
    return inside & (x >= least)


def kl_cov_loss(
    *,
    logprobs: Float32[Array, "*shape"],
    old_logprobs: Float32[Array, "*shape"],
    chosen: Bool[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """The mean over all tokens of |log π - log π_old| at chosen tokens, 0 elsewhere.

    Args:
      chosen: bool[B, S], `top_share` of `covariances`.
      the others: as in `losses.policy_loss`.

    Returns:
      f32[] loss, nats, and {name: (sum, weight)}: `loss/kl_cov`. The gradient reaches
      `logprobs` only. Differences of up to 1e-5 nats count as 0: a rounding error would
      otherwise get a slope of ±1, like any other difference.

    Source: Cui et al. 2025, arXiv:2505.22617, KL-Cov, as in verl's
    `compute_policy_loss_kl_cov`.

    >>> logprobs = jnp.array([[-1.0, -2.0, -4.0]])
    >>> arrays = {"old_logprobs": jnp.full((1, 3), -2.5), "mask": logprobs < 0}
    >>> chosen = jnp.array([[True, False, True]])
    >>> loss = lambda x: kl_cov_loss(logprobs=x, chosen=chosen, **arrays)[0]
    >>> print(loss(logprobs))  # (1.5 + 1.5)/3
    1.0
    >>> print(jax.grad(loss)(logprobs))
    [[ 0.333  0.    -0.333]]
    """
    checks.boolean(chosen=chosen)
    checks.masked_floats(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    log_ratio = logprobs - jax.lax.stop_gradient(old_logprobs)
    penalised = mask & chosen & (jnp.abs(log_ratio) > ROUNDING)
    log_ratio = jnp.where(penalised, log_ratio, 0.0)
    return aggregate("loss/kl_cov", jnp.abs(log_ratio), mask, **mean)
