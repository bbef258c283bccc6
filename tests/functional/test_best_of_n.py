"""Best-of-n against enumeration of all tuples and subsets in float64."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import toys

from rlhf_jax.functional import best_of_n
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")

PROBABILITIES = np.array([0.1, 0.25, 0.05, 0.2, 0.3, 0.1])
SCORES = np.array([0.5, -1.0, 2.0, 0.5, -1.0, 0.0])  # two ties of two


log_ratio, exact_kl_, estimated_log_ratio, selection_weights, expected_best = (
    toys.jit(function, static_argnames="n")
    for function in (
        best_of_n.log_ratio,
        best_of_n.exact_kl,
        best_of_n.estimated_log_ratio,
        best_of_n.selection_weights,
        best_of_n.expected_best,
    )
)


def f32(numbers):
    return jnp.asarray(numbers, jnp.float32)


def policy_of(probabilities, scores, n):
    """π_n by all tuples of n draws; ties share the probability of a tuple."""
    probabilities_of_best = np.zeros(len(scores))
    for drawn in itertools.product(range(len(scores)), repeat=n):
        best = max(scores[i] for i in drawn)
        winners = [i for i in drawn if scores[i] == best]
        for i in winners:
            probabilities_of_best[i] += np.prod(probabilities[list(drawn)]) / len(
                winners
            )
    return probabilities_of_best


def divergence(chosen, probabilities):
    pairs = zip(chosen, probabilities, strict=True)
    return sum(p * math.log(p / q) for p, q in pairs if p > 0)


def exact_kl(probabilities, scores, n):
    return exact_kl_(f32(probabilities), scores=f32(scores), n=n)


# --- the KL -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "nats"), [(1, 0.0), (2, 0.193), (4, 0.636), (16, 1.835), (64, 3.175)]
)
def test_the_bound(n, nats):
    assert best_of_n.kl_bound(n) == pytest.approx(nats, abs=5e-4)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_exact_kl_is_that_of_all_tuples(n):
    chosen = policy_of(PROBABILITIES, SCORES, n)
    assert chosen.sum() == pytest.approx(1)
    expected = divergence(chosen, PROBABILITIES)
    output = exact_kl(PROBABILITIES, SCORES, n)
    assert output.dtype == jnp.float32
    assert float(output) == pytest.approx(expected, abs=1e-6)
    assert float(output) <= best_of_n.kl_bound(n)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_ratio_of_each_response_is_that_of_all_tuples(n):
    below = [PROBABILITIES[score > SCORES].sum() for score in SCORES]
    equal = [PROBABILITIES[score == SCORES].sum() for score in SCORES]
    expected = np.log(policy_of(PROBABILITIES, SCORES, n) / PROBABILITIES)
    output = log_ratio(below=f32(below), equal=f32(equal), n=n)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_four_equally_likely_levels_cost_less_than_the_bound():
    assert float(exact_kl([0.25] * 4, [0, 1, 2, 3], 16)) == pytest.approx(
        1.330, abs=5e-4
    )
    # A level may be one response or many, and any numbers in its order.
    split = exact_kl([0.125] * 8, [3.0, 1e6, -5.0, 3.5, 3.0, 1e6, -5.0, 3.5], 16)
    assert float(split) == pytest.approx(1.330, abs=5e-4)


@pytest.mark.slow
def test_the_bound_is_reached_as_ties_go():
    gaps = [
        best_of_n.kl_bound(8) - float(exact_kl(np.full(y, 1 / y), np.arange(y), 8))
        for y in (2, 16, 1024)
    ]
    assert all(np.diff(gaps) < 0)
    assert 0 < gaps[-1] < 5e-3


def test_what_is_all_one_level_costs_nothing():
    assert float(exact_kl([0.2, 0.3, 0.5], [7, 7, 7], 64)) == pytest.approx(0, abs=1e-6)


def test_ever_more_draws_leave_the_best_level_alone():
    assert float(exact_kl(PROBABILITIES, SCORES, 5000)) == pytest.approx(
        -math.log(0.05), abs=1e-5
    )


def test_a_response_that_cannot_come_costs_nothing():
    output = exact_kl([0.0, 0.5, 0.0, 0.5], [-1, 0, 1, 2], 3)
    assert float(output) == pytest.approx(float(exact_kl([0.5, 0.5], [0, 2], 3)))


@pytest.mark.parametrize("n", [2, 64, 1000])
def test_the_ratio_where_ties_are_rare_or_all_there_is(n):
    below, equal = (
        np.array([0.3, 0.3, 0.9, 0.0, 0.0, 0.999]),
        np.array([0.0, 1e-7, 1e-3, 0.2, 1.0, 1e-5]),
    )
    rho = below / (below + equal)
    powers = [sum(r**k for k in range(n)) for r in rho]
    expected = (n - 1) * np.log(below + equal) + np.log(powers)
    output = log_ratio(below=f32(below), equal=f32(equal), n=n)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)


# --- measured ---------------------------------------------------------------------


def harmonic(k):
    return sum(1 / j for j in range(1, k + 1))


def estimate(scores, among, n):
    return estimated_log_ratio(f32(scores), among=f32(among), n=n)


@pytest.mark.parametrize("n", [1, 7])
def test_the_estimate_by_counting(n):
    among = [[0.1, 0.4, 0.4, 0.9], [0.0, 0.0, 0.0, -2.0]]
    scores = [[0.4, 1.0, 0.05], [0.0, 0.5, -3.0]]
    output = estimate(scores, among, n)
    for i, j in np.ndindex(2, 3):
        below = sum(other < scores[i][j] for other in among[i])
        up_to = sum(other <= scores[i][j] for other in among[i])
        powers = [(below / up_to if up_to > below else 1.0) ** k for k in range(n)]
        log_f = harmonic(up_to) - harmonic(4)
        expected = (n - 1) * log_f + math.log(sum(powers))
        assert float(output[i, j]) == pytest.approx(expected, abs=1e-5)


def binomial(m, p):
    return [math.comb(m, k) * p**k * (1 - p) ** (m - k) for k in range(m + 1)]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_the_estimate_has_no_bias_but_a_tail(share):
    """Its mean over the number of 40 samples with lower scores, summed exactly."""
    among = np.arange(40.0)
    output = np.asarray(estimate(np.arange(41) - 0.5, among, 5), np.float64)
    mean = float(output @ binomial(40, share))
    tail = sum((1 - share) ** k / k for k in range(41, 2000))
    expected = math.log(5) + 4 * (math.log(share) + tail)
    assert mean == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(("n", "size"), [(2, 8), (16, 8), (64, 8)])
def test_its_mean_over_what_best_of_n_chooses_is_the_bound(n, size):
    """Without ties, for any number of other samples: F of the best is Beta."""
    output = np.asarray(estimate(np.arange(size + 1) - 0.5, np.arange(size), n))
    chance = [
        # Of n + M samples the best of the n has k of the M below it.
        n / (n + size) * math.comb(size, k) / math.comb(n + size - 1, n + k - 1)
        for k in range(size + 1)
    ]
    assert sum(chance) == pytest.approx(1)
    assert float(output @ chance) == pytest.approx(best_of_n.kl_bound(n), abs=2e-2)


@pytest.mark.slow
def test_with_ties_it_comes_to_the_exact_kl():
    rng = np.random.default_rng(0)
    n, groups = 6, 4000
    drawn = rng.choice(SCORES, p=PROBABILITIES, size=(groups, n)).max(axis=1)
    among = rng.choice(SCORES, p=PROBABILITIES, size=2000)
    mean = float(estimate(drawn, among, n).mean())
    exact = divergence(policy_of(PROBABILITIES, SCORES, n), PROBABILITIES)
    assert exact < best_of_n.kl_bound(n) - 0.1
    assert mean == pytest.approx(exact, abs=0.06)


def test_a_score_that_is_not_finite_is_below_all_that_are():
    odd = [math.nan, -math.inf, math.inf]
    output = estimate([0.0, *odd], [*odd, 1.0, -1.0], 3)
    expected = estimate([0.0, -9.0, -9.0, -9.0], [-9.0, -9.0, -9.0, 1.0, -1.0], 3)
    np.testing.assert_array_equal(output, expected)
    assert np.isfinite(output).all()


# --- the best of some -------------------------------------------------------------

SAMPLES = np.array([0.3, -1.2, 0.3, 2.5, 0.0, 2.5, 0.3])


def weights_of(scores, n):
    """The weights by all subsets of n; ties share the weight of a subset."""
    output = np.zeros(len(scores))
    subsets = [*itertools.combinations(range(len(scores)), n)]
    for drawn in subsets:
        best = max(scores[i] for i in drawn)
        winners = [i for i in drawn if scores[i] == best]
        output[winners] += 1 / len(winners) / len(subsets)
    return output


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_weights_are_those_of_all_subsets(n):
    output = selection_weights(f32([SAMPLES, SAMPLES[::-1]]), n=n)
    expected = weights_of(SAMPLES, n)
    np.testing.assert_allclose(output, [expected, expected[::-1]], atol=2e-7)
    np.testing.assert_allclose(output.sum(axis=1), 1, atol=1e-6)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_expected_best_is_the_mean_over_all_subsets(n):
    expected = np.mean([max(drawn) for drawn in itertools.combinations(SAMPLES, n)])
    output = expected_best(f32(SAMPLES), n=n)
    assert float(output) == pytest.approx(expected, abs=1e-6)


def test_expected_best_has_no_bias():
    """Its mean over all sets of 4 draws is E[max of 2], also with ties."""
    chosen = policy_of(PROBABILITIES, SCORES, 2)
    drawn = np.array([*itertools.product(range(6), repeat=4)])
    chance = PROBABILITIES[drawn].prod(axis=1)
    output = expected_best(f32(SCORES[drawn]), n=2)
    assert float(np.asarray(output) @ chance) == pytest.approx(
        chosen @ SCORES, abs=1e-6
    )
    # And of anything else that is said of the one that is chosen.
    numbers = np.array([3.0, 1.0, -4.0, 1.0, 5.0, 9.0])
    weights = selection_weights(f32(SCORES[drawn]), n=2)
    mean = (np.asarray(weights) * numbers[drawn]).sum(axis=1) @ chance
    assert mean == pytest.approx(chosen @ numbers, abs=1e-5)


def test_many_samples_do_not_overflow():
    scores = np.random.default_rng(0).normal(size=600)
    output = expected_best(f32(scores), n=300)
    ranked = np.sort(scores)
    total = math.comb(600, 300)
    expected = sum(
        score * (math.comb(rank, 299) / total) for rank, score in enumerate(ranked)
    )
    assert float(output) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_what_is_not_finite_wins_only_where_nothing_else_is():
    scores = f32([[1.0, math.nan, math.inf, 0.0]])
    expected = selection_weights(f32([[1.0, -9.0, -9.0, 0.0]]), n=2)
    np.testing.assert_array_equal(best_of_n.selection_weights(scores, n=2), expected)
    assert np.isnan(expected_best(scores, n=2)).all()
    assert float(expected_best(scores, n=3)[0]) == pytest.approx(
        0.75 * 1.0 + 0.25 * 0.0
    )


@pytest.mark.slow
def test_uncompiled_it_is_the_same():
    for n in (1, 3):
        output = best_of_n.expected_best(f32(SAMPLES), n=n)
        compiled = expected_best(f32(SAMPLES), n=n)
        assert float(output) == pytest.approx(float(compiled), abs=1e-6)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: best_of_n.kl_bound(0),
            InputError,
            "n: expected a whole number",
        ),
        (lambda: exact_kl([1.0], [1.0], 0), InputError, "n: expected a whole number"),
        (lambda: exact_kl([1.0], [1.0, 2.0], 2), ValueError, "arrays of one shape"),
        (lambda: exact_kl([[1.0]], [[1.0]], 2), ValueError, "probabilities: expected"),
        (
            lambda: best_of_n.exact_kl(jnp.ones(2, int), scores=f32([0, 1]), n=2),
            TypeError,
            "probabilities: expected float32, got int32",
        ),
        (lambda: estimate([1.0], [], 2), InputError, "among: expected at least 1"),
        (lambda: estimate([[1.0]], [1.0], 2), ValueError, "among: expected shape"),
        (lambda: estimate([1.0], [1.0], 0), InputError, "n: expected a whole number"),
        (
            lambda: best_of_n.expected_best(f32([1, 2, 3]), n=4),
            InputError,
            "n: expected a number of at most 3, got 4; sample more",
        ),
        (
            lambda: best_of_n.selection_weights(jnp.ones(3, int), n=2),
            TypeError,
            "scores: expected float32, got int32",
        ),
    ],
)
def test_wrong_input_says_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
