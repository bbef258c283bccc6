"""VESPO and TOPR: log-probs weighted by the ratio of the whole response.

With W = Π_t π/μ of a response, not to the power of 1/length, its tokens are weighted by

    VESPO   W^c₁·exp(c₂(1 - W)), with c₁, c₂ by the sign of A: 1 at W = 1, 0 far away
    TOPR    1 where A >= 0, min(W, 1) where A < 0: a bad response is pushed down less,
            the less likely it has become
"""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked, surrogates
from rlhf_jax.functional.aggregation import Mean, aggregate

Array = jax.Array
Scalar = checks.Scalar
Stats = masked.Stats


def vespo_loss(
    *,
    logprobs: Float32[Array, "B S"],
    old_logprobs: Float32[Array, "B S"],
    advantages: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    power: Scalar,
    decay: Scalar,
    negative_power: Scalar,
    negative_decay: Scalar,
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """VESPO, the mean of -sg(φ(W))·A·log π with φ(W) = W^c₁·exp(c₂(1 - W)).

    Args:
      old_logprobs: f32[B, S], nats, log μ of the policy that sampled.
      power, decay: c₁ and c₂ where A > 0, dimensionless, above 0; published 2 and 3.
      negative_power, negative_decay: c₁ and c₂ elsewhere; published 3 and 2.
      the others: as in `losses.policy_loss`.

    Returns:
      f32[] loss and {name: (sum, weight)}: the ratio statistics of `losses.policy_loss`
      for W, and `policy/gate`: the mean of φ. The gradient reaches `logprobs` only.

    Source: Shen et al. 2026, arXiv:2602.10693, eq. 20.

    >>> old_logprobs = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> logprobs = jnp.log(jnp.array([[0.5, 0.5], [1.0, 0.75]]))  # W is 1, and 3
    >>> arrays = {"old_logprobs": old_logprobs, "mask": jnp.ones((2, 2), bool)}
    >>> arrays |= {"advantages": jnp.ones((2, 2))}
    >>> kernel = {"power": 2.0, "decay": 3.0, "negative_power": 3.0}
    >>> kernel |= {"negative_decay": 2.0}
    >>> loss = lambda x: vespo_loss(logprobs=x, **arrays, **kernel)[0]
    >>> print(jax.grad(loss)(logprobs))  # -φ/4: φ(3) is 9·exp(-6)
    [[-0.25  -0.25 ]
     [-0.006 -0.006]]
    >>> _, stats = vespo_loss(logprobs=logprobs, **arrays, **kernel)
    >>> print(masked.mean_stats(stats)["policy/gate"])
    0.511
    """
    checks.positive(
        power=power,
        decay=decay,
        negative_power=negative_power,
        negative_decay=negative_decay,
    )
    log_ratio, advantages = surrogates.masked_inputs(
        logprobs, old_logprobs, advantages, mask
    )
    log_weight = _of_response(log_ratio, mask)
    better = advantages > 0
    # In logs: W may overflow where φ is 0.
    log_kernel = jnp.where(better, power, negative_power) * log_weight
    slowing = jnp.where(better, decay, negative_decay)
    kernel = jnp.exp(log_kernel + slowing * -jnp.expm1(_bounded(log_weight)))
    kernel = jax.lax.stop_gradient(kernel)  # the four options have no gradient either
    loss, stats = aggregate(
        "loss/policy",
        -kernel * advantages * jnp.where(mask, logprobs, 0.0),
        mask,
        **mean,
    )
    stats |= masked.sum_stats({"policy/gate": kernel}, mask=mask)
    ratio = jnp.exp(_bounded(log_weight))
    return loss, stats | surrogates.ratio_stats(log_ratio, ratio, mask=mask)


def topr_loss(
    *,
    logprobs: Float32[Array, "B S"],
    old_logprobs: Float32[Array, "B S"],
    advantages: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """TOPR, the mean of -sg(w)·A·log π, w = 1 where A >= 0 and min(W, 1) where A < 0.

    Args:
      old_logprobs: f32[B, S], nats, log μ of the policy that sampled.
      the others: as in `losses.policy_loss`.

    Returns:
      f32[] loss and {name: (sum, weight)}: the ratio statistics of `losses.policy_loss`
      for W, and `policy/clipfrac`: the share of tokens with A < 0 and W > 1. The
      gradient reaches `logprobs` only.

    Source: Le Roux et al. 2025, arXiv:2503.14286, the update of TOPR.

    >>> old_logprobs = jnp.log(jnp.full((3, 1), 0.5))
    >>> logprobs = jnp.log(jnp.array([[0.25], [0.25], [0.75]]))  # W is ½, ½ and 1½
    >>> arrays = {"old_logprobs": old_logprobs, "mask": jnp.ones((3, 1), bool)}
    >>> arrays |= {"advantages": jnp.array([[1.0], [-1.0], [-1.0]])}
    >>> loss = lambda x: topr_loss(logprobs=x, **arrays)[0]
    >>> print(jax.grad(loss)(logprobs)[:, 0] * 3)
    [-1.   0.5  1. ]
    >>> _, stats = topr_loss(logprobs=logprobs, **arrays)
    >>> print(masked.mean_stats(stats)["policy/clipfrac"])
    0.333
    """
    log_ratio, advantages = surrogates.masked_inputs(
        logprobs, old_logprobs, advantages, mask
    )
    log_weight = _of_response(log_ratio, mask)
    tapered = jnp.exp(jnp.minimum(log_weight, 0.0))
    weight = jnp.where(advantages < 0, tapered, 1.0)
    loss, stats = aggregate(
        "loss/policy",
        -weight * advantages * jnp.where(mask, logprobs, 0.0),
        mask,
        **mean,
    )
    bounded = ((advantages < 0) & (log_weight > 0)).astype(jnp.float32)
    stats |= masked.sum_stats({"policy/clipfrac": bounded}, mask=mask)
    ratio = jnp.exp(_bounded(log_weight))
    return loss, stats | surrogates.ratio_stats(log_ratio, ratio, mask=mask)


def _of_response(log_ratio: Array, mask: Array) -> Array:
    """f32[B, S]: log W of each token's response, nats, without gradient."""
    checks.shape((None, None), mask=mask)
    total = masked.masked_sum(jax.lax.stop_gradient(log_ratio), mask=mask, axis=1)
    return jnp.broadcast_to(total[:, None], mask.shape)


def _bounded(log_weight: Array) -> Array:
    return jnp.minimum(log_weight, surrogates.LARGEST)
