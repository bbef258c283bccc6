"""Exponentials of log-ratios that stay finite where float32 would overflow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float32

Array = jax.Array

LARGE = 80.0  # nats: products above e^80 are computed as sums of logs
LARGEST = 88.72  # nats: e^88.72 is the largest exponential in float32


def capped_exp(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """exp(min(x, 88.72)), with a slope that is equal to the value above 88.72 as well.

    The slope at infinity is 0.

    Args:
      x: f32[...], nats.

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
