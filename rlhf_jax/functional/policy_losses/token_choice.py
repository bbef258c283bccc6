"""Which tokens of a batch are trained on: by their entropy, or their covariance.

A step of the policy gradient lowers the entropy by about the covariance of log π and
A. A small share of tokens has nearly all of it:

    Clip-Cov   some of those with a large covariance have no gradient
    KL-Cov     those with the largest are held to π_old by |log π - log π_old|

Beside it: of a policy that hesitates at a fifth of its tokens, these alone are trained.
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
    """(log π(y_i) - mean log π)·(A_i - mean A) of every token i of a batch.

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
    """The max(1, ⌊share·N⌋) tokens with the largest x, N all tokens of the mask.

    Args:
      x: f32[B, S]: entropies (2506.01939), covariances (KL-Cov) or chances (Clip-Cov).
      share: of the tokens of the mask, above 0 and at most 1.
      among: bool[B, S], tokens that may be taken, all where they are fewer; None is the
        mask.

    Returns:
      bool[B, S]; of equal numbers at the border all. Nothing has a gradient.

    Source: Wang et al. 2025, arXiv:2506.01939 (entropies, share 0.2); Cui et al. 2025,
    arXiv:2505.22617 (covariances).

    >>> x, mask = jnp.array([[0.1, 2.0, 0.5, 9.0]]), jnp.array([[True] * 3 + [False]])
    >>> print(top_share(x, mask=mask, share=0.7))  # 2 of 3
    [[False  True  True False]]
    >>> print(top_share(x, mask=mask, share=0.7, among=x < 1))  # both that there are
    [[ True False  True False]]
    """
    checks.positive(share=share)
    checks.fraction(share=share)
    checks.masked_floats(mask, x=x)
    inside = mask if among is None else mask & among
    x = jnp.where(inside, x, -jnp.inf)
    count = jnp.floor(share * mask.sum(dtype=jnp.float32)).astype(jnp.int32)
    # A sort, as the count is traced: `top_k` has a static one.
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
    """The mean of |log π - log π_old| at chosen tokens, and 0 at the others.

    Args:
      chosen: bool[B, S], of `top_share` of `covariances`.
      the others: those of `losses.policy_loss`.

    Returns:
      f32[] loss, nats, and {name: (sum, weight)}: `loss/kl_cov`. The gradient reaches
      `logprobs` only. Differences of up to 1e-5 nats are 0: rounding of equal log-probs
      would have a slope of 1, as all others have.

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
    held = mask & chosen & (jnp.abs(log_ratio) > ROUNDING)
    log_ratio = jnp.where(held, log_ratio, 0.0)
    return aggregate(
        "loss/kl_cov",
        jnp.abs(log_ratio),
        mask,
        **mean,
    )
