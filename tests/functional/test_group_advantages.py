"""Advantages over a group of responses, against loops, identities and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from places import FIXTURES

from rlhf_jax import advantages
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("strict_dtypes")

SCORES = np.random.default_rng(0).normal(0.3, 2.0, 24).astype(np.float32)


@pytest.mark.cases(quick=4)
@pytest.mark.parametrize("group_size", [2, 3, 8, 24])
@pytest.mark.parametrize("normalise", [True, False])
def test_group_relative_matches_the_oracle(group_size, normalise):
    output = advantages.group_relative(
        SCORES, group_size=group_size, normalise=normalise
    )
    assert output.dtype == jnp.float32
    expected = oracles.group_relative(SCORES, group_size, normalise)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("group_size", [2, 3, 8, 24])
def test_leave_one_out_matches_the_oracle(group_size):
    output = advantages.leave_one_out(SCORES, group_size=group_size)
    expected = oracles.leave_one_out(SCORES, group_size)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group_size", [3, 8])
def test_a_baseline_by_lengths_matches_the_oracle(group_size):
    """For equal lengths it is the group's mean; uncounted rows are excluded."""
    lengths = np.random.default_rng(1).integers(1, 9, 24).astype(np.float32)
    options = {"group_size": group_size}
    output = advantages.length_weighted(SCORES, lengths=lengths, **options)
    expected = oracles.length_weighted(SCORES, lengths, group_size)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    equal = advantages.length_weighted(
        SCORES, lengths=np.full(24, 5.0, "f4"), **options
    )
    mean = oracles.group_relative(SCORES, group_size, normalise=False)
    np.testing.assert_allclose(equal, mean, rtol=1e-5, atol=1e-6)
    kept = np.arange(24) % 8 != 3
    output = advantages.length_weighted(
        np.where(kept, SCORES, np.nan), lengths=lengths, row_mask=kept, **options
    )
    expected = oracles.length_weighted(SCORES, lengths, group_size, kept)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_a_baseline_by_lengths_is_verl_s():
    recorded = np.load(FIXTURES / "policy_losses.npz")
    mask = recorded["mask"]
    output = advantages.length_weighted(
        recorded["rewards"], lengths=mask.sum(axis=1, dtype="f4"), group_size=4
    )
    ours = np.asarray(output)[:, None] * mask
    np.testing.assert_allclose(ours, recorded["opo"], atol=1e-6)


def test_advantages_over_a_greedy_response():
    expected = SCORES - np.repeat(SCORES[7::8], 8)
    output = advantages.over_greedy(SCORES, group_size=8)
    np.testing.assert_array_equal(output, expected)
    kept = ~np.isin(np.arange(24), (2, 15))  # a sample, and a greedy response
    output = advantages.over_greedy(
        np.where(kept, SCORES, np.nan).astype("f4"), group_size=8, row_mask=kept
    )
    counted = kept & (np.arange(24) // 8 != 1)
    np.testing.assert_array_equal(output, np.where(counted, expected, 0))


WEIGHTS = np.array([1.0, 0.5], np.float32)


def test_several_rewards_are_normalised_as_trl_has_it():
    recorded = np.load(FIXTURES / "regularisers.npz")
    output = advantages.decoupled(
        recorded["several"], weights=WEIGHTS, group_size=4, eps=1e-4
    )
    np.testing.assert_allclose(output, recorded["gdpo"], atol=1e-6)


def decoupled(rewards, kept, group_size):
    """Normalises each reward by its group and the sum by the batch, in f64 loops."""
    total = np.zeros(rewards.shape[1])
    for weight, reward in zip(WEIGHTS, rewards, strict=True):
        for first in range(0, len(total), group_size):
            rows = [i for i in range(first, first + group_size) if kept[i]]
            own = np.array([reward[i] for i in rows], np.float64)
            if len(rows) > 1 and own.std() > 0:
                total[rows] += weight * (own - own.mean()) / (own.std(ddof=1) + 1e-6)
    of_batch = total[kept]
    return np.where(kept, (total - of_batch.mean()) / of_batch.std(ddof=1), 0.0)


@pytest.mark.parametrize("some", [True, False])
def test_several_rewards_against_a_loop(some):
    kept = np.arange(24) % 8 != 3 if some else np.ones(24, bool)
    rewards = np.stack([SCORES, np.round(SCORES[::-1] * 10)])
    output = advantages.decoupled(
        np.where(kept, rewards, np.nan).astype(np.float32),
        weights=WEIGHTS,
        group_size=8,
        row_mask=kept if some else None,
    )
    np.testing.assert_allclose(
        output, decoupled(rewards, kept, 8), rtol=1e-4, atol=1e-5
    )


def test_equal_sums_of_rewards_may_have_an_advantage():
    """The scale of a reward has no effect, but its weight does."""
    rewards = np.array([[1, 0, 0.5, 0], [0, 1, 0.5, 0]], np.float32)
    plain = advantages.group_relative(rewards.sum(axis=0), group_size=4)
    assert float(plain[0]) == float(plain[1])
    output = advantages.decoupled(rewards, weights=WEIGHTS, group_size=4)
    assert float(output[0]) > 0.5 + float(output[1])
    scaled = advantages.decoupled(
        rewards * np.array([[1], [100]], np.float32), weights=WEIGHTS, group_size=4
    )
    np.testing.assert_allclose(scaled, output, rtol=1e-4)


def test_a_reward_of_weight_0_is_not_read():
    rewards = np.stack([SCORES, np.full(24, np.nan, np.float32)])
    weights = np.array([2.0, 0.0], np.float32)
    output = advantages.decoupled(rewards, weights=weights, group_size=8)
    alone = advantages.decoupled(SCORES[None], weights=weights[:1], group_size=8)
    np.testing.assert_allclose(output, alone, rtol=1e-6)


def test_by_hand():
    scores = jnp.array([1.0, 0.0, 2.0, 4.0, 4.0, 4.0])
    plain = advantages.group_relative(scores, group_size=3, normalise=False)
    np.testing.assert_array_equal(plain, [0, -1, 1, 0, 0, 0])
    # The deviation of 1, 0, 2 with one degree of freedom less is 1.
    scaled = advantages.group_relative(scores, group_size=3, eps=1e-12)
    np.testing.assert_allclose(scaled, [0, -1, 1, 0, 0, 0], atol=1e-6)
    others = advantages.leave_one_out(scores, group_size=3)
    np.testing.assert_array_equal(others, [0, -1.5, 1.5, 0, 0, 0])


def test_the_two_baselines_differ_by_a_factor():
    """s - mean of the others = G/(G - 1) · (s - mean of all)."""
    for group_size in (2, 3, 8):
        group = advantages.group_relative(
            SCORES, group_size=group_size, normalise=False
        )
        others = advantages.leave_one_out(SCORES, group_size=group_size)
        factor = group_size / (group_size - 1)
        np.testing.assert_allclose(others, factor * group, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("score", [0.1, 1e6, -3.3333333])
def test_equal_scores_have_no_advantage(score):
    """Although the float32 mean of equal numbers may differ from the number."""
    scores = jnp.full(7, score, jnp.float32)
    for output in (
        advantages.group_relative(scores, group_size=7),
        advantages.group_relative(scores, group_size=7, normalise=False),
        advantages.leave_one_out(scores, group_size=7),
    ):
        np.testing.assert_array_equal(output, np.zeros(7))
    assert advantages.equal_groups(scores, group_size=7).tolist() == [True]


@pytest.mark.slow
def test_groups_keep_to_themselves():
    """Scores of other groups have no effect, even if infinite or NaN."""
    poisoned = np.concatenate([SCORES[:4], np.full(4, np.nan), SCORES[8:]])
    poisoned[5] = np.inf
    alone = np.r_[0:4, 8:24]
    for function in (advantages.group_relative, advantages.leave_one_out):
        clean = np.asarray(function(SCORES, group_size=4))
        dirty = np.asarray(function(poisoned.astype(np.float32), group_size=4))
        np.testing.assert_array_equal(dirty[alone], clean[alone])
        assert np.isnan(dirty[4:8]).all()
    equal = advantages.equal_groups(jnp.array([1.0, 1.0, 2.0, 1.0]), group_size=2)
    assert equal.tolist() == [True, False]


def test_shifts_do_nothing_and_normalised_scales_neither():
    for normalise in (True, False):
        here, scaled = (
            advantages.group_relative(
                jnp.asarray(scores, jnp.float32), group_size=4, normalise=normalise
            )
            for scores in (SCORES, SCORES + 5)
        )
        np.testing.assert_allclose(here, scaled, atol=1e-5)
    doubled = advantages.group_relative(2 * SCORES, group_size=4)
    np.testing.assert_allclose(
        doubled, advantages.group_relative(SCORES, group_size=4), rtol=1e-4
    )


@pytest.mark.parametrize("level", [0.0, 1e6, -3e6])
def test_a_level_that_all_scores_share_costs_leave_one_out_no_digits(level):
    scores = (level + np.array([0.25, 1.5, 0.75, 0.5])).astype(np.float32)
    output = advantages.leave_one_out(scores, group_size=4)
    expected = oracles.leave_one_out(scores, 4)
    np.testing.assert_allclose(output, expected, rtol=1e-6)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("normalise", [True, False])
def test_nothing_is_nan_where_a_group_keeps_one_response_or_none(normalise):
    scores = jnp.array([1.0, 3.0, 2.0, 5.0, 1.0, 1.0])
    rows = jnp.array([True, True, False, True, False, False])
    with jax.debug_nans(True):
        output = advantages.group_relative(
            scores, group_size=2, normalise=normalise, row_mask=rows
        )
    deviation = np.sqrt(2.0) + 1e-6 if normalise else 1.0
    expected = np.array([-1, 1, 0, 0, 0, 0]) / deviation
    np.testing.assert_allclose(output, expected, rtol=1e-6)


@pytest.mark.parametrize("group_size", [1, 0, -2])
def test_groups_of_one_are_refused(group_size):
    for function in (
        advantages.group_relative,
        advantages.leave_one_out,
        advantages.equal_groups,
    ):
        with pytest.raises(InputError, match="expected at least 2"):
            function(SCORES, group_size=group_size)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="expected to divide the 24 rows"):
        advantages.leave_one_out(SCORES, group_size=5)
    with pytest.raises(ValueError, match="scores"):
        advantages.group_relative(SCORES[None], group_size=2)
    with pytest.raises(TypeError, match="float32"):
        advantages.group_relative(jnp.arange(4), group_size=2)


def test_they_run_under_jit():
    jitted = jax.jit(advantages.leave_one_out, static_argnames=("group_size",))
    np.testing.assert_allclose(
        jitted(SCORES, group_size=3),
        advantages.leave_one_out(SCORES, group_size=3),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.slow
@pytest.mark.parametrize("row_mask", [None, [True] * 8, [True] * 7 + [False]])
def test_the_slope_of_equal_scores_is_no_nan(row_mask):
    scores = jnp.array([0.1] * 4 + [1.0, 2.0, 3.0, 5.0], jnp.float32)
    mask = None if row_mask is None else jnp.array(row_mask)

    def total(scores):
        weights = jnp.arange(8, dtype=jnp.float32)
        made = advantages.group_relative(scores, group_size=4, row_mask=mask)
        return (weights * made).sum()

    gradient = np.asarray(jax.grad(total)(scores))
    assert (gradient[:4] == 0).all()
    assert np.isfinite(gradient).all()
    assert gradient[4:7].any()
