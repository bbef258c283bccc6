"""The generalised Jensen-Shannon divergence between the reference and the policy.

With P the reference (a teacher), Q the policy and M = β·P + (1 - β)·Q their mixture,

    JSD_β       = β·KL(P ‖ M) + (1 - β)·KL(Q ‖ M)
    ∂JSD_β/∂z_v = (1 - β)·Q_v·(log(Q_v/M_v) - KL(Q ‖ M)), z the logits of the policy

JSD_β/β tends to the forward KL(P ‖ Q) as β tends to 0, and JSD_β/(1 - β) to the reverse
KL(Q ‖ P) as β tends to 1. JSD_β is at most -β log β - (1 - β) log(1 - β) nats, however
far apart the two are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from rlhf_jax.functional import checks
from rlhf_jax.functional.logprobs import log_softmax

Array = jax.Array
Scalar = checks.Scalar
LARGE = 200.0  # nats between a token that is possible and one that is not


def mixture_log_ratios(
    log_ratio: Float32[Array, "*shape"], *, beta: Scalar
) -> tuple[Float32[Array, "*shape"], Float32[Array, "*shape"]]:
    """log(Q/M) and log(P/M) of each token, from x = log(P/Q).

    log(M/Q) = log(1 + β·(eˣ - 1)) and log(M/P) = log(M/Q) - x. Both are taken from the
    side where the exponential does not exceed 1: nothing overflows, and where x is 0
    both are 0 to the bit.

    Args:
      log_ratio: f32[...], nats, x; finite.
      beta: share of P in the mixture M, between 0 and 1.

    Returns:
      f32[...] twice, nats. The share of a token in JSD_β is β·P log(P/M) +
      (1 - β)·Q log(Q/M), up to rounding never negative.

    Source: Agarwal et al. 2023, arXiv:2306.13649, eq. 1.

    >>> print(*mixture_log_ratios(jnp.zeros(1), beta=0.3))
    [-0.] [0.]
    >>> P, Q = jnp.array([0.9, 0.1]), jnp.array([0.5, 0.5])
    >>> of_policy, of_reference = mixture_log_ratios(jnp.log(P / Q), beta=0.5)
    >>> print(of_policy, of_reference)  # of M = [0.7, 0.3]
    [-0.336  0.511] [ 0.251 -1.099]
    """
    advice = "at 0 and 1 the divergence is 0 for all models: take the forward or the "
    checks.within(above=0, below=1, advice=advice + "reverse KL", beta=beta)
    small, less = -jnp.abs(log_ratio), log_ratio < 0
    # log(M/Q) where P < Q, else log(M/P): over the larger of the two.
    mixture = jnp.log1p(jnp.where(less, beta, 1 - beta) * jnp.expm1(small))
    other = mixture - small  # log M over the smaller of the two
    return -jnp.where(less, mixture, other), -jnp.where(less, other, mixture)


def jensen_shannon(
    logits: Float[Array, "*shape V"],
    ref_logits: Float[Array, "*shape V"],
    *,
    beta: Scalar,
    temperature: Scalar = 1.0,
) -> Float32[Array, "*shape"]:
    """JSD_β = β·KL(π_ref ‖ M) + (1 - β)·KL(π ‖ M), M = β·π_ref + (1 - β)·π.

    Columns are not shifted: entry t is about the token *after* tokens[:, t]. A logit of
    -inf is a token of probability 0, with 0·log 0 = 0.

    Args:
      logits, ref_logits: floats[..., V] of any precision; cast to float32.
      beta: β, share of the reference in the mixture, between 0 and 1.
      temperature: dimensionless, of both models.

    Returns:
      f32[...], nats per logit position, up to rounding never negative. The gradient
      reaches `logits`, `beta` and `temperature`.

    Source: Agarwal et al. 2023, arXiv:2306.13649, eq. 1.

    >>> logits = jnp.log(jnp.array([0.5, 0.5]))
    >>> ref_logits = jnp.log(jnp.array([0.9, 0.1]))
    >>> print(jensen_shannon(logits, ref_logits, beta=0.5))
    0.102
    >>> never = jnp.array([-jnp.inf, 0.0])
    >>> print(jensen_shannon(never, never[::-1], beta=0.5))  # log 2, the largest
    0.693
    """
    checks.same_shape(logits=logits, ref_logits=ref_logits)
    checks.floating(logits=logits, ref_logits=ref_logits)
    checks.positive(temperature=temperature)
    ref_logits = jax.lax.stop_gradient(ref_logits)
    logprobs = log_softmax(logits, temperature=temperature)
    ref_logprobs = log_softmax(ref_logits, temperature=temperature)
    possible, ref_possible = logprobs > -jnp.inf, ref_logprobs > -jnp.inf
    both = possible & ref_possible
    log_ratio = jnp.where(both, ref_logprobs, 0.0) - jnp.where(both, logprobs, 0.0)
    one_sided = ref_possible.astype(jnp.float32) - possible.astype(jnp.float32)
    log_ratio += LARGE * one_sided
    of_policy, of_reference = mixture_log_ratios(log_ratio, beta=beta)
    of_tokens = beta * jnp.exp(ref_logprobs) * of_reference
    of_tokens += (1 - beta) * jnp.exp(logprobs) * of_policy
    return jnp.sum(of_tokens, axis=-1)
