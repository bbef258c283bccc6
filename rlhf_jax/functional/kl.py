"""KL between the policy and the reference: per-token estimators and the exact value.

Under samples of the policy π, with x = logprobs - ref_logprobs (nats):

    k1 = x               unbiased for KL(π ‖ π_ref), may be negative
    k2 = x²/2            biased, never negative
    k3 = exp(-x) - 1 + x unbiased, never negative
    exact                Σ_v π log(π/π_ref) at one position: no sampling noise

These are values. As a *loss* they act otherwise (k1 in the loss regularises nothing).
None takes a mask: reduce the result with `masked`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks

Array = jax.Array


def k1(logprobs: Array, ref_logprobs: Array) -> Array:
    """x = logprobs - ref_logprobs.

    Args:
      logprobs, ref_logprobs: f32[...], nats, of tokens that the policy sampled.

    Returns:
      f32[...], nats per token.

    Raises:
      ValueError: shapes differ. TypeError: not f32.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.
    """
    checks.same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    checks.float32(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return jnp.subtract(logprobs, ref_logprobs)


def k2(logprobs: Array, ref_logprobs: Array) -> Array:
    """x²/2. Args, Returns, Raises, Source: as `k1`."""
    return 0.5 * jnp.square(k1(logprobs, ref_logprobs))


def k3(logprobs: Array, ref_logprobs: Array) -> Array:
    """exp(-x) - 1 + x. Args, Returns, Raises, Source: as `k1`."""
    x = k1(logprobs, ref_logprobs)
    return jnp.expm1(-x) + x


def exact(logits: Array, ref_logits: Array, *, temperature: float = 1.0) -> Array:
    """KL(π ‖ π_ref) = Σ_v π(v) log(π(v) / π_ref(v)), π = softmax(logits / temperature).

    Nothing is shifted: entry t is about the token *after* tokens[:, t]. A logit of -inf
    is a word that cannot come: 0·log 0 = 0, and a word that π can say and the
    reference cannot makes the KL infinite.

    Args:
      logits, ref_logits: floats[..., V] of any precision; taken to float32.
      temperature: divides both, dimensionless.

    Returns:
      f32[...], nats per logit position, up to rounding never negative.

    Raises:
      ValueError: shapes differ or temperature is not positive. TypeError: not floats.

    Source: Cover and Thomas, Elements of Information Theory, eq. 2.26.
    """
    checks.same_shape(logits=logits, ref_logits=ref_logits)
    checks.floating(logits=logits, ref_logits=ref_logits)
    checks.positive(temperature=temperature)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    ref_logprobs = jax.nn.log_softmax(ref_logits.astype(jnp.float32) / temperature)
    return _divergence(logprobs, ref_logprobs)


def _divergence(logprobs: Array, ref_logprobs: Array) -> Array:
    """Σ_v exp(logprobs)·(logprobs - ref_logprobs), with 0·log 0 = 0."""
    possible = logprobs > -jnp.inf
    log_ratio = jnp.where(possible, logprobs, 0.0) - jnp.where(
        possible, ref_logprobs, 0.0
    )
    return jnp.sum(jnp.exp(logprobs) * log_ratio, axis=-1)
