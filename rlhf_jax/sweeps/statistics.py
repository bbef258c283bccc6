"""Means over seeds, and their 95% intervals.

Means have Student's t intervals, because bootstrap intervals over few seeds are too
narrow (see README.md). The interquartile mean, which excludes one outlier among four or
more seeds, has a bootstrap interval from ENOUGH seeds on.

Sources: Agarwal et al. 2021, arXiv:2108.13264 (interquartile mean, bootstrap over
runs); Student 1908.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.floating]

CONFIDENCE = 0.95
ENOUGH = 10  # seeds for a bootstrap interval
TRIMMED = 0.25  # share left out on either side of an interquartile mean
RESAMPLES = 2000


class Interval(NamedTuple):
    """An interval that contains the true value in 95 of 100 sweeps."""

    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2


class Estimate(NamedTuple):
    """Estimates of a mean over seeds."""

    seeds: int
    mean: float
    interval: Interval | None  # of the mean; None with one seed
    iqm: float | None  # interquartile mean; None with fewer than four seeds
    iqm_interval: Interval | None  # None with fewer than ENOUGH seeds


def estimate(values: Sequence[float]) -> Estimate:
    """Estimates mean and interquartile mean from the values of at least one seed.

        mean ± t(0.975, n - 1)·s/√n,        iqm = mean of the middle half

    A quarter of the seeds, rounded down, is left out at either end.
    """
    array = np.asarray(values, float)
    return Estimate(
        seeds=len(array),
        mean=float(array.mean()),
        interval=of_mean(array),
        iqm=float(stats.trim_mean(array, TRIMMED)) if len(array) >= 4 else None,
        iqm_interval=of_iqm(array) if len(array) >= ENOUGH else None,
    )


def of_mean(values: Floats) -> Interval | None:
    """Returns Student's t interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    if np.ptp(values) == 0:
        return Interval(float(values[0]), float(values[0]))
    low, high = stats.t.interval(
        CONFIDENCE, len(values) - 1, loc=values.mean(), scale=stats.sem(values)
    )
    return Interval(float(low), float(high))


def half_width(
    deviation: Floats | float, *, seeds: npt.NDArray[np.integer] | int
) -> Any:
    """Returns half of the t interval of a mean, t(0.975, n - 1)·s/√n, for n ≥ 2.

    Both arguments may be arrays.
    """
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1)
    return quantile * deviation / np.sqrt(seeds)


def of_iqm(values: Floats) -> Interval:
    """Returns a bootstrap percentile interval of an interquartile mean (fixed seed)."""
    if np.ptp(values) == 0:
        return Interval(float(values[0]), float(values[0]))
    drawn = stats.bootstrap(
        (values,),
        lambda x, axis: stats.trim_mean(x, TRIMMED, axis=axis),
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(float(drawn.low), float(drawn.high))


def half_widths(values: Floats) -> Floats:
    """Returns half of the t interval of each column's mean, t(0.975, n - 1)·s/√n.

    Args:
      values: f[n, K], n values of K numbers; NaN stands for a missing one.

    Returns:
      f[K] in the units of `values`; NaN for columns with fewer than two values.
    """
    count = np.sum(~np.isnan(values), axis=0)
    n = np.maximum(count, 2)
    mean = np.nansum(values, axis=0) / np.maximum(count, 1)
    variance = np.nansum((values - mean) ** 2, axis=0) / (n - 1)
    return np.where(count > 1, half_width(np.sqrt(variance), seeds=n), np.nan)
