"""Statistics as (sum, weight) pairs, which add exactly over parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks

Array = jax.Array

Stats = dict[str, tuple[Array, Array | None]]
"""{name: (sum, weight)}: a mean before its division, so that parts add exactly.

A weight of None marks a maximum (`policy/ratio_max`): of two parts the larger one is
kept. `add_stats`, `total_stats` and `mean_stats` handle both kinds.
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
    """The statistics of two parts (micro-batches, steps) together.

    Args:
      left, right: {name: (sum, weight)} under the same names.

    Returns:
      {name: (sum, weight)}: sums and weights are added, of two maxima (weight None) the
      larger one is kept.

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
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), left, right)
    return total_stats(stacked)


def merge_stats(*parts: Stats) -> Stats:
    """The statistics of several sources, under different names, in any order.

    Raises:
      ValueError: two sources have the same name, of which one would be lost.

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
    """The statistics of parts that are stacked along the leading axis, as by `scan`.

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
    """{name: sum / weight}: the division, once all parts are added.

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
        else jnp.where(weight > 0, value, 0.0) / jnp.where(weight > 0, weight, 1.0)
        for name, (value, weight) in stats.items()
    }
