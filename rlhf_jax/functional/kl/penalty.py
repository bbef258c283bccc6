"""The KL penalty: which estimator, where it acts, and what its gradient is.

With x_t = logprobs_t - ref_logprobs_t (reverse) or ref_logprobs_t - logprobs_t
(forward), an estimate k(x) of `kl.estimators` acts in two places:

    in the reward  `token_rewards` adds -β·k(x_t) to the reward of token t. The policy
                   gradient multiplies it by ∇log π; k is not differentiated.
    in the loss    the loss is β Σ_t weights_t·k(x_t), which is differentiated.

The place and the estimator determine the expected gradient of the penalty.
`Penalty.gradient` names it, as `gradients` defines it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.kl import estimators
from rlhf_jax.functional.kl.choices import IN_LOSS, IN_REWARD, UNBIASED_K3, Penalty
from rlhf_jax.functional.kl.weighted_estimates import estimates

__all__ = [
    "IN_LOSS",
    "IN_REWARD",
    "UNBIASED_K3",
    "Penalty",
    "kl_loss",
    "reward_kl",
]

Array = jax.Array
Stats = masked.Stats

_NEVER = -1e4  # nats


def reward_kl(
    *,
    penalty: Penalty,
    logprobs: Float32[Array, "B S"],
    ref_logprobs: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    exact: Float32[Array, "B S"] | None = None,
) -> tuple[Float32[Array, "B S"], Stats]:
    """The KL per token that `token_rewards` multiplies by -β.

    Args:
      penalty: which estimate; placement and grad_estimator are not read.
      logprobs: f32[B, S], nats, of the policy that sampled; column t is about
        tokens[:, t]. Here and in `ref_logprobs` -inf counts as -10000, so that a KL
        stays finite.
      ref_logprobs: f32[B, S], nats, of the reference.
      exact: f32[B, S], nats, of `kl.exact_from_hidden` in the penalty's direction;
        required where value_estimator is exact.

    Returns:
      f32[B, S], nats, 0 outside the mask, without gradient, and {name: (sum, weight)}.
      With clip: `penalty/clipfrac`, the share of estimates that were clipped. With k3
      or weights: `penalty/overflowfrac`, the share capped to stay within float32.

    Raises:
      InputError: the exact KL is required and None.

    >>> logprobs = jnp.array([[0.0, -1.0, -2.0]])
    >>> ref_logprobs = jnp.array([[0.0, -3.0, -1.5]])
    >>> arrays = {"logprobs": logprobs, "ref_logprobs": ref_logprobs}
    >>> arrays |= {"mask": jnp.array([[False, True, True]])}
    >>> print(reward_kl(penalty=Penalty(), **arrays)[0])
    [[ 0.   2.  -0.5]]
    >>> print(reward_kl(penalty=Penalty(per="response"), **arrays)[0])
    [[0.  0.  1.5]]
    >>> kl, stats = reward_kl(penalty=Penalty(clip=1.0), **arrays)
    >>> print(kl, masked.mean_stats(stats)["penalty/clipfrac"])
    [[ 0.   1.  -0.5]] 0.5
    """
    _check(mask, exact, logprobs=logprobs, ref_logprobs=ref_logprobs)
    ref_logprobs = _mixed(penalty, ref_logprobs, logprobs)
    log_ratio = _log_ratio(penalty.direction, logprobs, ref_logprobs)
    # The samples are the policy's own: only a forward KL has weights here, π_ref/π.
    weighted = penalty.direction == "forward" and penalty.importance_weights is not None
    weighted_kl = estimates(
        penalty,
        log_ratio=log_ratio,
        log_weights=log_ratio if weighted else None,
        mask=mask,
        exact=exact,
        estimator=penalty.value_estimator,
    )
    stats: Stats = (
        {} if penalty.clip is None else {"penalty/clipfrac": weighted_kl.clipfrac}
    )
    if penalty.value_estimator == "k3" or weighted:
        stats["penalty/overflowfrac"] = weighted_kl.overflowfrac
    # A reward is data: what is learned of it comes from ∇log π, not from ∇k.
    return jax.lax.stop_gradient((weighted_kl.kl * _share(penalty, mask), stats))


def kl_loss(
    *,
    penalty: Penalty,
    logprobs: Float32[Array, "B S"],
    old_logprobs: Float32[Array, "B S"],
    ref_logprobs: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    weights: Float32[Array, "B S"],
    exact: Float32[Array, "B S"] | None = None,
) -> tuple[Float32[Array, ""], Stats]:
    """Σ weights·kl with kl = w·(g + stop_gradient(v - g)); the caller multiplies by β.

    v is the value estimate, g the gradient estimate and w the importance weight
    (reverse π/π_old, forward π_ref/π_old), which is not differentiated.

    Args:
      penalty: which estimates; placement is not read.
      logprobs: f32[B, S], nats, of the policy now; column t is about tokens[:, t]. In
        all log-probs -inf counts as -10000, and has no gradient.
      old_logprobs: f32[B, S], nats, of the policy that sampled.
      ref_logprobs: f32[B, S], nats, of the reference.
      weights: f32[B, S], dimensionless, of `losses.token_weights`. Those of a whole
        minibatch sum to 1, so the losses of its micro-batches add up. An estimate of a
        whole response has the weight of the last token.
      exact: f32[B, S], nats, of `kl.exact_from_hidden` in the penalty's direction, with
        its gradient; required where an estimator is exact.

    Returns:
      f32[] loss, nats, and {name: (sum, weight)}. The gradient reaches `logprobs` and
      `exact`; it is 0 for estimates that were clipped. `loss/kl`: the values (weighted
      by w, clipped, not divided by a length), nats per token. With clip:
      `loss/kl_clipfrac`, the share of estimates that were clipped. With k3 or weights:
      `loss/kl_overflowfrac`, the share capped to stay within float32, value and slope:
      k3 at e^88.72, others at the largest weight for which the product is finite.

    Raises:
      InputError: the exact KL is required and None.

    Source: Schulman 2020, joschu.net/blog/kl-approx; on the gradients, Tang and Munos
    2025, arXiv:2506.09477.

    >>> mask = jnp.array([[False, True, True]])
    >>> arrays = {"ref_logprobs": jnp.array([[0.0, -3.0, -1.5]]), "mask": mask}
    >>> arrays |= {"weights": mask / 2, "old_logprobs": jnp.array([[0.0, -1.0, -2.0]])}
    >>> def loss(logprobs, penalty):
    ...     return kl_loss(penalty=penalty, logprobs=logprobs, **arrays)[0]
    >>> logprobs = jnp.array([[0.0, -1.0, -2.0]])  # x is 2 and -0.5
    >>> print(loss(logprobs, IN_LOSS))  # the value is k1: (2 - 0.5) / 2
    0.75
    >>> print(jax.grad(loss)(logprobs, IN_LOSS))  # the gradient is that of k2: x / 2
    [[ 0.    1.   -0.25]]
    """
    floats = {"logprobs": logprobs, "old_logprobs": old_logprobs}
    floats |= {"ref_logprobs": ref_logprobs, "weights": weights}
    _check(mask, exact, **floats)
    ref_logprobs = _mixed(penalty, ref_logprobs, old_logprobs)
    log_weights = None
    if penalty.importance_weights is not None:
        target = logprobs if penalty.direction == "reverse" else ref_logprobs
        log_weights = _possible(target) - _possible(old_logprobs)
    weighted_kl = estimates(
        penalty,
        log_ratio=_log_ratio(penalty.direction, logprobs, ref_logprobs),
        log_weights=log_weights,
        mask=mask,
        exact=exact,
        estimator=penalty.in_gradient,
    )
    # They say what a token counts for; nothing is learned through them.
    weights = jax.lax.stop_gradient(jnp.where(mask, weights, 0.0))
    loss = jnp.sum(weights * weighted_kl.kl * _share(penalty, mask))
    num_tokens = jnp.sum(mask, dtype=jnp.float32)
    stats: Stats = {"loss/kl": (jnp.sum(weighted_kl.kl), num_tokens)}
    if penalty.clip is not None:
        stats["loss/kl_clipfrac"] = weighted_kl.clipfrac
    if "k3" in penalty.estimators_used or log_weights is not None:
        stats["loss/kl_overflowfrac"] = weighted_kl.overflowfrac
    return loss, jax.lax.stop_gradient(stats)


def _mixed(penalty: Penalty, ref_logprobs: Array, old_logprobs: Array) -> Array:
    """Log-probs of what the KL is to: α·log π_ref + (1 - α)·log π_old, or log π_ref.

    Without a normaliser, x is α·log(π/π_ref) + (1 - α)·log(π/π_old), and its mean the
    sum of two KLs, to the reference and to the policy of the iteration. On the samples
    of that policy, before it moves, the second has no gradient.

    Source: He et al. 2026, arXiv:2602.11523 (DAR): the reference alone, not the
    regression that its authors train by.
    """
    share = penalty.reference_share
    if share is None:
        return ref_logprobs
    return share * _possible(ref_logprobs) + (1 - share) * _possible(old_logprobs)


def _log_ratio(
    direction: estimators.Direction, logprobs: Array, ref_logprobs: Array
) -> Array:
    """x with E[x] the KL of this direction, under samples of its first distribution."""
    policy = _possible(logprobs)
    # Whatever computed it: a KL is not to be lowered by moving the reference.
    reference = jax.lax.stop_gradient(_possible(ref_logprobs))
    return policy - reference if direction == "reverse" else reference - policy


def _possible(logprobs: Array) -> Array:
    """Log-probs, those of a token that a model never draws finite: e^-10000 is 0 too.

    At -inf an estimate and its weight would be 0·inf; there is no gradient at one.
    """
    return jnp.where(logprobs == -jnp.inf, _NEVER, logprobs)


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
    checks.masked_floats(mask, **floats)
