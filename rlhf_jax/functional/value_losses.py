"""What a critic is trained by, and how much of the returns it explains."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.aggregation import Aggregation, aggregate

Array = jax.Array
Stats = masked.Stats


def value_loss(
    *,
    values: Array,
    old_values: Array,
    returns: Array,
    mask: Array,
    clip_range: float | None,
    aggregation: Aggregation = "token_mean",
    loss_scale_factor: float | None = None,
    num_tokens: Array | None = None,
    num_responses: Array | None = None,
) -> tuple[Array, Stats]:
    """Half the larger square, the mean of ½ max((V-R)², (V_clip-R)²).

    V_clip = clip(V, V_old - ε, V_old + ε).

    Args:
      values, old_values, returns: f32[B, S], reward units; column t is the state
        just before tokens[:, t].
      mask: bool[B, S], response tokens, EOS included.
      clip_range: ε, reward units; None does not clip.
      aggregation, loss_scale_factor, num_tokens, num_responses: as `token_weights`, of
        this mask.

    Returns:
      f32[] loss and {name: (sum, weight)}. The gradient reaches `values` only.
      `loss/value`: the loss, by `aggregation`. `value/clipfrac`: share of tokens where
      the clipped square is the larger one, so that no gradient comes from them.

    Raises:
      ValueError: shapes differ, clip_range is not positive, or as `token_weights`.
      TypeError: floats are not f32 or mask is not bool.

    Source: `PPOTrainer.loss` of openai/lm-human-preferences.
    """
    _check(mask, values=values, old_values=old_values, returns=returns)
    values = jnp.where(mask, values, 0.0)
    old_values = jax.lax.stop_gradient(jnp.where(mask, old_values, 0.0))
    returns = jax.lax.stop_gradient(jnp.where(mask, returns, 0.0))
    clipped_values = values
    if clip_range is not None:
        checks.positive(clip_range=clip_range)
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


def explained_variance(*, values: Array, returns: Array, mask: Array) -> Stats:
    """1 - Var(R - V) / Var(R), as sums: (Σ(R-R̄)² - Σ(E-Ē)², Σ(R-R̄)²), E = R - V.

    Variances are about the mean of what is passed in, so pass the whole rollout, never
    a micro-batch. Parts that are added keep each its own mean.

    Args:
      values, returns: f32[B, S], reward units.
      mask: bool[B, S], response tokens, EOS included.

    Returns:
      `value/explained_variance`: 1 is a perfect critic, 0 no better than a constant,
      below 0 worse. No gradient.

    Raises:
      ValueError: shapes differ. TypeError: floats are not f32 or mask is not bool.
    """
    _check(mask, values=values, returns=returns)
    returns = jnp.where(mask, returns, 0.0)
    errors = returns - jnp.where(mask, values, 0.0)
    count = jnp.sum(mask, dtype=jnp.float32)
    spread = count * masked.masked_var(returns, mask=mask)
    unexplained = count * masked.masked_var(errors, mask=mask)
    pair = jax.lax.stop_gradient((spread - unexplained, spread))
    return {"value/explained_variance": pair}


def _check(mask: Array, **floats: Array) -> None:
    checks.same_shape(**floats, mask=mask)
    checks.float32(**floats)
    checks.boolean(mask=mask)
