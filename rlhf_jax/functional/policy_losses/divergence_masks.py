"""DPPO: a trust region by the divergence of a token's distribution, not by its ratio.

A token that goes from 1e-5 to 1e-3 has a ratio of 100 and moves almost no probability;
a token that goes from 0.99 to 0.8 has a ratio of 0.81 and moves a fifth of it.
"""

from __future__ import annotations

from typing import Unpack, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked, surrogates
from rlhf_jax.functional.aggregation import Mean, aggregate
from rlhf_jax.functional.surrogates import BinaryDivergence

Array = jax.Array
Scalar = checks.Scalar
Stats = masked.Stats


def dppo_loss(
    *,
    logprobs: Float32[Array, "*shape"],
    old_logprobs: Float32[Array, "*shape"],
    advantages: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    divergence: BinaryDivergence,
    threshold: Scalar,
    threshold_high: Scalar | None = None,
    cap: Scalar,
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """DPPO with binary divergences, the mean of -sg(M·min(ρ, C))·A·log π.

    M is 0 where a token has moved away from μ by more than a threshold, in the
    direction in which A pushes it, and 1 elsewhere:

        tv    D = |π - μ|
        kl    D = μ log(μ/π) + (1 - μ) log((1 - μ)/(1 - π))
        M = 0 where A > 0, π > μ, D > δ_high, or A < 0, π < μ, D > δ

    Args:
      old_logprobs: f32[B, S], nats, log μ of the policy that sampled.
      divergence: D, over two outcomes: the sampled token, and any other.
      threshold, threshold_high: δ and δ_high; a probability with tv, nats with kl. None
        is δ.
      cap: C > 1, the largest weight, dimensionless.
      the others: as in `losses.policy_loss`.

    Returns:
      f32[] loss and {name: (sum, weight)} as in `losses.policy_loss`, without dual clip
      and overflow; `policy/clipfrac` is the share of tokens with M = 0. The gradient
      reaches `logprobs` only; mask and weight have none.

    Source: Qi et al. 2026, arXiv:2602.04879 (the binary divergences and masks, as in
    the authors' `_compute_token_mask_for_policy_loss` of sail-sg/Stable-RL).

    >>> old_logprobs = jnp.log(jnp.array([[0.5, 0.001, 0.9]]))
    >>> logprobs = jnp.log(jnp.array([[0.8, 0.01, 0.8]]))  # ratios 1.6, 10 and 0.89
    >>> arrays = {"old_logprobs": old_logprobs, "mask": jnp.ones((1, 3), bool)}
    >>> arrays |= {"advantages": jnp.array([[1.0, 1.0, -1.0]])}
    >>> bounds = {"threshold": 0.15, "threshold_high": 0.15, "cap": 20.0}
    >>> loss = lambda x: dppo_loss(logprobs=x, divergence="tv", **arrays, **bounds)[0]
    >>> print(jax.grad(loss)(logprobs))  # the first moved by 0.3: left out
    [[ 0.    -3.333  0.296]]
    >>> print(loss(logprobs))  # (-10·log 0.01 + 0.89·log 0.8) / 3
    15.284
    """
    checks.one_of(divergence=divergence, among=get_args(BinaryDivergence))
    checks.positive(threshold=threshold, threshold_high=threshold_high)
    if threshold_high is None:
        threshold_high = threshold
    checks.within(above=1, advice="choose 10 or 20", cap=cap)
    log_ratio, advantages = surrogates.masked_inputs(
        logprobs, old_logprobs, advantages, mask
    )
    now, old = jax.lax.stop_gradient((logprobs, old_logprobs))
    now, old = (jnp.where(mask, x, 0.0) for x in (now, old))
    distance = _divergence(divergence, now, old)
    # A move back towards μ is always allowed, however far the token is.
    beyond = jnp.where(
        advantages > 0,
        (now > old) & (distance > threshold_high),
        (now < old) & (distance > threshold) & (advantages < 0),
    )
    ratio = jnp.exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.where(beyond, 0.0, jnp.minimum(ratio, cap)))
    loss, stats = aggregate(
        "loss/policy",
        -weight * advantages * jnp.where(mask, logprobs, 0.0),
        mask,
        **mean,
    )
    left_out = {"policy/clipfrac": beyond.astype(jnp.float32)}
    stats |= masked.sum_stats(left_out, mask=mask)
    return loss, stats | surrogates.ratio_stats(log_ratio, ratio, mask=mask)


def _divergence(divergence: BinaryDivergence, now: Array, old: Array) -> Array:
    """D over the sampled token and all others, from log π and log μ."""
    if divergence == "tv":
        return jnp.abs(jnp.exp(now) - jnp.exp(old))
    # 1 - p, and 0 where rounding has left a probability above 1.
    rest_now, rest_old = (jnp.maximum(-jnp.expm1(x), 0.0) for x in (now, old))
    # 0·log 0 is 0; where only π leaves nothing to the others, the KL is infinite.
    log_rest = jnp.log(jnp.where(rest_old > 0, rest_old, 1.0)) - jnp.log(rest_now)
    others = jnp.where(rest_old > 0, rest_old * log_rest, 0.0)
    return jnp.exp(old) * (old - now) + others
