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

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked, surrogates
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import estimators
from rlhf_jax.functional.kl.choices import IN_LOSS, IN_REWARD, UNBIASED_K3, Penalty
from rlhf_jax.functional.kl.gradients import Estimator

__all__ = [
    "IN_LOSS",
    "IN_REWARD",
    "UNBIASED_K3",
    "Penalty",
    "kl_loss",
    "reward_kl",
    "weighted_estimates",
    "with_sampled_tail",
]

Array = jax.Array
Stats = masked.Stats

_NEVER = -1e4  # nats


class Estimates(NamedTuple):
    """Estimates at their columns, finite in float32, and the shares capped."""

    kl: Float32[Array, "B S"]  # nats, 0 at columns without an estimate
    # (number of clipped estimates, number of estimates)
    clipfrac: tuple[Float32[Array, ""], Float32[Array, ""]]
    # (number of estimates capped to stay within float32, number of estimates)
    overflowfrac: tuple[Float32[Array, ""], Float32[Array, ""]]


def weighted_estimates(
    penalty: Penalty,
    *,
    log_ratio: Float32[Array, "B S"],
    log_weights: Float32[Array, "B S"] | None,
    mask: Bool[Array, "B S"],
    exact: Float32[Array, "B S"] | None,
    estimator: Estimator,
) -> Estimates:
    """w·(g + stop_gradient(v - g)): values v with the gradient of the estimates g.

    Args:
      penalty: its value_estimator gives v; per, importance_weights, tail and clip are
        read as well.
      log_ratio: f32[B, S], nats, x of the estimators at each token.
      log_weights: f32[B, S], nats, log w of each token; None is w = 1.
      exact: f32[B, S], nats; required where an estimator is exact.
      estimator: gives g.

    Returns:
      Estimates and shares. The gradient reaches `log_ratio` and `exact`; it is 0 where
      the estimate was clipped.

    Raises:
      InputError: an estimator is exact and `exact` is None.

    >>> arrays = {"log_ratio": jnp.array([[9.0, 2.0, -1.0]]), "log_weights": None}
    >>> arrays |= {"mask": jnp.array([[False, True, True]]), "exact": None}
    >>> print(weighted_estimates(Penalty(), estimator="k1", **arrays).kl)
    [[ 0.  2. -1.]]
    >>> print(weighted_estimates(Penalty(clip=1.0), estimator="k1", **arrays).kl)
    [[ 0.  1. -1.]]
    >>> print(weighted_estimates(Penalty(per="response"), estimator="k1", **arrays).kl)
    [[0. 0. 1.]]
    """
    cells = masked.last_true(mask) if penalty.per == "response" else mask
    x = _placed(penalty, log_ratio, mask, cells)
    if exact is not None:
        exact = _placed(penalty, exact, mask, cells)
    log_weights = _log_importance(penalty, log_weights, mask, cells)
    # Exact KL with a sampled tail contains the token weights already.
    of_exact = jnp.zeros_like(x) if penalty.weights_tail else log_weights

    def weighted(estimator: Estimator) -> Array:
        own = of_exact if estimator == "exact" else log_weights
        return _weighted(estimator, x, exact, own)

    value = weighted(penalty.value_estimator)
    unclipped = cells
    if penalty.clip is not None:
        unclipped = cells & (jnp.abs(value) <= penalty.clip)
        value = jnp.clip(value, -penalty.clip, penalty.clip)
        # Before the estimator: an infinite slope times 0 would be NaN.
        x = jnp.where(unclipped, x, 0.0)
        exact = None if exact is None else jnp.where(unclipped, exact, 0.0)
    slope = weighted(estimator)
    slope = jnp.where(unclipped, slope - jax.lax.stop_gradient(slope), 0.0)
    clipped = jnp.sum(cells & ~unclipped, dtype=jnp.float32)
    # Reported: a penalty at the bound of float32 no longer grows with the distance.
    capped = log_weights > _most(_estimate(estimator, x, exact))
    if "k3" in penalty.estimators_used:
        far = _far(x, log_weights)
        capped = jnp.where(far, log_weights - x > surrogates.LARGEST, capped)
    num_estimates = jnp.sum(cells, dtype=jnp.float32)
    return Estimates(
        # slope is 0 in value: the reported number is v, the gradient that of g.
        kl=jax.lax.stop_gradient(value) + slope,
        clipfrac=(clipped, num_estimates),
        overflowfrac=(jnp.sum(capped & unclipped, dtype=jnp.float32), num_estimates),
    )


def with_sampled_tail(
    head: Float32[Array, "B S"],
    inside: Bool[Array, "B S"],
    *,
    logprobs: Float32[Array, "B S"],
    ref_logprobs: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    log_weights: Float32[Array, "B S"] | None = None,
) -> Float32[Array, "B S"]:
    """Top-k KL with a sampled tail: head + 1[token not in K]·w·x, x = log(π/π_ref).

    The tail has the gradient w·x·∇log π. So for every k the value is unbiased for the
    KL at a prefix, and the gradient for Σ_v ∇π(v)·log(π(v)/π_ref(v)): the head covers
    the tokens of K, the samples all others.

    Args:
      head, inside: the results of `kl.head_from_hidden`, with the head's gradient.
      logprobs, ref_logprobs: f32[B, S], nats, of the sampled tokens; -inf counts as
        -10000.
      log_weights: f32[B, S], nats, log w of each token, π over its sampler; None is
        w = 1.

    Returns:
      f32[B, S], nats, 0 outside the mask. The gradient reaches `head` and `logprobs`.

    Source: Zhang and Ba 2026, arXiv:2602.04417, top-k KL. The authors' code
    differentiates both factors of the head's P_v log(P_v/Q_v), which adds
    Σ_{v in K} ∇P_v to the gradient of the KL. Here that term is left out: over all
    tokens it sums to 0.

    >>> arrays = {"logprobs": jnp.log(jnp.array([[0.5, 0.1]]))}
    >>> arrays |= {"ref_logprobs": jnp.log(jnp.array([[0.25, 0.2]]))}
    >>> arrays |= {"mask": jnp.ones((1, 2), bool)}
    >>> inside = jnp.array([[True, False]])
    >>> print(with_sampled_tail(jnp.array([[0.3, 0.4]]), inside, **arrays))
    [[ 0.3   -0.293]]
    >>> weights = {"log_weights": jnp.log(jnp.array([[2.0, 2.0]]))}
    >>> print(with_sampled_tail(jnp.array([[0.3, 0.4]]), inside, **arrays, **weights))
    [[ 0.3   -0.986]]
    """
    _check(mask, head, logprobs=logprobs, ref_logprobs=ref_logprobs)
    checks.same_shape(inside=inside, mask=mask)
    checks.boolean(inside=inside)
    sampled = mask & ~inside
    # Select before the product: NaN of a masked token times a cotangent of 0 is NaN.
    x = jnp.where(sampled, _log_ratio("reverse", logprobs, ref_logprobs), 0.0)
    if log_weights is None:
        log_weights = jnp.zeros_like(x)
    tail = jax.lax.stop_gradient(_times(x, jnp.where(sampled, log_weights, 0.0)))
    # 1 in value; its gradient is the score ∇log π of the sampled token.
    score = 1.0 + (x - jax.lax.stop_gradient(x))
    return jnp.where(mask, head, 0.0) + tail * score


def _weighted(
    estimator: Estimator, x: Array, exact: Array | None, log_weights: Array
) -> Array:
    """The estimate times exp(log_weights), which is not differentiated."""
    if estimator != "k3":
        return _times(_estimate(estimator, x, exact), log_weights)
    far = _far(x, log_weights)
    near = _times(_estimate("k3", jnp.where(far, 0.0, x), exact), log_weights)
    # For large -x, k3 is exp(-x) up to rounding. Its product with the weight is
    # computed as one exponential, which may be finite where the factors are not.
    return jnp.where(
        far, surrogates.capped_exp(jnp.where(far, log_weights - x, 0.0)), near
    )


def _times(estimate: Array, log_weights: Array) -> Array:
    return jnp.exp(jnp.minimum(log_weights, _most(estimate))) * estimate


def _most(estimate: Array) -> Array:
    """The largest log-weight, nats, for which value and slope are finite in float32."""
    size = jnp.maximum(2.0, 4.0 * jnp.abs(jax.lax.stop_gradient(estimate)))
    return surrogates.LARGEST - jnp.log(size)


def _far(x: Array, log_weights: Array) -> Array:
    """Where k3 or its product with the weight is close to the largest float32."""
    return (x < -20) & (jnp.maximum(log_weights, 0.0) - x > surrogates.LARGE)


def _estimate(estimator: Estimator, x: Array, exact: Array | None) -> Array:
    match estimator:
        case "k1":
            return x
        case "k2":
            return estimators.k2(x, jnp.zeros_like(x))
        case "k3":
            return estimators.k3(x, jnp.zeros_like(x))
        case "exact":
            if exact is None:
                raise InputError(
                    "exact: expected the exact KL f32[B, S] for the exact estimator, "
                    "got log-probs only; pass kl.exact_from_hidden of both models' "
                    "hidden states, or choose k1, k2 or k3"
                )
            return exact


def _log_importance(
    penalty: Penalty, log_weights: Array | None, mask: Array, cells: Array
) -> Array:
    """f32[B, S], nats, without gradient; 0 where there are no weights."""
    if log_weights is None:
        return jnp.zeros(mask.shape, jnp.float32)
    # The named gradients hold importance weights fixed.
    log_weights = jax.lax.stop_gradient(log_weights)
    if penalty.importance_weights == "prefix" and penalty.per != "response":
        # Log-weights add up along the response, to the ratio of the prefix.
        log_weights = jnp.cumsum(jnp.where(mask, log_weights, 0.0), axis=1)
    return _placed(penalty, log_weights, mask, cells)


def _placed(penalty: Penalty, x: Array, mask: Array, cells: Array) -> Array:
    """x at the columns of estimates; per response, its sum over the response."""
    if penalty.per == "response":
        x = masked.masked_sum(x, mask=mask, axis=1)[:, None]
    return jnp.where(cells, x, 0.0)


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
      penalty: the estimate; placement and grad_estimator are not read.
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
    weighted_kl = weighted_estimates(
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
    # A reward is data: the policy learns from it through ∇log π, not through ∇k.
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
      penalty: the estimates; placement is not read.
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
    weighted_kl = weighted_estimates(
        penalty,
        log_ratio=_log_ratio(penalty.direction, logprobs, ref_logprobs),
        log_weights=log_weights,
        mask=mask,
        exact=exact,
        estimator=penalty.in_gradient,
    )
    # Weights of an aggregation are constants.
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
    """Log-probs that the KL is taken to: α·log π_ref + (1 - α)·log π_old, or log π_ref.

    The mixture is not normalised, so x is α·log(π/π_ref) + (1 - α)·log(π/π_old), and
    its mean is a weighted sum of two KLs, to the reference and to the policy that
    sampled. Before the policy moves, the second has no gradient.

    Source: He et al. 2026, arXiv:2602.11523 (DAR): its mixed reference, without the
    regression that the authors train with (`dar_loss`).
    """
    share = penalty.reference_share
    if share is None:
        return ref_logprobs
    return share * _possible(ref_logprobs) + (1 - share) * _possible(old_logprobs)


def _log_ratio(
    direction: estimators.Direction, logprobs: Array, ref_logprobs: Array
) -> Array:
    """x, whose mean under samples of the direction's first distribution is the KL."""
    policy = _possible(logprobs)
    # Even if a model computed it: moving the reference must not lower a KL.
    reference = jax.lax.stop_gradient(_possible(ref_logprobs))
    return policy - reference if direction == "reverse" else reference - policy


def _possible(logprobs: Array) -> Array:
    """Replaces -inf by -10000 nats, whose exp is 0 too, and passes no gradient there.

    At -inf the product of an estimate and its weight would be 0·inf.
    """
    return jnp.where(logprobs == -jnp.inf, _NEVER, logprobs)


def _share(penalty: Penalty, mask: Array) -> Array:
    """f32[B, 1], the factor of an estimate: 1, or 1 / response length."""
    length = jnp.sum(mask, axis=1, dtype=jnp.float32, keepdims=True)
    if penalty.per != "length":
        return jnp.ones_like(length)
    return 1.0 / jnp.maximum(length, 1.0)


def _check(mask: Array, exact: Array | None, **floats: Array) -> None:
    checks.shape((None, None), mask=mask)
    if exact is not None:
        floats["exact"] = exact
    checks.masked_floats(mask, **floats)
