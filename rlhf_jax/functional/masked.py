"""Sums, means and whitening over the True entries of a mask, and statistics that add.

Entries under a False mask, NaN and inf included, change neither a value nor a gradient:
entries are selected before any arithmetic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int32

from rlhf_jax.functional import checks

__all__ = [
    "Stats",
    "add_stats",
    "centred",
    "lengths_to_mask",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "mean_stats",
    "merge_stats",
    "sum_stats",
    "total_stats",
]

Array = jax.Array


_VARIANCE_FLOOR = 1e-8  # added to the variance before its square root, as in OAI


def lengths_to_mask(lengths: Int32[Array, " B"], *, size: int) -> Bool[Array, "B S"]:
    """mask[b, t] = t < lengths[b], the mask of right-padded rows.

        lengths [2, 4], size 5
        column   0  1  2  3  4
        mask     1  1  0  0  0
                 1  1  1  1  0

    Args:
      lengths: i32[B], tokens. A length above `size` fills its row.

    Returns:
      bool[B, S]. Left-padded rows are its mirror, `mask[:, ::-1]`.

    >>> print(lengths_to_mask(jnp.array([2, 4]), size=5).astype(int))
    [[1 1 0 0 0]
     [1 1 1 1 0]]
    >>> print(lengths_to_mask(jnp.array([2, 4]), size=5)[:, ::-1].astype(int))
    [[0 0 0 1 1]
     [0 1 1 1 1]]
    """
    checks.shape((None,), lengths=lengths)
    checks.int32(lengths=lengths)
    return jnp.arange(size, dtype=jnp.int32)[None, :] < lengths[:, None]


def last_true(mask: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
    """True at the last True of each row only.

        mask         0    1    1    0    1    0
        last_true    0    0    0    0    1    0

    >>> mask = jnp.array([[True, True, False], [False, False, False]])
    >>> print(last_true(mask).astype(int))
    [[0 1 0]
     [0 0 0]]
    >>> print(last_true(~mask).astype(int))
    [[0 0 1]
     [0 0 1]]
    """
    columns = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
    # -1, which equals no column, where a row has none.
    return columns == jnp.max(columns, axis=1, where=mask, initial=-1, keepdims=True)


def masked_sum(
    x: Float32[Array, "*shape"], *, mask: Bool[Array, "*shape"], axis: int | None = None
) -> Float32[Array, "*kept"]:
    """Σ m·x over `axis`, or over everything.

    Returns:
      f32, x without `axis`. An empty mask sums to 0.

    >>> x = jnp.array([[1.0, 2.0, jnp.nan], [4.0, 5.0, 6.0]])
    >>> mask = jnp.array([[True, True, False], [True, False, False]])
    >>> print(masked_sum(x, mask=mask))
    7.0
    >>> print(masked_sum(x, mask=mask, axis=1))
    [3. 4.]
    """
    checks.masked_floats(mask, x=x)
    # `where=`, not a product: 0 · NaN is NaN, in the value and in the gradient.
    return jnp.sum(x, axis=axis, where=mask)


def masked_mean(
    x: Float32[Array, "*shape"], *, mask: Bool[Array, "*shape"], axis: int | None = None
) -> Float32[Array, "*kept"]:
    """Σ m·x / Σ m over `axis`, or over everything.

    The mean of equal numbers is that number, at any magnitude and any count.

    Returns:
      f32, x without `axis`. An empty mask has mean 0.

    >>> x = jnp.array([[1.0, 2.0, jnp.nan], [4.0, 5.0, 6.0]])
    >>> mask = jnp.array([[True, True, False], [False, False, False]])
    >>> print(masked_mean(x, mask=mask))
    1.5
    >>> print(masked_mean(x, mask=mask, axis=1))
    [1.5 0. ]
    """
    checks.masked_floats(mask, x=x)
    # Where all numbers are equal the centre is exact and the rest is 0.
    return jnp.add(*_mean_in_two(x, mask, axis=axis))


def centred(
    x: Float32[Array, "*shape"], *, mask: Bool[Array, "*shape"]
) -> tuple[Float32[Array, ""], Float32[Array, ""], Float32[Array, "*shape"]]:
    """The mean in two parts, centre + rest, and m·(x - mean) to the last digit.

    The mean of large float32 numbers is in general not a float32. Its rounding error
    can be as large as the deviations from it, so it is kept as two numbers.

    Returns:
      f32[] centre, without gradient, f32[] rest, and f32[...], 0 outside the mask.

    >>> x = jnp.array([1.0, 3.0, 9.0])
    >>> centre, rest, deviation = centred(x, mask=jnp.array([True, True, False]))
    >>> print(centre + rest, deviation)
    2.0 [-1.  1.  0.]
    >>> x = jnp.array([2.0**24, 2.0**24 + 2, 2.0**24 + 2])  # the mean is not a float32
    >>> centre, rest, deviation = centred(x, mask=jnp.array([True, True, True]))
    >>> print(deviation)
    [-1.333  0.667  0.667]
    """
    checks.masked_floats(mask, x=x)
    centre, rest = _mean_in_two(x, mask, axis=None)
    return centre, rest, jnp.where(mask, (x - centre) - rest, 0.0)


def _mean_in_two(x: Array, mask: Array, *, axis: int | None) -> tuple[Array, Array]:
    """The mean as a rounded centre, without gradient, plus the mean of x - centre."""
    count = jnp.sum(mask, axis=axis, dtype=jnp.float32, keepdims=True)
    count = jnp.maximum(count, 1.0)
    sums = {"axis": axis, "where": mask, "keepdims": True}
    # The centre is a constant of the second pass, where its gradient would cancel out.
    fixed = jax.lax.stop_gradient(x)
    # A mean lies between its smallest and largest number, however the sum rounds.
    low = jnp.min(fixed, initial=jnp.inf, **sums)
    high = jnp.max(fixed, initial=-jnp.inf, **sums)
    centre = jnp.clip(jnp.sum(fixed, **sums) / count, low, high)
    # The bounds of an empty mask are inf and -inf.
    centre = jnp.where(jnp.isfinite(centre), centre, 0.0)
    rest = jnp.sum(x - centre, **sums) / count
    return jnp.squeeze(centre, axis=axis), jnp.squeeze(rest, axis=axis)


def masked_var(
    x: Float32[Array, "*shape"], *, mask: Bool[Array, "*shape"], ddof: int = 0
) -> Float32[Array, ""]:
    """Σ m·(x - mean)² / (Σ m - ddof), over all axes, in two passes.

    Args:
      ddof: 0 is the biased variance (OAI, N+), 1 the unbiased one (TRL).

    Returns:
      f32[]; 0 with `ddof` entries or fewer.

    >>> x, mask = jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])
    >>> print(masked_var(x, mask=mask))
    1.0
    >>> print(masked_var(x, mask=mask, ddof=1))
    2.0
    """
    checks.one_of(ddof=ddof, among=(0, 1))
    _, _, deviation = centred(x, mask=mask)
    freedom = jnp.sum(mask, dtype=jnp.float32) - ddof
    return jnp.sum(deviation**2) / jnp.maximum(freedom, 1.0)


def masked_whiten(
    x: Float32[Array, "*shape"],
    *,
    mask: Bool[Array, "*shape"],
    shift_mean: bool = True,
    ddof: int = 0,
) -> Float32[Array, "*shape"]:
    """(x - mean) / sqrt(var + 1e-8), plus the mean where `shift_mean` is False.

    Equal numbers are whitened to 0, at any magnitude and any count.

    Args:
      x: f32[...], the whole rollout or the whole minibatch, never a micro-batch.
      shift_mean: True gives mean 0 (advantages), False keeps the mean (OAI's rewards).
      ddof: of the variance; 0 is the biased one (OAI, N+), 1 the unbiased one (TRL).

    Returns:
      f32[...], dimensionless (plus the mean in x's unit), 0 outside the mask.

    Source: `whiten` of openai/lm-human-preferences.

    >>> x, mask = jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])
    >>> print(masked_whiten(x, mask=mask))
    [-1.  1.  0.]
    >>> print(masked_whiten(x, mask=mask, shift_mean=False))
    [1. 3. 0.]
    """
    centre, rest, deviation = centred(x, mask=mask)
    # Differentiable in x: losses stop the gradient of advantages themselves.
    scale = jax.lax.rsqrt(masked_var(x, mask=mask, ddof=ddof) + _VARIANCE_FLOOR)
    whitened = deviation * scale
    if shift_mean:
        return whitened
    return jnp.where(mask, whitened + (centre + rest), 0.0)


Stats = dict[str, tuple[Array, Array | None]]
"""{name: (sum, weight)}: a mean before its division, so that parts add exactly.

A weight of None marks a maximum (`policy/ratio_max`): the larger of two parts is kept.
`add_stats`, `total_stats` and `mean_stats` handle both kinds.
"""


def sum_stats(
    columns: dict[str, Float32[Array, "*shape"]], *, mask: Bool[Array, "*shape"]
) -> Stats:
    """{name: (Σ m·x, Σ m)} of each column, without gradient.

    Returns:
      {name: (f32[], f32[])}, the sum and the number of True entries.

    >>> kl, mask = jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])
    >>> total, weight = sum_stats({"policy/approxkl": kl}, mask=mask)["policy/approxkl"]
    >>> print(total, weight)
    4.0 2.0
    >>> print(mean_stats(sum_stats({"kl": kl}, mask=mask))["kl"])
    2.0
    """
    checks.masked_floats(mask, **columns)
    weight = jnp.sum(mask, dtype=jnp.float32)
    return {
        name: (jax.lax.stop_gradient(jnp.sum(x, where=mask)), weight)
        for name, x in columns.items()
    }


def add_stats(left: Stats, right: Stats) -> Stats:
    """Adds the statistics of two parts (micro-batches, steps).

    Args:
      left, right: {name: (sum, weight)} under the same names.

    Returns:
      {name: (sum, weight)}: sums and weights are added; the larger of two maxima
      (weight None) is kept.

    Raises:
      ValueError: the names differ.

    >>> small = {"loss": (jnp.array(1.0), jnp.array(1.0))}
    >>> large = {"loss": (jnp.array(9.0), jnp.array(4.0))}
    >>> print(mean_stats(add_stats(small, large))["loss"])  # (1 + 9) / (1 + 4)
    2.0
    >>> ratio = {"ratio_max": (jnp.array(1.5), None)}
    >>> print(add_stats(ratio, {"ratio_max": (jnp.array(1.2), None)})["ratio_max"][0])
    1.5
    """
    if left.keys() != right.keys():
        raise ValueError(
            f"expected equal names, got {sorted(left)} and {sorted(right)}; add "
            "statistics of one function, or merge the two dictionaries with |"
        )
    # None is not a leaf: a maximum keeps its weight of None, and `total_stats` sees it.
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), left, right)
    return total_stats(stacked)


def merge_stats(*parts: Stats) -> Stats:
    """Merges the statistics of several sources, whose names must differ.

    Raises:
      ValueError: two sources have a name in common, so that one would be lost.

    >>> loss = {"loss": (jnp.array(9.0), jnp.array(4.0))}
    >>> kl = {"kl": (jnp.array(2.0), jnp.array(4.0))}
    >>> print(*merge_stats(loss, kl))
    loss kl
    >>> merge_stats(loss, loss)
    Traceback (most recent call last):
        ...
    ValueError: expected stats of different names, got loss twice; name one of them
        otherwise
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
    """Adds the statistics of parts stacked along the leading axis, as by `scan`.

    Args:
      stats: {name: (f32[N, ...], f32[N, ...])} of N parts; a weight of None marks a
        maximum.

    >>> stats = {"loss": (jnp.array([1.0, 9.0]), jnp.array([1.0, 4.0]))}
    >>> total, weight = total_stats(stats)["loss"]
    >>> print(total, weight)
    10.0 5.0
    >>> print(total_stats({"ratio_max": (jnp.array([1.5, 1.2]), None)})["ratio_max"][0])
    1.5
    """
    return {
        name: (jnp.max(value, axis=0), None)
        if weight is None
        else (jnp.sum(value, axis=0), jnp.sum(weight, axis=0))
        for name, (value, weight) in stats.items()
    }


def mean_stats(stats: Stats) -> dict[str, Array]:
    """{name: sum / weight}, to be taken once all parts are added.

    Returns:
      {name: mean}; 0 where the weight is 0. Maxima are returned as they are.

    >>> print(mean_stats({"loss": (jnp.array(10.0), jnp.array(5.0))})["loss"])
    2.0
    >>> print(mean_stats({"loss": (jnp.array(0.0), jnp.array(0.0))})["loss"])
    0.0
    """
    return {
        name: value
        if weight is None
        # Two selections: a division by 0 in the branch not taken would still be NaN.
        else jnp.where(weight > 0, value, 0.0) / jnp.where(weight > 0, weight, 1.0)
        for name, (value, weight) in stats.items()
    }
