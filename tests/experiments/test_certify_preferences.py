"""Losses of preferences in expectation: their gradients, optima and biases."""

import dataclasses
import math

import numpy as np
import pytest
from certificates import certify_preferences
from certificates.certify_preferences import Finding
from certificates.measured import preferences
from worlds import enumerable, optima

from rlhf_jax.functional.checks import InputError

BETA = 0.3


def small_world(count=4):
    """A world of few responses, without a decoder."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=count)
    return enumerable.World(
        start=None,
        reference=None,  # pyright: ignore[reportArgumentType]
        rewards=rng.normal(0, 0.5, count),
        log_ref=logits - np.logaddexp.reduce(logits),
    )


WORLD = small_world()
CLEAN = preferences.clean(WORLD.rewards)
NOISY = preferences.flipped(CLEAN, 0.2)
BEST = optima.optimum(WORLD.log_ref, WORLD.rewards, beta=BETA).log_policy
SOMEWHERE = np.log([0.1, 0.2, 0.3, 0.4])


@pytest.mark.slow
def test_robust_dpo_has_the_gradient_of_clean_labels_and_its_optimum():
    options = {"kind": "robust", "label_smoothing": 0.2}
    loss = preferences.dpo(WORLD, NOISY, beta=BETA, **options)
    named = preferences.dpo_gradient(WORLD, SOMEWHERE, CLEAN, beta=BETA)
    measured = preferences.gradient(loss, SOMEWHERE)
    np.testing.assert_allclose(measured, named, atol=1e-6)
    assert np.abs(named).max() > 1e-2
    np.testing.assert_allclose(preferences.gradient(loss, BEST), 0, atol=1e-6)
    optimum = preferences.dpo_optimum(WORLD, CLEAN, beta=BETA)
    assert enumerable.divergence(optimum, BEST) < 1e-8
    biased = preferences.dpo_optimum(WORLD, NOISY, beta=BETA)
    assert enumerable.divergence(biased, BEST) > 1e-3


@pytest.mark.slow
def test_training_ends_at_the_optimum_that_is_named():
    loss = preferences.dpo(WORLD, NOISY, beta=BETA, label_smoothing=0.2)
    twice = preferences.flipped(NOISY, 0.2)
    expected = preferences.dpo_optimum(WORLD, twice, beta=BETA)
    reached = preferences.reach(loss, WORLD, steps=400)
    assert enumerable.divergence(reached, expected) < 1e-5
    simpo = preferences.reach(preferences.simpo(WORLD, beta=2.0), WORLD)
    without = preferences.simpo_optimum(WORLD, beta=2.0)
    assert enumerable.divergence(simpo, without) < 1e-5


@pytest.mark.slow
def test_kto_s_gradient_is_its_formula_s_and_not_0_at_the_optimum():
    loss = preferences.kto(WORLD, beta=BETA)
    for log_policy in (SOMEWHERE, BEST):
        named = preferences.kto_gradient(WORLD, log_policy, beta=BETA)
        measured = preferences.gradient(loss, log_policy)
        np.testing.assert_allclose(measured, named, rtol=1e-4, atol=1e-7)
        assert np.abs(named).max() > 1e-3


def test_the_mixture_of_token_distributions():
    """With independent tokens it equals the mixture of response distributions."""
    rng = np.random.default_rng(0)

    def independent():
        tokens = rng.normal(size=(enumerable.LENGTH, enumerable.VOCABULARY))
        total = sum(
            tokens[column][enumerable.RESPONSES[:, column]]
            for column in range(enumerable.LENGTH)
        )
        return total - np.logaddexp.reduce(total)

    one, other = independent(), independent()
    whole = 0.7 * one + 0.3 * other
    whole -= np.logaddexp.reduce(whole)
    np.testing.assert_allclose(
        preferences.mixed(one, other, share=0.3), whole, atol=1e-10
    )
    unlike = rng.normal(size=256)
    unlike -= np.logaddexp.reduce(unlike)
    mix = preferences.mixed(unlike, one, share=0.3)
    assert np.exp(mix).sum() == pytest.approx(1)
    np.testing.assert_allclose(
        preferences.mixed(unlike, unlike, share=0.3), unlike, atol=1e-10
    )


@pytest.mark.slow
def test_the_fixed_point_of_nash_md_is_one():
    rng = np.random.default_rng(1)
    log_ref = rng.normal(size=256)
    world = dataclasses.replace(
        WORLD,
        rewards=rng.normal(size=256),
        log_ref=log_ref - np.logaddexp.reduce(log_ref),
    )
    fixed_point = preferences.nash(world, tau=0.2, share=0.25)
    mix = np.exp(preferences.mixed(fixed_point, world.log_ref, share=0.25))
    wins = preferences.clean(world.rewards) @ mix
    tilted = world.log_ref + wins / 0.2
    np.testing.assert_allclose(
        fixed_point, tilted - np.logaddexp.reduce(tilted), atol=1e-8
    )


def test_a_bias_that_is_not_seen_fails():
    exact = Finding("a", "π*", 1e-6, 1e-3, 1e-3, biased=False)
    assert exact.holds
    assert exact._replace(error=math.nan).holds
    assert not exact._replace(error=1e-4).holds
    assert not exact._replace(distance=0.1).holds
    biased = exact._replace(biased=True, from_best=0.5)
    assert biased.holds
    assert not biased._replace(from_best=1e-3).holds


def test_options_that_are_refused(tmp_path):
    with pytest.raises(InputError, match="flip_rate: expected a rate above 0"):
        certify_preferences.Config(out=tmp_path, flip_rate=0.5)
    with pytest.raises(InputError, match="num_worlds"):
        certify_preferences.Config(out=tmp_path, num_worlds=0)
    with pytest.raises(InputError, match="iterations"):
        certify_preferences.Config(out=tmp_path, iterations=10)
