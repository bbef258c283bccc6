"""Sums, means and whitening over the True entries of a mask, and statistics that add.

What stands under a False mask, NaN and inf included, changes neither a value nor a
gradient: entries are selected before they meet any arithmetic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks

Array = jax.Array

Stats = dict[str, tuple[Array, Array | None]]
"""{name: (sum, weight)}: a mean that is not yet divided, so that parts add exactly.

A weight of None marks a maximum (`policy/ratio_max`), which has no weight to add: parts
combine by the larger one. `add_stats`, `total_stats` and `mean_stats` know both kinds.
"""

_VARIANCE_FLOOR = 1e-8  # added to the variance before its square root, as in OAI


def lengths_to_mask(lengths: Array, *, size: int) -> Array:
    """mask[b, t] = t < lengths[b], the mask of right-padded rows.

        lengths [2, 4], size 5
        column   0  1  2  3  4
        mask     1  1  0  0  0
                 1  1  1  1  0

    Args:
      lengths: i32[B], tokens. A length above `size` fills its row.
      size: number of columns S.

    Returns:
      bool[B, S]. Left-padded rows are its mirror, `mask[:, ::-1]`.

    Raises:
      ValueError: lengths is not one axis. TypeError: lengths is not int32.
    """
    checks.shape((None,), lengths=lengths)
    checks.int32(lengths=lengths)
    return jnp.arange(size, dtype=jnp.int32)[None, :] < lengths[:, None]


def masked_sum(x: Array, *, mask: Array, axis: int | None = None) -> Array:
    """Σ m·x over `axis`, or over everything.

    Args:
      x: f32[...].
      mask: bool, shape of x.
      axis: the axis to reduce; None reduces all.

    Returns:
      f32, x without `axis`. An empty mask sums to 0.

    Raises:
      ValueError: shapes differ. TypeError: x is not f32 or mask is not bool.
    """
    _check(x, mask)
    return jnp.sum(x, axis=axis, where=mask)


def masked_mean(x: Array, *, mask: Array, axis: int | None = None) -> Array:
    """Σ m·x / Σ m over `axis`, or over everything. An empty mask has mean 0.

    The mean of equal numbers is that number, at any magnitude and any count.

    Args, Returns, Raises: as `masked_sum`.
    """
    _check(x, mask)
    return jnp.add(*_mean_in_two(x, mask, axis=axis))


def centred(x: Array, *, mask: Array) -> tuple[Array, Array, Array]:
    """The mean in two parts, centre + rest, and m·(x - mean) to the last digit.

    Near a large mean the mean of float32 is not a float32, and its rounding would be as
    large as the deviations are.

    Args:
      x: f32[...].
      mask: bool, shape of x.

    Returns:
      f32[] centre, without gradient, f32[] rest, and f32[...], 0 outside the mask.

    Raises:
      As `masked_sum`.
    """
    _check(x, mask)
    centre, rest = _mean_in_two(x, mask, axis=None)
    return centre, rest, jnp.where(mask, (x - centre) - rest, 0.0)


def _mean_in_two(x: Array, mask: Array, *, axis: int | None) -> tuple[Array, Array]:
    """A rounded mean, without gradient, and the mean of what is left above it."""
    count = jnp.sum(mask, axis=axis, dtype=jnp.float32, keepdims=True)
    count = jnp.maximum(count, 1.0)
    sums = {"axis": axis, "where": mask, "keepdims": True}
    fixed = jax.lax.stop_gradient(x)
    # No mean lies outside of its numbers, however its sum rounds or overflows.
    low = jnp.min(fixed, initial=jnp.inf, **sums)
    high = jnp.max(fixed, initial=-jnp.inf, **sums)
    centre = jnp.clip(jnp.sum(fixed, **sums) / count, low, high)
    centre = jnp.where(jnp.isfinite(centre), centre, 0.0)
    rest = jnp.sum(x - centre, **sums) / count
    return jnp.squeeze(centre, axis=axis), jnp.squeeze(rest, axis=axis)


def masked_var(x: Array, *, mask: Array, ddof: int = 0) -> Array:
    """Σ m·(x - mean)² / (Σ m - ddof), over everything and in two passes.

    Args:
      x: f32[...].
      mask: bool, shape of x.
      ddof: 0 is the biased variance (OAI, N+), 1 the unbiased one (TRL).

    Returns:
      f32[]. With `ddof` entries or fewer there is no spread to speak of: 0.

    Raises:
      ValueError: shapes differ or ddof is neither 0 nor 1. TypeError: x is not f32
      or mask is not bool.
    """
    if ddof not in (0, 1):
        raise checks.InputError(
            f"ddof: expected 0 (biased) or 1 (unbiased), got {ddof}; choose one"
        )
    _, _, deviation = centred(x, mask=mask)
    freedom = jnp.sum(mask, dtype=jnp.float32) - ddof
    return jnp.sum(deviation**2) / jnp.maximum(freedom, 1.0)


def masked_whiten(
    x: Array, *, mask: Array, shift_mean: bool = True, ddof: int = 0
) -> Array:
    """(x - mean) / sqrt(var + 1e-8), plus the mean again when it is not to be shifted.

    Equal numbers are whitened to 0, at any magnitude and any count.

    Args:
      x: f32[...], the whole rollout or the whole minibatch, never a micro-batch.
      mask: bool, shape of x.
      shift_mean: True gives mean 0 (advantages), False keeps the mean (OAI's rewards).
      ddof: of the variance; 0 is the biased one (OAI, N+), 1 the unbiased one (TRL).

    Returns:
      f32[...], dimensionless (plus the mean in x's unit), 0 outside the mask.

    Raises:
      As `masked_var`.

    Source: `whiten` of openai/lm-human-preferences.
    """
    centre, rest, deviation = centred(x, mask=mask)
    scale = jax.lax.rsqrt(masked_var(x, mask=mask, ddof=ddof) + _VARIANCE_FLOOR)
    whitened = deviation * scale
    if shift_mean:
        return whitened
    return jnp.where(mask, whitened + (centre + rest), 0.0)


def sum_stats(columns: dict[str, Array], *, mask: Array) -> Stats:
    """{name: (Σ m·x, Σ m)} of each column, without gradient.

    Args:
      columns: f32[...] by name.
      mask: bool, of their shape.

    Raises:
      ValueError: shapes differ. TypeError: a column is not f32 or mask is not bool.
    """
    weight = jnp.sum(mask, dtype=jnp.float32)
    return {
        name: (jax.lax.stop_gradient(masked_sum(x, mask=mask)), weight)
        for name, x in columns.items()
    }


def add_stats(left: Stats, right: Stats) -> Stats:
    """The statistics of two parts (micro-batches, steps) together.

    Raises:
      ValueError: the parts do not hold the same names.
    """
    if left.keys() != right.keys():
        raise ValueError(
            f"expected equal names, got {sorted(left)} and {sorted(right)}; add "
            "statistics of one function, or merge the two dictionaries with |"
        )
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), left, right)
    return total_stats(stacked)


def merge_stats(*parts: Stats) -> Stats:
    """The stats of several sources together, in whatever order they come.

    Args:
      parts: {name: (sum, weight)}, of different names.

    Raises:
      ValueError: two sources have the same name, of which one would be lost.
    """
    merged: Stats = {}
    for part in parts:
        twice = sorted(merged.keys() & part.keys())
        if twice:
            raise ValueError(
                f"expected stats of different names, got {', '.join(twice)} twice; "
                f"name one of them otherwise"
            )
        merged |= part
    return merged


def total_stats(stats: Stats) -> Stats:
    """The parts along the leading axis of every entry, as `lax.scan` stacks them."""
    return {
        name: (jnp.max(value, axis=0), None)
        if weight is None
        else (jnp.sum(value, axis=0), jnp.sum(weight, axis=0))
        for name, (value, weight) in stats.items()
    }


def mean_stats(stats: Stats) -> dict[str, Array]:
    """{name: sum / weight}, the last moment; maxima as they are. Weight 0 gives 0."""
    return {
        name: value
        if weight is None
        else jnp.where(weight > 0, value, 0.0) / jnp.where(weight > 0, weight, 1.0)
        for name, (value, weight) in stats.items()
    }


def _check(x: Array, mask: Array) -> None:
    checks.same_shape(x=x, mask=mask)
    checks.float32(x=x)
    checks.boolean(mask=mask)
