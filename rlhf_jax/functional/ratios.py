"""Probability ratios of a loss, and exponentials that stay finite in float32."""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked

Array = jax.Array

LARGE = 80.0  # nats: products above e^80 are computed as sums of logs
LARGEST = 88.72  # nats: e^88.72 is the largest exponential in float32

RatioLevel = Literal["token", "sequence", "sequence_token"]
"""What the probability ratio ρ of a token is.

token: of the token itself.
sequence: of its response, to the power of 1/length: the geometric mean of the ratios of
its tokens, and the gradient of that mean (GSPO).
sequence_token: the same number with the gradient of the token's own log-prob, for
advantages that differ within a response (GSPO-token).
"""


def capped_exp(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """exp(min(x, 88.72)), with a slope that is equal to the value above 88.72 as well.

    The slope at infinity is 0.

    Returns:
      f32[...], dimensionless, finite unless x is NaN.

    >>> print(capped_exp(jnp.array([0.0, 1.0, -jnp.inf])))
    [1.    2.718 0.   ]
    >>> print(jnp.isfinite(capped_exp(jnp.array([80.0, 1000.0, jnp.inf]))))
    [ True  True  True]
    """
    capped = jnp.exp(jax.lax.stop_gradient(jnp.minimum(x, LARGEST)))
    finite = jnp.where(jnp.isinf(x), 0.0, x)
    return capped * (1.0 + (finite - jax.lax.stop_gradient(finite)))


def at_level(
    log_ratio: Float32[Array, "*shape"],
    *,
    mask: Bool[Array, "*shape"],
    ratio_level: RatioLevel,
) -> Float32[Array, "*shape"]:
    """log ρ of each token at a level, from the log-ratios of single tokens.

        token             log ρ_t = x_t
        sequence          log ρ_t = log s,  log s = (1/len) Σ_t m·x_t
        sequence_token    log ρ_t = sg(log s) + x_t - sg(x_t)

    Where the advantages of a response are all equal, as over groups, the last two have
    the same gradient under every aggregation.

    Args:
      log_ratio: f32[B, S], nats, x = log π - log π_old; the gradient reaches it.

    Returns:
      f32[B, S], nats, 0 outside the mask (as it is, for token).

    Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 7 and 14.

    >>> x = jnp.array([[0.2, -0.1, 9.0], [0.3, 9.0, 9.0]])
    >>> mask = jnp.array([[True, True, False], [True, False, False]])
    >>> print(at_level(x, mask=mask, ratio_level="sequence"))
    [[0.05 0.05 0.  ]
     [0.3  0.   0.  ]]
    >>> print(at_level(x, mask=mask, ratio_level="sequence_token"))
    [[0.05 0.05 0.  ]
     [0.3  0.   0.  ]]
    """
    checks.one_of(ratio_level=ratio_level, among=get_args(RatioLevel))
    if ratio_level == "token":
        return log_ratio
    checks.shape((None, None), mask=mask)
    total = masked.masked_sum(log_ratio, mask=mask, axis=1)
    length = jnp.maximum(mask.sum(axis=1, dtype=jnp.float32), 1.0)
    mean = jnp.broadcast_to((total / length)[:, None], mask.shape)
    if ratio_level == "sequence_token":
        own = jnp.where(mask, log_ratio, 0.0)
        mean = jax.lax.stop_gradient(mean) + (own - jax.lax.stop_gradient(own))
    return jnp.where(mask, mean, 0.0)
