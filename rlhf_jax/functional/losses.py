"""Losses: each returns (loss f32[], stats) and states which arguments have a gradient.

A loss is a sum over the mask divided by a count. With the count of the whole minibatch
(`num_tokens`, `num_responses`, `num_pairs`), the losses of its micro-batches *add up*
to its loss, and so do their gradients. Stats are (sum, weight) pairs over the
micro-batch alone and add up too (`masked.add_stats`); no gradient flows into them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Shaped

from rlhf_jax.functional import checks, masked, surrogates
from rlhf_jax.functional.aggregation import (
    Aggregation,
    LossScale,
    Mean,
    aggregate,
    token_weights,
)
from rlhf_jax.functional.surrogates import (
    RatioLevel,
    cispo_loss,
    ratio_stats,
    sapo_loss,
)

if TYPE_CHECKING:
    from rlhf_jax.functional.preference_losses import (
        dpo_loss,
        kto_kl,
        kto_loss,
        orpo_loss,
        pairwise_loss,
        simpo_loss,
    )

__all__ = [
    "Aggregation",
    "LossScale",
    "RatioLevel",
    "cispo_loss",
    "dpo_loss",
    "entropy_bonus",
    "explained_variance",
    "kto_kl",
    "kto_loss",
    "language_model_loss",
    "orpo_loss",
    "pairwise_loss",
    "policy_loss",
    "sapo_loss",
    "simpo_loss",
    "token_weights",
    "value_loss",
]

Array = jax.Array
Scalar = checks.Scalar
Stats = masked.Stats


def __getattr__(name: str) -> Any:
    """Loads the losses over preferences on first use: policy gradients need none."""
    if name not in __all__:
        raise AttributeError(f"{__name__} has no name {name!r}")
    from rlhf_jax.functional import preference_losses

    return getattr(preference_losses, name)


def policy_loss(
    *,
    logprobs: Float32[Array, "*shape"],
    old_logprobs: Float32[Array, "*shape"],
    advantages: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    clip_range: Scalar,
    clip_range_high: Scalar | None = None,
    dual_clip: Scalar | None = None,
    ratio_level: RatioLevel = "token",
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """PPO surrogate, the mean over tokens or responses of max(-ρA, -clip(ρ)A).

    ρ = exp(logprobs - old_logprobs), clip(ρ) = clip(ρ, 1 - ε, 1 + ε_high). With a dual
    clip the loss of a token with A < 0 is at most -cA: its gradient is 0 where ρ > c.
    Without a dual clip -ρA can exceed the range of float32. Its value and slope are
    then capped at e^88.72 (`surrogates.capped_exp`). At the ratio levels "sequence" and
    "sequence_token" ρ is the ratio of the response, to the power of 1/length (GSPO).

    Args:
      logprobs, old_logprobs: f32[B, S], nats; column t is about tokens[:, t].
      advantages: f32[B, S], reward units.
      clip_range: ε, dimensionless.
      clip_range_high: ε_high, dimensionless; None is ε. DAPO: 0.28 with an ε of 0.2.
      dual_clip: dual-clip bound c > 1; None disables it. The source uses 3.
      ratio_level: ρ of a token or of its response (`surrogates.at_level`).
      mean: aggregation, loss_scale_factor, num_tokens and num_responses of
        `token_weights`.

    Returns:
      f32[] loss and {name: (sum, weight)}. The gradient reaches `logprobs` and, where
      they bind, the clip ranges and the dual clip. `loss/policy`: the loss, by
      `aggregation`. The others are means over tokens under every aggregation.
      `policy/approxkl`: ½(log ratio of the token)², nats per token: k2 between the
      policy before and after the update, not to the reference.
      `policy/clipfrac`: share of tokens where the clipped term is the larger one.
      `policy/dual_clipfrac`, with a dual clip: share of tokens at its bound.
      `policy/overflowfrac`: share of tokens whose -ρA is capped. `policy/ratio_mean`,
      `policy/ratio_max`: of ρ.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; clip-higher is Yu et al.
    2025, arXiv:2503.14476, section 3.1; the dual clip is Ye et al. 2019,
    arXiv:1912.09729; the ratio of a sequence is Zheng et al. 2025, arXiv:2507.18071.

    >>> old_logprobs = jnp.log(jnp.array([[0.5, 0.5, 0.1]]))
    >>> logprobs = jnp.log(jnp.array([[0.5, 0.8, 0.9]]))  # ratios 1, 1.6 and 9
    >>> arrays = {"logprobs": logprobs, "old_logprobs": old_logprobs}
    >>> arrays |= {"advantages": jnp.array([[1.0, 1.0, -1.0]])}
    >>> arrays |= {"mask": jnp.array([[True, True, True]])}
    >>> loss, stats = policy_loss(**arrays, clip_range=0.2)
    >>> print(loss)  # (-1 - 1.2 + 9) / 3: a positive advantage is clipped
    2.267
    >>> print(masked.mean_stats(stats)["policy/clipfrac"])
    0.333
    >>> print(policy_loss(**arrays, clip_range=0.2, dual_clip=3.0)[0])
    0.267
    """
    log_ratio, advantages = surrogates.masked_inputs(
        logprobs, old_logprobs, advantages, mask
    )
    checks.positive(clip_range=clip_range, clip_range_high=clip_range_high)
    checks.within(
        above=1, advice="choose 3 or 10, or leave it out", dual_clip=dual_clip
    )
    if clip_range_high is None:
        clip_range_high = clip_range
    # Of single tokens at every level, so that `policy/approxkl` stays comparable.
    token_log_ratio = jax.lax.stop_gradient(log_ratio)
    log_ratio = surrogates.at_level(log_ratio, mask=mask, ratio_level=ratio_level)
    # For the statistics only, before the bounds below act; it may be inf.
    true_ratio = jnp.exp(jax.lax.stop_gradient(log_ratio))
    shares = {}
    if dual_clip is not None:
        bound = jnp.log(jnp.asarray(dual_clip, jnp.float32))
        at_bound = (advantages < 0) & (log_ratio > bound)
        # Before exp: the gradient of an infinite ratio would be NaN.
        log_ratio = jnp.where(at_bound, bound, log_ratio)
        shares["policy/dual_clipfrac"] = at_bound.astype(jnp.float32)
    # Where A >= 0 the clipped term has no gradient: the ratio may stop above the clip.
    end = jnp.log1p(clip_range_high) + 1.0
    log_ratio = jnp.where((advantages >= 0) & (log_ratio > end), end, log_ratio)
    # Where A < 0, -ρA as one exponential: it may be finite where ρ is not.
    product = log_ratio + jnp.log(jnp.where(advantages < 0, -advantages, 1.0))
    large = (advantages < 0) & (log_ratio > 0)
    # Everywhere else the plain product is used, as published.
    large &= jnp.maximum(log_ratio, product) > surrogates.LARGE
    # The branch that is not taken must be finite, too: inf · 0 in its gradient is NaN.
    ratio = jnp.exp(jnp.where(large, 0.0, log_ratio))
    unclipped = -ratio * advantages
    clipped = -jnp.clip(ratio, 1.0 - clip_range, 1.0 + clip_range_high) * advantages
    capped = surrogates.capped_exp(jnp.where(large, product, 0.0))
    surrogate = jnp.where(large, capped, jnp.maximum(unclipped, clipped))
    beyond = large & (product > surrogates.LARGEST)
    shares["policy/overflowfrac"] = beyond.astype(jnp.float32)
    shares["policy/clipfrac"] = (clipped > unclipped).astype(jnp.float32)
    loss, stats = aggregate("loss/policy", surrogate, mask, **mean)
    stats |= masked.sum_stats(shares, mask=mask)
    return loss, stats | ratio_stats(token_log_ratio, true_ratio, mask=mask)


def entropy_bonus(
    *,
    entropy: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """Minus the mean entropy: a loss that, times a coefficient, raises the entropy.

    Args:
      entropy: f32[B, S], nats; column t is about the distribution that tokens[:, t] was
        drawn from.
      mean: aggregation, loss_scale_factor, num_tokens and num_responses of
        `token_weights`.

    Returns:
      f32[] loss, nats per token, and {name: (sum, weight)}. The gradient reaches
      `entropy`. `loss/entropy`: the loss, by `aggregation`, before any coefficient.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9.

    >>> entropy = jnp.array([[0.0, 2.0, 1.0], [0.0, 3.0, 0.0]])
    >>> mask = jnp.array([[False, True, True], [False, True, False]])
    >>> print(entropy_bonus(entropy=entropy, mask=mask)[0])
    -2.0
    >>> print(entropy_bonus(entropy=entropy, mask=mask, aggregation="sequence_mean")[0])
    -2.25
    """
    checks.masked_floats(mask, entropy=entropy)
    return aggregate("loss/entropy", -entropy, mask, **mean)


def language_model_loss(
    *,
    logprobs: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    num_tokens: Shaped[Array, ""] | None = None,
) -> tuple[Float32[Array, ""], Stats]:
    """Cross-entropy, -(1/N) Σ m·logprobs.

    Args:
      logprobs: f32[B, S], nats; column t is about tokens[:, t].
      mask: bool[B, S], tokens that are trained on.
      num_tokens: f32[], N of the whole minibatch when this is a micro-batch; None
        counts mask.

    Returns:
      f32[] loss, nats per token, and {name: (sum, weight)}. The gradient reaches
      `logprobs`. `loss/language_model`: the loss.

    >>> logprobs = jnp.log(jnp.array([[1.0, 0.5, 0.25]]))
    >>> mask = jnp.array([[False, True, True]])
    >>> print(language_model_loss(logprobs=logprobs, mask=mask)[0])  # 1.5 log 2
    1.04
    >>> whole = jnp.array(6.0)  # tokens of the whole minibatch
    >>> print(language_model_loss(logprobs=logprobs, mask=mask, num_tokens=whole)[0])
    0.347
    """
    checks.masked_floats(mask, logprobs=logprobs)
    return aggregate("loss/language_model", -logprobs, mask, num_tokens=num_tokens)


def value_loss(
    *,
    values: Float32[Array, "*shape"],
    old_values: Float32[Array, "*shape"],
    returns: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    clip_range: checks.Scalar | None,
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """Clipped squared error, the mean of ½ max((V - R)², (V_clip - R)²).

    V_clip = clip(V, V_old - ε, V_old + ε).

    Args:
      values, old_values, returns: f32[B, S], reward units; column t is about the state
        just before tokens[:, t].
      clip_range: ε, reward units; None does not clip.
      mean: aggregation, loss_scale_factor, num_tokens and num_responses of
        `token_weights`.

    Returns:
      f32[] loss and {name: (sum, weight)}. The gradient reaches `values` and, where it
      binds, `clip_range`.
      `loss/value`: the loss, by `aggregation`. `value/clipfrac`: share of tokens where
      the clipped square is the larger one; their gradient is 0.

    Source: `PPOTrainer.loss` of openai/lm-human-preferences.

    >>> values, old_values = jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 2.0]])
    >>> arrays = {"values": values, "old_values": old_values}
    >>> arrays |= {"returns": jnp.array([[3.0, 3.0]])}
    >>> arrays |= {"mask": jnp.array([[True, True]])}
    >>> print(value_loss(**arrays, clip_range=None)[0])  # (½·2² + ½·1²) / 2
    1.25
    >>> loss, stats = value_loss(**arrays, clip_range=0.5)
    >>> print(loss, masked.mean_stats(stats)["value/clipfrac"])  # V_clip is 0.5
    1.812 0.5
    """
    checks.masked_floats(mask, values=values, old_values=old_values, returns=returns)
    values = jnp.where(mask, values, 0.0)
    # Returns and old values are data of the rollout, not functions of the critic now.
    old_values = jax.lax.stop_gradient(jnp.where(mask, old_values, 0.0))
    returns = jax.lax.stop_gradient(jnp.where(mask, returns, 0.0))
    clipped_values = values
    checks.positive(clip_range=clip_range)
    if clip_range is not None:
        # Not old_values + clip(move): inside the range this returns values to the bit.
        clipped_values = jnp.clip(
            values, old_values - clip_range, old_values + clip_range
        )
    unclipped = 0.5 * jnp.square(values - returns)
    clipped = 0.5 * jnp.square(clipped_values - returns)
    loss, stats = aggregate("loss/value", jnp.maximum(unclipped, clipped), mask, **mean)
    clipfrac = (clipped > unclipped).astype(jnp.float32)
    return loss, stats | masked.sum_stats({"value/clipfrac": clipfrac}, mask=mask)


def explained_variance(
    *,
    values: Float32[Array, "*shape"],
    returns: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Stats:
    """1 - Var(R - V) / Var(R) as sums: (Σ(R-R̄)² - Σ(E-Ē)², Σ(R-R̄)²), E = R - V.

    Pass the whole rollout, never a micro-batch: variances are taken about the mean of
    the arguments, and every micro-batch has its own.

    Args:
      values, returns: f32[B, S], reward units.

    Returns:
      `value/explained_variance`: 1 is a perfect critic, 0 is one no better than a
      constant, and below 0 it is worse. No gradient.

    >>> arrays = {"returns": jnp.array([[1.0, 2.0, 3.0]])}
    >>> arrays |= {"mask": jnp.array([[True, True, True]])}
    >>> stats = explained_variance(values=jnp.array([[1.0, 2.0, 3.0]]), **arrays)
    >>> print(masked.mean_stats(stats)["value/explained_variance"])
    1.0
    >>> stats = explained_variance(values=jnp.array([[2.0, 2.0, 2.0]]), **arrays)
    >>> print(masked.mean_stats(stats)["value/explained_variance"])
    0.0
    """
    checks.masked_floats(mask, values=values, returns=returns)
    returns = jnp.where(mask, returns, 0.0)
    errors = returns - jnp.where(mask, values, 0.0)
    count = jnp.sum(mask, dtype=jnp.float32)
    spread = count * masked.masked_var(returns, mask=mask)
    # Sums, not a ratio: `mean_stats` divides once all parts are added.
    unexplained = count * masked.masked_var(errors, mask=mask)
    pair = jax.lax.stop_gradient((spread - unexplained, spread))
    return {"value/explained_variance": pair}
