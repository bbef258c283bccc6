"""Score centring: a policy gradient without the drift towards its sampler.

    E_μ[A ∇log π] = E_μ[A]·E_μ[∇log π] + Cov_μ(A, ∇log π)      at a prefix

The first term drags π towards μ, or away from it, wherever E_μ[A] is not 0; it vanishes
at π = μ. Subtracting E_μ[∇log π] from every token's score leaves the covariance.
"""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked, surrogates
from rlhf_jax.functional.aggregation import Mean, aggregate
from rlhf_jax.functional.errors import expect_none
from rlhf_jax.functional.off_policy.importance import check_bounds

Array = jax.Array
Scalar = checks.Scalar
Stats = masked.Stats


def centred_loss(
    *,
    logprobs: Float32[Array, "B S"],
    old_logprobs: Float32[Array, "B S"],
    top_logprobs: Float32[Array, "B S k"],
    old_top_logprobs: Float32[Array, "B S k"],
    advantages: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    cap: Scalar | None = None,
    floor: Scalar | None = None,
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """The mean of -A·(sg(f(π/μ))·log π - Σ_v sg(c_v)·log π_v), v in the top k of μ.

        c_v = μ_v·f(π_v/μ_v) - ρ·f(1/ρ)·π_v
        ρ   = (1 - Σ_v μ_v)/(1 - Σ_v π_v), of the probabilities outside the top k

    f(r) is 1 without a cap, min(r, cap) with a cap (TIS), and with cap and floor r
    between the two and 0 elsewhere (IcePop). Outside the top k, μ is taken to be ρ·π:
    the expected score there is -ρ·f(1/ρ) times that of π inside. So E_μ[f·∇log π] is
    exact if k is the whole vocabulary, or if μ is proportional to π outside.

    Args:
      old_logprobs: f32[B, S], nats, log μ of the policy that sampled.
      top_logprobs, old_top_logprobs: f32[B, S, k], nats, log π and log μ of the k
        likeliest tokens of μ at each position, normalised over the vocabulary.
      cap: largest ratio, at least 1; None is f = 1. Published with TIS: 2.
      floor: smallest ratio, above 0 and at most 1, only with a cap; None is no bound.
      the others: as in `losses.policy_loss`.

    Returns:
      f32[] loss and {name: (sum, weight)}: the ratio statistics of
      `losses.policy_loss`, `policy/clipfrac`: the share of tokens whose ratio is beyond
      a bound, and `policy/top_mass`: the mean of Σ_v μ_v. The gradient reaches
      `logprobs` and `top_logprobs`; weights and c have none.

    Source: Marek and Ryabinin 2026, arXiv:2609.20807, eq. 5 and 9 to 14.

    >>> old = jnp.log(jnp.array([[[0.75, 0.25]]]))  # μ; the policy has a half each
    >>> arrays = {"advantages": jnp.ones((1, 1)), "mask": jnp.ones((1, 1), bool)}
    >>> arrays |= {"old_logprobs": old[..., 0], "old_top_logprobs": old}
    >>> def loss(z):
    ...     now = jax.nn.log_softmax(z)[None, None]
    ...     return centred_loss(logprobs=now[..., 0], top_logprobs=now, **arrays)[0]
    >>> print(loss(jnp.zeros(2)))  # c adds up to 0
    0.693
    >>> print(jax.grad(loss)(jnp.zeros(2)))  # μ - e_0, where a likelihood has π - e_0
    [-0.25  0.25]
    """
    log_ratio, advantages = surrogates.masked_inputs(
        logprobs, old_logprobs, advantages, mask
    )
    checks.shape((*mask.shape, None), top_logprobs=top_logprobs)
    checks.shape(top_logprobs.shape, old_top_logprobs=old_top_logprobs)
    if cap is None:
        expect_none("without a cap", advice="give both, or neither", floor=floor)
    else:
        check_bounds("token_mask", cap=cap, floor=floor)
    weight, beyond = _weight(jax.lax.stop_gradient(log_ratio), cap, floor)
    # Where fewer than k tokens are possible, the other entries have probability 0.
    inside = mask[..., None] & (old_top_logprobs > -jnp.inf)
    top_logprobs = jnp.where(inside, top_logprobs, 0.0)
    log_p, log_q = (
        jax.lax.stop_gradient(jnp.where(inside, x, -jnp.inf))
        for x in (top_logprobs, old_top_logprobs)
    )
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    tail, old_tail = (jnp.maximum(1 - x.sum(axis=-1), 1e-6) for x in (p, q))
    log_rho = jnp.log(old_tail) - jnp.log(tail)
    scale = jnp.exp(log_rho) * _weight(-log_rho, cap, floor)[0]
    ratios, _ = _weight(jnp.where(inside, log_p - log_q, 0.0), cap, floor)
    coefficients = jnp.where(inside, q * ratios - scale[..., None] * p, 0.0)
    expected = jnp.sum(coefficients * top_logprobs, axis=-1)
    losses = -advantages * (weight * jnp.where(mask, logprobs, 0.0) - expected)
    loss, stats = aggregate("loss/policy", losses, mask, **mean)
    own = {"policy/clipfrac": beyond, "policy/top_mass": q.sum(axis=-1)}
    ratio = jnp.exp(jnp.minimum(log_ratio, surrogates.LARGEST))
    stats |= masked.sum_stats(own, mask=mask)
    return loss, stats | surrogates.ratio_stats(log_ratio, ratio, mask=mask)


def _weight(
    log_ratio: Array, cap: Scalar | None, floor: Scalar | None
) -> tuple[Array, Array]:
    """f(exp(log_ratio)), and f32, 1 where the ratio is beyond a bound."""
    if cap is None:
        return jnp.ones_like(log_ratio), jnp.zeros_like(log_ratio)
    # In logs: a ratio beyond the cap may overflow.
    beyond = log_ratio > jnp.log(cap)
    weight = jnp.exp(jnp.minimum(log_ratio, jnp.log(cap)))
    if floor is not None:
        beyond |= log_ratio < jnp.log(floor)
        weight = jnp.where(beyond, 0.0, weight)
    return jax.lax.stop_gradient(weight), beyond.astype(jnp.float32)
