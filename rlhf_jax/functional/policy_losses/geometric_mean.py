"""GMPO: the geometric mean of a response's ratios, each of which is clipped first."""

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


def gmpo_loss(
    *,
    logprobs: Float32[Array, "B S"],
    old_logprobs: Float32[Array, "B S"],
    advantages: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    clip_range: Scalar,
    clip_range_high: Scalar | None = None,
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """GMPO, the mean of -A·exp((1/len) Σ_t c(x_t)), x = log π - log π_old.

    c(x) = min(x, ε_high) where A > 0 and max(x, -ε) where A < 0: each token's log-ratio
    is clipped before the mean, whereas GSPO clips the mean. Clipped tokens have no
    gradient. A token with A = 0 is clipped by the sign of its response's Σ_t A.

    Args:
      clip_range, clip_range_high: ε and ε_high, nats; published 0.4 both. None is ε.
      the others: as in `losses.policy_loss`. Published with sequence_mean, under which
        every token of a response carries the response's loss.

    Returns:
      f32[] loss and {name: (sum, weight)} as in `losses.policy_loss`, without dual clip
      and overflow; `policy/clipfrac` is the share of clipped tokens, and ratios are the
      geometric means. The gradient reaches `logprobs` and, where they bind, both clip
      ranges.

    Source: Zhao et al. 2025, arXiv:2507.20673, the objective of GMPO.

    >>> old_logprobs = jnp.zeros((1, 2))
    >>> logprobs = jnp.array([[0.6, -0.2]])
    >>> arrays = {"old_logprobs": old_logprobs, "mask": jnp.ones((1, 2), bool)}
    >>> arrays |= {"advantages": jnp.ones((1, 2))}
    >>> bounds = {"clip_range": 0.4, "clip_range_high": 0.4}
    >>> loss = lambda x: gmpo_loss(logprobs=x, **arrays, **bounds)[0]
    >>> print(loss(logprobs))  # -exp((0.4 - 0.2)/2)
    -1.105
    >>> print(jax.grad(loss)(logprobs))
    [[ 0.    -0.553]]
    """
    log_ratio, advantages = surrogates.masked_inputs(
        logprobs, old_logprobs, advantages, mask
    )
    checks.shape((None, None), mask=mask)
    checks.positive(clip_range=clip_range, clip_range_high=clip_range_high)
    if clip_range_high is None:
        clip_range_high = clip_range
    # A token whose A an importance weight set to 0 still has a ratio in the mean.
    whole = advantages.sum(axis=1, keepdims=True)
    clipped = jnp.where(
        jnp.where(advantages == 0, whole, advantages) < 0,
        jnp.maximum(log_ratio, -clip_range),
        jnp.minimum(log_ratio, clip_range_high),
    )
    level = surrogates.at_level(clipped, mask=mask, ratio_level="sequence")
    # Before exp: where A < 0 the mean is not bounded above, and exp may be infinite.
    ratio = jnp.exp(jnp.where(level > surrogates.LARGE, surrogates.LARGE, level))
    loss, stats = aggregate("loss/policy", -ratio * advantages, mask, **mean)
    cut = jax.lax.stop_gradient((clipped != log_ratio).astype(jnp.float32))
    stats |= masked.sum_stats({"policy/clipfrac": cut}, mask=mask)
    return loss, stats | surrogates.ratio_stats(
        log_ratio, jax.lax.stop_gradient(ratio), mask=mask
    )
