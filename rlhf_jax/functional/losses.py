"""Losses: (loss f32[], stats), the gradient reaching only the arguments it names.

A loss is a sum over the mask divided by a count. Given the count of the whole minibatch
(`num_tokens`, `num_responses`, `num_pairs`), the losses of its micro-batches *add up*
to its loss, and so do their gradients. Stats are (sum, weight) pairs over the
micro-batch alone and add up too (`masked.add_stats`); no gradient flows into them.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, masked, ratios
from rlhf_jax.functional.aggregation import Aggregation, aggregate, token_weights
from rlhf_jax.functional.preference_losses import dpo_loss, pairwise_loss
from rlhf_jax.functional.value_losses import explained_variance, value_loss

__all__ = [
    "Aggregation",
    "dpo_loss",
    "entropy_bonus",
    "explained_variance",
    "language_model_loss",
    "pairwise_loss",
    "policy_loss",
    "token_weights",
    "value_loss",
]

Array = jax.Array
Stats = masked.Stats


def policy_loss(
    *,
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token_mean",
    loss_scale_factor: float | None = None,
    num_tokens: Array | None = None,
    num_responses: Array | None = None,
) -> tuple[Array, Stats]:
    """PPO surrogate, the mean over tokens or responses of max(-ρA, -clip(ρ)A).

    ρ = exp(logprobs - old_logprobs), clip(ρ) = clip(ρ, 1 - ε, 1 + ε_high). The dual
    clip bounds the loss of a bad token that has become likely: it is at most -cA where
    A < 0, so that such a token stops pulling once ρ > c. Without it -ρA may leave
    float32: it is then held at e^88.72, value and slope (`ratios.held_exp`).

    Args:
      logprobs, old_logprobs: f32[B, S], nats; column t is about tokens[:, t].
      advantages: f32[B, S], reward units.
      mask: bool[B, S], response tokens, EOS included.
      clip_range: ε, dimensionless.
      clip_range_high: ε_high, dimensionless; None is ε. DAPO: 0.28 with an ε of 0.2.
      dual_clip: c, a ratio above 1; None is off. 3 in the source.
      aggregation, loss_scale_factor, num_tokens, num_responses: as `token_weights`.

    Returns:
      f32[] loss and {name: (sum, weight)}. The gradient reaches `logprobs` only.
      `loss/policy`: the loss, by `aggregation`. Means over tokens, whatever the loss
      is a mean of: `policy/approxkl`: ½(log ρ)², nats per token, k2 of the update (not
      of the reference). `policy/clipfrac`: share of tokens where the clipped term is
      the larger one. `policy/dual_clipfrac`, with a dual clip: share of tokens that it
      bounds. `policy/overflowfrac`: share of tokens whose -ρA is held so.
      `policy/ratio_mean`, `policy/ratio_max`: of ρ.

    Raises:
      ValueError: shapes differ, a range is not positive, dual_clip is not above 1, or
      as `token_weights`. TypeError: floats are not f32 or mask is not bool.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; clip-higher is Yu et al.
    2025, arXiv:2503.14476, section 3.1; the dual clip is Ye et al. 2019,
    arXiv:1912.09729.
    """
    _check(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    checks.positive(clip_range=clip_range)
    if clip_range_high is None:
        clip_range_high = clip_range
    checks.positive(clip_range_high=clip_range_high)
    advantages = jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0))
    log_ratio = jnp.where(mask, logprobs - jax.lax.stop_gradient(old_logprobs), 0.0)
    moved = jax.lax.stop_gradient(log_ratio)
    true_ratio = jnp.exp(moved)
    shares = {}
    if dual_clip is not None:
        _check_dual_clip(dual_clip)
        bound = math.log(dual_clip)
        ruled = (advantages < 0) & (log_ratio > bound)
        # Before exp, so that a ratio of inf, the very case, has no NaN for a gradient.
        log_ratio = jnp.where(ruled, bound, log_ratio)
        shares["policy/dual_clipfrac"] = ruled.astype(jnp.float32)
    # Nor where clipping has ended the pull of a good token, or where A is 0.
    ended = jnp.log1p(clip_range_high) + 1.0
    log_ratio = jnp.where((advantages >= 0) & (log_ratio > ended), ended, log_ratio)
    # A bad token's product as one exponential: it may be finite where the ratio is not.
    product = log_ratio + jnp.log(jnp.where(advantages < 0, -advantages, 1.0))
    large = (advantages < 0) & (log_ratio > 0)
    large &= jnp.maximum(log_ratio, product) > ratios.LARGE
    ratio = jnp.exp(jnp.where(large, 0.0, log_ratio))
    unclipped = -ratio * advantages
    clipped = -jnp.clip(ratio, 1.0 - clip_range, 1.0 + clip_range_high) * advantages
    held = ratios.held_exp(jnp.where(large, product, 0.0))
    surrogate = jnp.where(large, held, jnp.maximum(unclipped, clipped))
    beyond = large & (product > ratios.LARGEST)
    shares["policy/overflowfrac"] = beyond.astype(jnp.float32)
    shares["policy/clipfrac"] = (clipped > unclipped).astype(jnp.float32)
    loss, stats = aggregate(
        "loss/policy",
        surrogate,
        mask,
        aggregation=aggregation,
        loss_scale_factor=loss_scale_factor,
        num_tokens=num_tokens,
        num_responses=num_responses,
    )
    stats |= masked.sum_stats(
        {
            "policy/approxkl": 0.5 * jnp.square(moved),
            "policy/ratio_mean": true_ratio,
            **shares,
        },
        mask=mask,
    )
    largest = jnp.max(true_ratio, where=mask, initial=0.0)
    stats["policy/ratio_max"] = (largest, None)
    return loss, stats


def entropy_bonus(
    *,
    entropy: Array,
    mask: Array,
    aggregation: Aggregation = "token_mean",
    loss_scale_factor: float | None = None,
    num_tokens: Array | None = None,
    num_responses: Array | None = None,
) -> tuple[Array, Stats]:
    """Minus the mean entropy: times a coefficient, a loss that keeps a policy broad.

    Args:
      entropy: f32[B, S], of the distribution tokens[:, t] was drawn from, nats.
      mask: bool[B, S], response tokens, EOS included.
      aggregation, loss_scale_factor, num_tokens, num_responses: as `token_weights`.

    Returns:
      f32[] loss, nats per token, and {name: (sum, weight)}. The gradient reaches
      `entropy`. `loss/entropy`: the loss, by `aggregation`, before any coefficient.

    Raises:
      ValueError: shapes differ, or as `token_weights`. TypeError: entropy is not f32
      or mask is not bool.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9.
    """
    _check(mask, entropy=entropy)
    return aggregate(
        "loss/entropy",
        -entropy,
        mask,
        aggregation=aggregation,
        loss_scale_factor=loss_scale_factor,
        num_tokens=num_tokens,
        num_responses=num_responses,
    )


def language_model_loss(
    *, logprobs: Array, mask: Array, num_tokens: Array | None = None
) -> tuple[Array, Stats]:
    """Cross-entropy, -(1/N) Σ m·logprobs.

    Args:
      logprobs: f32[B, S], nats; column t is about tokens[:, t].
      mask: bool[B, S], tokens that are trained on.
      num_tokens: f32[], N of the whole minibatch when this is a micro-batch; None
        counts mask.

    Returns:
      f32[] loss, nats per token, and {name: (sum, weight)}. The gradient reaches
      `logprobs`. `loss/language_model`: the loss.

    Raises:
      ValueError: shapes differ. TypeError: logprobs is not f32 or mask is not bool.
    """
    _check(mask, logprobs=logprobs)
    losses = -logprobs
    stats = masked.sum_stats({"loss/language_model": losses}, mask=mask)
    return _per_token(losses, mask, num_tokens), stats


def _check(mask: Array, **floats: Array) -> None:
    checks.same_shape(**floats, mask=mask)
    checks.float32(**floats)
    checks.boolean(mask=mask)


def _check_dual_clip(dual_clip: float) -> None:
    if not 1 < dual_clip < math.inf:
        raise checks.InputError(
            f"dual_clip: expected a finite ratio above 1, got {dual_clip}; choose 3 or "
            f"10, or leave it out"
        )


def _per_token(x: Array, mask: Array, count: Array | None) -> Array:
    """Σ m·x / count, the count of the mask where None."""
    if count is None:
        return masked.masked_mean(x, mask=mask)
    checks.shape((), count=count)
    count = jnp.asarray(count, jnp.float32)
    return masked.masked_sum(x, mask=mask) / jnp.maximum(count, 1.0)
