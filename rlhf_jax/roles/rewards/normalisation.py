"""Scores of mean 0 and standard deviation 1: once in a model, or running."""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError

Array = jax.Array
Params = Any


def normalise(
    params: Params, *, scores: Array, mean: float = 0.0, std: float | None = 1.0
) -> Params:
    """Folds gain and bias into the head so that `scores` get the mean and std given.

    Args:
      scores: f32[N], what this model says of samples of the reference (OAI), or of
        demonstrations, whose mean alone is moved (N+).
      mean: wanted, reward units.
      std: wanted, reward units; None keeps the spread and moves the bias alone.

    Returns:
      The parameters with another head; the trunk is shared, not copied.

    Raises:
      InputError: the scores are not finite, or do not vary, so that no gain can help.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.1; the bias alone is Huang
    et al. 2024, arXiv:2403.17031.
    """
    head = params["score"]
    if std is None:
        centre = float(_mean_and_std(scores)[0])
        if not math.isfinite(centre):
            raise InputError(
                f"expected finite scores to normalise by, got {scores.size} scores "
                f"with mean {centre}; is the reward model trained?"
            )
        return {**params, "score": {**head, "bias": head["bias"] + (mean - centre)}}
    centre, spread = map(float, _mean_and_std(scores))
    if not 0 < spread < math.inf:
        raise InputError(
            f"expected scores that vary to normalise by, got {scores.size} scores with "
            f"standard deviation {spread}; is the reward model trained?"
        )
    gain = std / spread
    bias = mean - gain * centre
    score = {"kernel": gain * head["kernel"], "bias": gain * head["bias"] + bias}
    return {**params, "score": score}


def _mean_and_std(scores: Array) -> tuple[Array, Array]:
    """Of equal scores the number itself, and 0."""
    scores = jnp.asarray(scores, jnp.float32)
    everything = jnp.ones(scores.shape, bool)
    variance = masked.masked_var(scores, mask=everything)
    return masked.masked_mean(scores, mask=everything), jnp.sqrt(variance)


@flax.struct.dataclass
class RunningMoments:
    """Mean and variance of every score seen so far. Part of every snapshot.

    Steps smaller than a digit of float32 would be lost: each has a rest of its own,
    what its rounding left out so far (Kahan's compensated sum).
    """

    count: Array  # f32[], scores
    mean: Array  # f32[], reward units
    mean_rest: Array  # f32[], reward units, to be added to the mean
    variance: Array  # f32[], reward units²
    variance_rest: Array  # f32[], reward units², to be added to the variance


def no_moments() -> RunningMoments:
    """Nothing seen yet; a function, since a shared array would die by donation."""
    return RunningMoments(*(jnp.zeros((), jnp.float32) for _ in range(5)))


def update_moments(
    moments: RunningMoments, scores: Array, *, row_mask: Array | None = None
) -> RunningMoments:
    """Moments of the scores seen before and of these together.

    Args:
      scores: f32[B], reward units; those that are not finite are left out, since a NaN
        would stay for the rest of the run.
      row_mask: bool[B], scores that count; None keeps all.

    Source: Chan, Golub & LeVeque 1979, the pairwise update; the exact error of a sum is
    Knuth, The Art of Computer Programming, volume 2, section 4.2.2.
    """
    finite = jnp.isfinite(scores)
    if row_mask is not None:
        finite &= row_mask
    size = finite.sum(dtype=jnp.float32)
    count = moments.count + size
    share = size / jnp.maximum(count, 1.0)
    centre, rest, _ = masked.centred(scores, mask=finite)
    delta = (centre - moments.mean) + (rest - moments.mean_rest)
    excess = masked.masked_var(scores, mask=finite) - moments.variance
    mean, mean_rest = _sum_in_two(moments.mean, moments.mean_rest + share * delta)
    variance, variance_rest = _sum_in_two(
        moments.variance,
        moments.variance_rest
        + share * (excess - moments.variance_rest + (1 - share) * delta**2),
    )
    return RunningMoments(
        count=count,
        mean=mean,
        mean_rest=mean_rest,
        variance=variance,
        variance_rest=variance_rest,
    )


def _sum_in_two(left: Array, right: Array) -> tuple[Array, Array]:
    """left + right as rounded, and what the rounding has left out."""
    total = left + right
    of_right = total - left
    return total, (left - (total - of_right)) + (right - of_right)
