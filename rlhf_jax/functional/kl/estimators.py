"""KL between the policy and the reference: per-token estimators and the exact value.

Under samples of the policy π, with x = logprobs - ref_logprobs (nats):

    k1 = x               unbiased for KL(π ‖ π_ref), may be negative
    k2 = x²/2            biased, never negative
    k3 = exp(-x) - 1 + x unbiased, never negative
    exact                Σ_v π log(π/π_ref) at one position: no sampling noise
    top_k                the same over the policy's k likeliest words and one bucket of
                         all others: at most the exact value

These are values. As a *loss* they act otherwise (k1 in the loss regularises nothing);
`penalty` puts estimators into reward and loss and names their gradients. None takes
a mask: reduce the result with `masked`.

`exact` and `top_k` read logits and shift nothing. `exact_from_hidden` and
`top_k_from_hidden` never hold the logits of all words, and this is one of the places
where columns shift by one, as in `logprobs`:

    column                   0    1    2    3
    tokens                   a    b    c    d
    exact(...)[:, t]         of b of c of d of ·      the distribution that gives ...
    exact_from_hidden[:, t]  0    of b of c of d
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks
from rlhf_jax.functional.kl import chunks

Array = jax.Array
Direction = Literal["reverse", "forward"]
"""reverse is KL(π ‖ π_ref), forward KL(π_ref ‖ π)."""


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
    _check_logits(logits, ref_logits, temperature)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    ref_logprobs = jax.nn.log_softmax(ref_logits.astype(jnp.float32) / temperature)
    return chunks.of_buckets(logprobs, ref_logprobs)


def top_k(
    logits: Array,
    ref_logits: Array,
    *,
    k: int,
    temperature: float = 1.0,
    direction: Direction = "reverse",
) -> Array:
    """KL of what is left when all but the policy's k likeliest words are one outcome.

    Σ_{v in K} P_v log(P_v/Q_v) + P_rest log(P_rest/Q_rest), K the k likeliest words of
    the policy P in either direction. It is never above `exact` and equals it at k = V.
    Nothing is shifted. No gradient flows through the choice of the words.

    Args:
      logits, ref_logits: floats[..., V] of any precision; taken to float32.
      k: words that stand alone, 1 to V.
      temperature: divides both, dimensionless.
      direction: "reverse" is KL(π ‖ π_ref), "forward" KL(π_ref ‖ π).

    Returns:
      f32[...], nats per logit position, up to rounding never negative.

    Raises:
      ValueError: shapes differ, temperature is not positive or k is out of range.
      TypeError: not floats.

    Source: the log-sum inequality, Cover and Thomas, theorem 2.7.1.
    """
    _check_logits(logits, ref_logits, temperature)
    check_k(k, logits.shape[-1])
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    ref_logprobs = jax.nn.log_softmax(ref_logits.astype(jnp.float32) / temperature)
    if k < logits.shape[-1]:
        _, ids = jax.lax.top_k(jax.lax.stop_gradient(logprobs), k)
        logprobs, ref_logprobs = _bucketed(logprobs, ids), _bucketed(ref_logprobs, ids)
    if direction == "forward":
        logprobs, ref_logprobs = ref_logprobs, logprobs
    return chunks.of_buckets(logprobs, ref_logprobs)


def _bucketed(logprobs: Array, ids: Array) -> Array:
    """f32[..., k + 1]: the words `ids` i32[..., k] one by one, then all others."""
    alone = jnp.take_along_axis(logprobs, ids, axis=-1)
    # A word that cannot come stays out of the sum: its gradient would be 0·inf.
    other = ~chunks.marked(ids, size=logprobs.shape[-1]) & (logprobs > -jnp.inf)
    some = jnp.any(other, axis=-1, keepdims=True)
    safe = jnp.where(other, logprobs, jnp.where(some, -jnp.inf, 0.0))
    rest = jax.nn.logsumexp(safe, axis=-1, keepdims=True)
    return jnp.concatenate([alone, jnp.where(some, rest, -jnp.inf)], axis=-1)


def _check_logits(logits: Array, ref_logits: Array, temperature: float) -> None:
    checks.same_shape(logits=logits, ref_logits=ref_logits)
    checks.floating(logits=logits, ref_logits=ref_logits)
    checks.positive(temperature=temperature)


def check_k(k: int, vocab_size: int) -> None:
    """Raises InputError unless k is a number of tokens of the vocabulary."""
    if not 1 <= k <= vocab_size:
        raise checks.InputError(
            f"k: expected 1 to {vocab_size} (the words of the vocabulary), got {k}; "
            "choose fewer words, or the exact KL"
        )
