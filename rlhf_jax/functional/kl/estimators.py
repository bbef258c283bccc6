"""KL between the policy and the reference: per-token estimators and the exact value.

Under samples of the policy π, with x = logprobs - ref_logprobs (nats):

    k1 = x               unbiased for KL(π ‖ π_ref), may be negative
    k2 = x²/2            biased, never negative
    k3 = exp(-x) - 1 + x unbiased, never negative
    exact                Σ_v π log(π/π_ref) at one position: no sampling noise
    top_k                the same over the policy's k most likely tokens and one bucket
                         of all others: at most the exact value

These are values. The gradient of an estimate in a *loss* is in general not that of the
KL: the expected gradient of k1 is zero. `penalty` places estimators in the reward and
in the loss, and `gradients` names their gradients. No function here takes a mask:
reduce the result with `masked`.

The reference is the second argument and has no gradient, as everywhere in this package.
So do not exchange the two models for a forward KL: that would train nothing. `exact`
and `top_k` have `direction="forward"` for it.

`exact` and `top_k` read logits and do not shift columns. `hidden_states` computes the
same from hidden states, with columns shifted by one as in `logprobs`:

    column                   0    1    2    3
    tokens                   a    b    c    d
    exact(...)[:, t]         of b of c of d of ·      the distribution that gives ...
    exact_from_hidden[:, t]  0    of b of c of d
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from rlhf_jax.functional import checks
from rlhf_jax.functional.logprobs import log_softmax

Array = jax.Array
Direction = Literal["reverse", "forward"]
"""reverse is KL(π ‖ π_ref), forward KL(π_ref ‖ π)."""
Scalar = checks.Scalar


def k1(
    logprobs: Float32[Array, "*shape"], ref_logprobs: Float32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """x = logprobs - ref_logprobs: unbiased for KL(π ‖ π_ref), of either sign.

    Args:
      logprobs, ref_logprobs: f32[...], nats, of tokens that the policy sampled. The
        gradient reaches `logprobs` only.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.

    >>> logprobs, ref_logprobs = jnp.log(jnp.array([[0.5, 0.2], [0.25, 0.4]]))
    >>> print(k1(logprobs, ref_logprobs))  # log 2, -log 2
    [ 0.693 -0.693]
    >>> print(k1(logprobs, logprobs))
    [0. 0.]
    """
    checks.same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    checks.float32(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return jnp.subtract(logprobs, jax.lax.stop_gradient(ref_logprobs))


def k2(
    logprobs: Float32[Array, "*shape"], ref_logprobs: Float32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """x²/2 with x = logprobs - ref_logprobs: biased, never negative.

    Arguments and source are those of `k1`.

    >>> logprobs, ref_logprobs = jnp.log(jnp.array([[0.5, 0.2], [0.25, 0.4]]))
    >>> print(k2(logprobs, ref_logprobs))  # (log 2)²/2 twice
    [0.24 0.24]
    >>> print(k2(logprobs, logprobs))
    [0. 0.]
    """
    return 0.5 * jnp.square(k1(logprobs, ref_logprobs))


def k3(
    logprobs: Float32[Array, "*shape"], ref_logprobs: Float32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """exp(-x) - 1 + x with x = logprobs - ref_logprobs: unbiased, never negative.

    Arguments and source are those of `k1`.

    >>> logprobs, ref_logprobs = jnp.log(jnp.array([[0.5, 0.2], [0.25, 0.4]]))
    >>> print(k3(logprobs, ref_logprobs))  # 1/2 - 1 + log 2, 2 - 1 - log 2
    [0.193 0.307]
    >>> print(k3(logprobs, logprobs))
    [0. 0.]
    """
    x = k1(logprobs, ref_logprobs)
    return jnp.expm1(-x) + x


def exact(
    logits: Float[Array, "*shape V"],
    ref_logits: Float[Array, "*shape V"],
    *,
    temperature: Scalar = 1.0,
    direction: Direction = "reverse",
) -> Float32[Array, "*shape"]:
    """KL(π ‖ π_ref) = Σ_v π(v) log(π(v) / π_ref(v)), π = softmax(logits / temperature).

    Columns are not shifted: entry t is about the token *after* tokens[:, t]. A logit of
    -inf is a token of probability 0, with 0·log 0 = 0. The KL is infinite where the
    policy can sample a token that has probability 0 under the reference.

    Args:
      logits, ref_logits: floats[..., V] of any precision; cast to float32.
      temperature: dimensionless, of both models.
      direction: "forward" is KL(π_ref ‖ π) = Σ_v π_ref(v) log(π_ref(v) / π(v)).

    Returns:
      f32[...], nats per logit position, up to rounding never negative. The gradient
      reaches `logits` and `temperature`.

    Source: Cover and Thomas, Elements of Information Theory, eq. 2.26.

    >>> logits = jnp.log(jnp.array([0.5, 0.25, 0.25]))
    >>> ref_logits = jnp.log(jnp.array([0.25, 0.5, 0.25]))
    >>> print(exact(logits, ref_logits))  # log(2)/2 - log(2)/4
    0.173
    >>> print(exact(logits, ref_logits, temperature=0.5))
    0.693
    """
    pair = _both_logprobs(logits, ref_logits, temperature, direction)
    return _of_buckets(*pair, direction)


def top_k(
    logits: Float[Array, "*shape V"],
    ref_logits: Float[Array, "*shape V"],
    *,
    k: int,
    temperature: Scalar = 1.0,
    direction: Direction = "reverse",
) -> Float32[Array, "*shape"]:
    """KL over the policy's k most likely tokens and one bucket of all others.

    Σ_{v in K} P_v log(P_v/Q_v) + P_rest log(P_rest/Q_rest), with K the k most likely
    tokens of the policy in either direction. It is at most `exact`, and equal to it at
    k = V. Columns are not shifted. No gradient flows through the choice of the tokens.

    Args:
      logits, ref_logits: floats[..., V] of any precision; cast to float32.
      k: tokens outside the bucket, 1 to V.
      temperature, direction: as in `exact`.

    Returns:
      f32[...], nats per logit position, up to rounding never negative. The gradient
      reaches `logits` and `temperature`.

    Source: the log-sum inequality, Cover and Thomas, theorem 2.7.1.

    >>> logits = jnp.log(jnp.array([0.5, 0.25, 0.25]))
    >>> ref_logits = jnp.log(jnp.array([0.25, 0.5, 0.25]))
    >>> print(top_k(logits, ref_logits, k=1))  # of [1/2, 1/2] and [1/4, 3/4]
    0.144
    >>> print(top_k(logits, ref_logits, k=1, direction="forward"))
    0.131
    >>> print(top_k(logits, ref_logits, k=3))  # all tokens: the exact KL
    0.173
    """
    logprobs, ref_logprobs = _both_logprobs(logits, ref_logits, temperature, direction)
    checks.within(
        least=1,
        most=logits.shape[-1],
        advice="choose fewer tokens of the vocabulary, or the exact KL",
        k=k,
    )
    if k < logits.shape[-1]:
        _, ids = jax.lax.top_k(jax.lax.stop_gradient(logprobs), k)
        logprobs, ref_logprobs = _bucketed(logprobs, ids), _bucketed(ref_logprobs, ids)
    return _of_buckets(logprobs, ref_logprobs, direction)


def _bucketed(
    logprobs: Float32[Array, "*shape V"], ids: Int32[Array, "*shape k"]
) -> Float32[Array, "*shape k+1"]:
    """The log-probs of the tokens `ids`, then the log-prob of all others together."""
    from rlhf_jax.functional.kl import passes  # which only `top_k` needs

    alone = jnp.take_along_axis(logprobs, ids, axis=-1)
    # Tokens of probability 0 are left out of the sum: their gradient would be 0·inf.
    other = ~passes.marked(ids, size=logprobs.shape[-1]) & (logprobs > -jnp.inf)
    some = jnp.any(other, axis=-1, keepdims=True)
    safe = jnp.where(other, logprobs, jnp.where(some, -jnp.inf, 0.0))
    rest = jax.nn.logsumexp(safe, axis=-1, keepdims=True)
    return jnp.concatenate([alone, jnp.where(some, rest, -jnp.inf)], axis=-1)


def _both_logprobs(
    logits: Array, ref_logits: Array, temperature: Scalar, direction: Direction
) -> tuple[Array, Array]:
    """Log-softmax of both models in float32; the reference's logits are stopped."""
    checks.same_shape(logits=logits, ref_logits=ref_logits)
    checks.floating(logits=logits, ref_logits=ref_logits)
    checks.positive(temperature=temperature)
    checks.one_of(direction=direction, among=get_args(Direction))
    ref_logits = jax.lax.stop_gradient(ref_logits)
    logprobs = log_softmax(logits, temperature=temperature)
    return logprobs, log_softmax(ref_logits, temperature=temperature)


def _of_buckets(logprobs: Array, ref_logprobs: Array, direction: Direction) -> Array:
    """The KL between distributions over K outcomes, f32[..., K], with 0·log 0 = 0."""
    if direction == "forward":
        logprobs, ref_logprobs = ref_logprobs, logprobs
    possible = logprobs > -jnp.inf
    log_ratio = jnp.where(possible, logprobs, 0.0) - jnp.where(
        possible, ref_logprobs, 0.0
    )
    return jnp.sum(jnp.exp(logprobs) * log_ratio, axis=-1)
