"""Probability ratios where float32 ends: exponentials that are held, not infinite."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

LARGE = 80.0  # nats, from which on products are taken as sums of logs
LARGEST = 88.72  # nats: e^88.72 is the last that is a float32


def held_exp(x: Array) -> Array:
    """exp(x), value and slope, and those of e^88.72 above it; no slope at infinity.

    Args:
      x: f32[...], nats.

    Returns:
      f32[...], dimensionless, finite unless x is NaN.
    """
    held = jnp.exp(jax.lax.stop_gradient(jnp.minimum(x, LARGEST)))
    moved = jnp.where(jnp.isinf(x), 0.0, x)
    return held * (1.0 + (moved - jax.lax.stop_gradient(moved)))
