"""Intervals have their coverage on sweeps whose true value is known."""

import math

import numpy as np
import pytest
from scipy import stats

from rlhf_jax.sweeps import statistics


def test_an_estimate_by_hand():
    """t(0.975, 3) = 3.1824; s² = 5 / 3; the middle half of four values is 2 and 3."""
    estimate = statistics.estimate([1.0, 2.0, 3.0, 4.0])
    half = 3.182446 * math.sqrt(5 / 3) / 2
    assert (estimate.seeds, estimate.mean, estimate.iqm) == (4, 2.5, 2.5)
    assert estimate.interval == pytest.approx((2.5 - half, 2.5 + half), abs=1e-5)
    assert estimate.iqm_interval is None


def test_half_widths_are_those_of_each_column():
    values = np.array([[1.0, 7.0, np.nan], [2.0, 7.0, 5.0], [4.0, np.nan, np.nan]])
    widths = statistics.half_widths(values)
    assert widths[0] == pytest.approx(4.302653 * math.sqrt(7 / 3 / 3), rel=1e-6)
    assert widths[1] == 0
    assert np.isnan(widths[2])  # of one value


def test_an_iqm_leaves_bad_seeds_out():
    estimate = statistics.estimate([*range(10), 1e6, -1e6])
    assert estimate.iqm == pytest.approx(4.5)
    assert estimate.iqm_interval.low < 4.5 < estimate.iqm_interval.high < 20


def test_few_and_equal_seeds():
    one = statistics.estimate([3.0])
    assert (one.mean, one.interval, one.iqm) == (3.0, None, None)
    equal = statistics.estimate([0.1] * 12)
    assert equal.interval == equal.iqm_interval == (0.1, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 2, 5, 10])
def test_intervals_of_means_hold_the_truth_in_95_of_100_sweeps(seeds):
    drawn = np.random.default_rng(seeds).normal(2.0, 3.0, size=(2000, seeds))
    covers = [
        interval.low <= 2.0 <= interval.high
        for interval in map(statistics.of_mean, drawn)
    ]
    assert 0.93 <= np.mean(covers) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("draw", ["normal", "heavy tails"])
@pytest.mark.parametrize("seeds", [statistics.ENOUGH, 20])
def test_intervals_of_interquartile_means_do(draw, seeds):
    """The true value is 0 by symmetry; Student's t with 3 degrees has heavy tails."""
    random = np.random.default_rng(seeds)
    distribution = stats.norm if draw == "normal" else stats.t(3)
    drawn = distribution.rvs(size=(2000, seeds), random_state=random)
    covers = [
        interval.low <= 0.0 <= interval.high
        for interval in map(statistics.of_iqm, drawn)
    ]
    assert 0.93 <= np.mean(covers) <= 0.97
