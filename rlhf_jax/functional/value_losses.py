"""The loss that trains a critic, and the share of the returns that it explains."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Shaped

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.aggregation import Aggregation, LossScale, aggregate

Array = jax.Array
Stats = masked.Stats


def value_loss(
    *,
    values: Float32[Array, "*shape"],
    old_values: Float32[Array, "*shape"],
    returns: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    clip_range: checks.Scalar | None,
    aggregation: Aggregation = "token_mean",
    loss_scale_factor: LossScale = None,
    num_tokens: Shaped[Array, ""] | None = None,
    num_responses: Shaped[Array, ""] | None = None,
) -> tuple[Float32[Array, ""], Stats]:
    """Clipped squared error, the mean of ½ max((V - R)², (V_clip - R)²).

    V_clip = clip(V, V_old - ε, V_old + ε).

    Args:
      values, old_values, returns: f32[B, S], reward units; column t is the state
        just before tokens[:, t].
      clip_range: ε, reward units; None does not clip.
      aggregation, loss_scale_factor, num_tokens, num_responses: of `token_weights`.

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
    loss, stats = aggregate(
        "loss/value",
        jnp.maximum(unclipped, clipped),
        mask,
        aggregation=aggregation,
        loss_scale_factor=loss_scale_factor,
        num_tokens=num_tokens,
        num_responses=num_responses,
    )
    clipfrac = (clipped > unclipped).astype(jnp.float32)
    return loss, stats | masked.sum_stats({"value/clipfrac": clipfrac}, mask=mask)


def explained_variance(
    *,
    values: Float32[Array, "*shape"],
    returns: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Stats:
    """1 - Var(R - V) / Var(R), as sums: (Σ(R-R̄)² - Σ(E-Ē)², Σ(R-R̄)²), E = R - V.

    Variances are about the mean of the arguments, so pass the whole rollout, never a
    micro-batch: parts that are added each have a mean of their own.

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
    unexplained = count * masked.masked_var(errors, mask=mask)
    pair = jax.lax.stop_gradient((spread - unexplained, spread))
    return {"value/explained_variance": pair}
