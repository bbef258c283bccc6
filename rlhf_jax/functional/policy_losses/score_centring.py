"""Score centring: a policy gradient without the drift towards its sampler.

At a prefix that μ samples at, the gradient of a likelihood weighted by A is

    E_μ[A ∇log π] = E_μ[A]·E_μ[∇log π] + Cov_μ(A, ∇log π)

The first term pulls π to μ wherever E_μ[A] is not 0, and is 0 where π = μ alone. Here
E_μ[∇log π] is subtracted from every token's score, so that the covariance is left.
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
LEAST = 1e-6  # of the probability outside the top k, as published


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

    f is 1 without a cap, min(r, cap) with one (TIS), and with a floor r where it is
    within both and 0 elsewhere (IcePop). Outside the top k μ is taken as ρ·π, whose
    scores add up to minus those inside: E_μ[f·∇log π] is exact where k is the
    vocabulary, and where μ is so.

    Args:
      old_logprobs: f32[B, S], nats, log μ of the policy that sampled.
      top_logprobs, old_top_logprobs: f32[B, S, k], nats, log π and log μ of the k
        likeliest tokens of μ at each position, of the whole vocabulary.
      cap: largest ratio, at least 1; None weights nothing. Published with TIS: 2.
      floor: smallest ratio, above 0 and at most 1, with a cap alone; None has none.
      the others: those of `losses.policy_loss`.

    Returns:
      f32[] loss and {name: (sum, weight)}, those of `losses.policy_loss` about ratios,
      `policy/clipfrac`: the share of tokens whose ratio is beyond a bound, and
      `policy/top_mass`: the mean of Σ_v μ_v. The gradient reaches `logprobs` and
      `top_logprobs`; weights and c have none.

    Source: Marek and Ryabinin 2026, arXiv:2609.20807, eq. 5 and 9 to 14.

    >>> old = jnp.log(jnp.array([[[0.75, 0.25]]]))  # μ; π is 0.5, 0.5
    >>> one = {"advantages": jnp.ones((1, 1)), "mask": jnp.ones((1, 1), bool)}
    >>> one |= {"old_top_logprobs": old}
    >>> def loss(z, drawn):
    ...     own = jax.nn.log_softmax(z)[None, None]
    ...     pair = {"logprobs": own[..., drawn], "old_logprobs": old[..., drawn]}
    ...     return centred_loss(top_logprobs=own, **pair, **one)[0]
    >>> slopes = [jax.grad(loss)(jnp.zeros(2), drawn) for drawn in (0, 1)]
    >>> print(slopes[0])
    [-0.25  0.25]
    >>> print(0.75 * slopes[0] + 0.25 * slopes[1])  # their mean under μ
    [0. 0.]
    """
    log_ratio, advantages = surrogates.masked_inputs(
        logprobs, old_logprobs, advantages, mask
    )
    checks.shape((*mask.shape, None), top_logprobs=top_logprobs)
    checks.shape(top_logprobs.shape, old_top_logprobs=old_top_logprobs)
    checks.within(least=1, advice="a ratio starts at 1: raise it", cap=cap)
    checks.within(above=0, most=1, advice="a ratio starts at 1: lower it", floor=floor)
    if floor is not None and cap is None:
        raise checks.InputError(
            f"floor: expected a cap beside it, got {floor} alone; give both, or neither"
        )
    weight, beyond = _weight(jax.lax.stop_gradient(log_ratio), cap, floor)
    # Of fewer possible tokens than k the others have no probability.
    inside = mask[..., None] & (old_top_logprobs > -jnp.inf)
    top_logprobs = jnp.where(inside, top_logprobs, 0.0)
    log_p, log_q = (
        jax.lax.stop_gradient(jnp.where(inside, x, -jnp.inf))
        for x in (top_logprobs, old_top_logprobs)
    )
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    tail, old_tail = (jnp.maximum(1 - x.sum(axis=-1), LEAST) for x in (p, q))
    log_rho = jnp.log(old_tail) - jnp.log(tail)
    scale = jnp.exp(log_rho) * _weight(-log_rho, cap, floor)[0]
    ratios, _ = _weight(jnp.where(inside, log_p - log_q, 0.0), cap, floor)
    coefficients = jnp.where(inside, q * ratios - scale[..., None] * p, 0.0)
    expected = jnp.sum(coefficients * top_logprobs, axis=-1)
    loss, stats = aggregate(
        "loss/policy",
        -advantages * (weight * jnp.where(mask, logprobs, 0.0) - expected),
        mask,
        **mean,
    )
    own = {"policy/clipfrac": beyond, "policy/top_mass": q.sum(axis=-1)}
    ratio = jnp.exp(jnp.minimum(log_ratio, surrogates.LARGEST))
    stats |= masked.sum_stats(own, mask=mask)
    return loss, stats | surrogates.ratio_stats(log_ratio, ratio, mask=mask)


def _weight(
    log_ratio: Array, cap: Scalar | None, floor: Scalar | None
) -> tuple[Array, Array]:
    """f(exp(log_ratio)), and f32: 1 where the ratio is beyond a bound."""
    if cap is None:
        return jnp.ones_like(log_ratio), jnp.zeros_like(log_ratio)
    # In logs: a ratio that is cut may be infinite.
    beyond = log_ratio > jnp.log(cap)
    weight = jnp.exp(jnp.minimum(log_ratio, jnp.log(cap)))
    if floor is not None:
        beyond |= log_ratio < jnp.log(floor)
        weight = jnp.where(beyond, 0.0, weight)
    return jax.lax.stop_gradient(weight), beyond.astype(jnp.float32)
