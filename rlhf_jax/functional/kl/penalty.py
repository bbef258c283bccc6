"""The KL penalty: which estimator, where it acts, and what its gradient is.

With x_t = logprobs_t - ref_logprobs_t (reverse) or ref_logprobs_t - logprobs_t
(forward), an estimate k(x) from `kl` acts in two places:

    in the reward  token_rewards takes -β·k(x_t): the policy gradient multiplies it by
                   ∇log π, and nothing is differentiated through k
    in the loss    the loss gets β Σ_t weights_t·k(x_t), which is differentiated

Which of the two, and which estimate, decides what the penalty does to the policy:
`Penalty.gradient` says it in the words of `gradients`, and `Penalty.warning` speaks
up where it is not what any KL would do. Where responses differ in length the names are
those of aggregation "constant": the means divide by lengths that the policy chooses.

    per        column    0   1   2   3   4      a response of three tokens
    token      kl        0  k1  k2  k3   0      k(x_t), an estimate of each
    length     kl        0  k1  k2  k3   0      each a third of that
    response   kl        0   0   0  k    0      k(x_1 + x_2 + x_3) of all
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.kl import estimators
from rlhf_jax.functional.kl.choices import IN_LOSS, IN_REWARD, Penalty
from rlhf_jax.functional.kl.weighted_estimates import estimates

__all__ = ["IN_LOSS", "IN_REWARD", "Penalty", "kl_loss", "reward_kl"]

Array = jax.Array
Stats = masked.Stats


def reward_kl(
    *,
    penalty: Penalty,
    logprobs: Array,
    ref_logprobs: Array,
    mask: Array,
    exact: Array | None = None,
) -> tuple[Array, Stats]:
    """The value that `token_rewards` multiplies by -β.

    Args:
      penalty: which estimate; its placement is not read here.
      logprobs: f32[B, S], nats, of the policy that sampled; column t is about
        tokens[:, t].
      ref_logprobs: f32[B, S], nats, of the reference.
      mask: bool[B, S], response tokens, EOS included.
      exact: f32[B, S], nats, of `kl.exact_from_hidden` in the penalty's direction;
        wanted where value_estimator is exact.

    Returns:
      f32[B, S], nats, 0 outside the mask, without gradient, and {name: (sum, weight)}:
      where clip is set `penalty/clipfrac`, the share of estimates that it cut; of k3
      or with weights `penalty/overflowfrac`, the share held where float32 ends.

    Raises:
      InputError: exact is wanted and not there. ValueError: shapes differ.
      TypeError: floats are not f32 or mask is not bool.
    """
    _check(mask, exact, logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = _log_ratio(penalty.direction, logprobs, ref_logprobs)
    # Of the policy that samples: only a forward KL has weights here, π_ref/π.
    weighted = penalty.direction == "forward" and penalty.importance_weights is not None
    found = estimates(
        penalty,
        log_ratio=log_ratio,
        log_weights=log_ratio if weighted else None,
        mask=mask,
        exact=exact,
        estimator=penalty.value_estimator,
    )
    stats: Stats = {} if penalty.clip is None else {"penalty/clipfrac": found.clipfrac}
    if penalty.value_estimator == "k3" or weighted:
        stats["penalty/overflowfrac"] = found.overflowfrac
    return jax.lax.stop_gradient((found.kl * _share(penalty, mask), stats))


def kl_loss(
    *,
    penalty: Penalty,
    logprobs: Array,
    old_logprobs: Array,
    ref_logprobs: Array,
    mask: Array,
    weights: Array,
    exact: Array | None = None,
) -> tuple[Array, Stats]:
    """Σ weights·kl with kl = w·(g + stop_gradient(v - g)); β is the caller's factor.

    v is the value estimator, g the gradient estimator and w the importance weight
    (reverse π/π_old, forward π_ref/π_old), which is not differentiated.

    Args:
      penalty: which estimates; its placement is not read here.
      logprobs: f32[B, S], nats, of the policy now; column t is about tokens[:, t].
      old_logprobs: f32[B, S], nats, of the policy that sampled.
      ref_logprobs: f32[B, S], nats, of the reference.
      mask: bool[B, S], response tokens, EOS included.
      weights: f32[B, S], dimensionless, of `losses.token_weights`; those of a whole
        minibatch sum to 1, so that its micro-batches add up. An estimate of a whole
        response takes the weight of the last token.
      exact: f32[B, S], nats, of `kl.exact_from_hidden` in the penalty's direction and
        with its gradient; wanted where an estimator is exact.

    Returns:
      f32[] loss, nats, and {name: (sum, weight)}. The gradient reaches `logprobs` and
      `exact`; none comes from an estimate that was clipped. `loss/kl`: the values
      (weighted by w, clipped, not divided by a length), nats per token. Where clip is
      set `loss/kl_clipfrac`: the share of estimates that it cut. Of k3 or with weights
      `loss/kl_overflowfrac`: the share held where float32 ends, value and slope: k3 at
      e^88.72, another at the largest weight with which its product is a float32.

    Raises:
      InputError: exact is wanted and not there. ValueError: shapes differ.
      TypeError: floats are not f32 or mask is not bool.

    Source: Schulman 2020, joschu.net/blog/kl-approx; Tang and Munos 2025,
    arXiv:2506.09477, on what their gradients are.
    """
    floats = {"logprobs": logprobs, "old_logprobs": old_logprobs}
    floats |= {"ref_logprobs": ref_logprobs, "weights": weights}
    _check(mask, exact, **floats)
    fixed, old_logprobs = jax.lax.stop_gradient((ref_logprobs, old_logprobs))
    log_weights = None
    if penalty.importance_weights is not None:
        target = logprobs if penalty.direction == "reverse" else fixed
        log_weights = estimators.k1(target, old_logprobs)
    found = estimates(
        penalty,
        log_ratio=_log_ratio(penalty.direction, logprobs, fixed),
        log_weights=log_weights,
        mask=mask,
        exact=exact,
        estimator=penalty.in_gradient,
    )
    weights = jax.lax.stop_gradient(jnp.where(mask, weights, 0.0))
    loss = jnp.sum(weights * found.kl * _share(penalty, mask))
    num_tokens = jnp.sum(mask, dtype=jnp.float32)
    stats: Stats = {"loss/kl": (jnp.sum(found.kl), num_tokens)}
    if penalty.clip is not None:
        stats["loss/kl_clipfrac"] = found.clipfrac
    if "k3" in penalty.estimators_used or log_weights is not None:
        stats["loss/kl_overflowfrac"] = found.overflowfrac
    return loss, jax.lax.stop_gradient(stats)


def _log_ratio(
    direction: estimators.Direction, logprobs: Array, ref_logprobs: Array
) -> Array:
    """x with E[x] the KL of this direction, under samples of its first distribution."""
    if direction == "reverse":
        return estimators.k1(logprobs, ref_logprobs)
    return estimators.k1(ref_logprobs, logprobs)


def _share(penalty: Penalty, mask: Array) -> Array:
    """f32[B, 1]: what an estimate is multiplied by, 1 or 1 / response length."""
    length = jnp.sum(mask, axis=1, dtype=jnp.float32, keepdims=True)
    if penalty.per != "length":
        return jnp.ones_like(length)
    return 1.0 / jnp.maximum(length, 1.0)


def _check(mask: Array, exact: Array | None, **floats: Array) -> None:
    checks.shape((None, None), mask=mask)
    if exact is not None:
        floats["exact"] = exact
    checks.same_shape(**floats, mask=mask)
    checks.float32(**floats)
    checks.boolean(mask=mask)
