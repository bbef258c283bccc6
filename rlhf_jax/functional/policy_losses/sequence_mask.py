"""DeepSeek-V3.2's mask of bad responses that have become unlikely."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked

Array = jax.Array


def off_policy_mask(
    *,
    logprobs: Float32[Array, "B S"],
    old_logprobs: Float32[Array, "B S"],
    advantages: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    threshold: checks.Scalar,
) -> Bool[Array, "B S"]:
    """M, False where A < 0 and (1/len) Σ_t log(μ/π) of the response exceeds δ.

    The policy learns nothing from mistakes that it would no longer make. M multiplies
    the loss of a token; the divisor of the loss still counts the token.

    Args:
      logprobs: f32[B, S], nats, of the policy now.
      old_logprobs: f32[B, S], nats, log μ of the policy that sampled.
      advantages: f32[B, S], reward units.
      threshold: δ, nats per token, above 0.

    Returns:
      bool[B, S], True outside the mask. Nothing has a gradient.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 3.1.

    >>> logprobs = jnp.array([[-2.0, -1.0], [-2.0, -1.0], [-1.0, -1.0]])
    >>> arrays = {"logprobs": logprobs, "old_logprobs": jnp.full((3, 2), -1.0)}
    >>> arrays |= {"advantages": jnp.array([[-1.0], [1.0], [-1.0]]) * jnp.ones((3, 2))}
    >>> arrays |= {"mask": jnp.ones((3, 2), bool)}
    >>> print(off_policy_mask(threshold=0.4, **arrays)[:, 0])  # half a nat per token
    [False  True  True]
    >>> print(off_policy_mask(threshold=0.6, **arrays)[:, 0])
    [ True  True  True]
    """
    checks.shape((None, None), mask=mask)
    checks.positive(threshold=threshold)
    floats = {"logprobs": logprobs, "old_logprobs": old_logprobs}
    checks.masked_floats(mask, **floats, advantages=advantages)
    left = jnp.where(mask, old_logprobs - logprobs, 0.0)
    distance = masked.masked_mean(left, mask=mask, axis=1)[:, None]
    return ~(mask & (advantages < 0) & (distance > threshold))
