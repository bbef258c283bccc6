"""pass@k, best@k and majority@k against brute force over every subset."""

import itertools

import numpy as np
import pytest

from rlhf_jax.evaluation import success
from rlhf_jax.functional.checks import InputError

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(num_samples):
    for correct in range(num_samples + 1):
        right = [True] * correct + [False] * (num_samples - correct)
        for k in range(1, num_samples + 1):
            subsets = [any(drawn) for drawn in itertools.combinations(right, k)]
            estimate = success.pass_at_k(correct, num_samples=num_samples, k=k)
            assert estimate == pytest.approx(np.mean(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased_for_fresh_samples():
    """Its mean over all outcomes of 5 samples is 1 - (1 - p)^3, within rounding."""
    p, n, k = 0.3, 5, 3
    expected = 0.0
    for outcome in itertools.product([True, False], repeat=n):
        correct = sum(outcome)
        chance = p**correct * (1 - p) ** (n - correct)
        expected += chance * success.pass_at_k(correct, num_samples=n, k=k)
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_of_many_samples():
    assert success.pass_at_k(1, num_samples=10_000, k=100) == pytest.approx(0.01)
    assert success.pass_at_k(9_990, num_samples=10_000, k=11) == 1.0


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("num_samples", [1, 3, 7])
def test_best_at_k_is_the_mean_of_the_largest_over_subsets(num_samples, ties):
    scores = RNG.normal(size=num_samples)
    if ties:
        scores = np.round(scores)
    for k in range(1, num_samples + 1):
        best = [max(drawn) for drawn in itertools.combinations(scores, k)]
        estimate = success.best_at_k(list(scores), k=k)
        assert estimate == pytest.approx(np.mean(best), abs=1e-12)


def test_best_at_k_of_zeros_and_ones_is_pass_at_k():
    scores = [1.0, 0.0, 0.0, 1.0, 0.0]
    for k in range(1, 6):
        assert success.best_at_k(scores, k=k) == pytest.approx(
            success.pass_at_k(2, num_samples=5, k=k), abs=1e-15
        )


def majority(answers, right):
    """By counting: every tied answer wins in turn."""
    voted = [answer for answer in answers if answer is not None]
    most = max((voted.count(answer) for answer in voted), default=0)
    tied = [a for a in dict.fromkeys(voted) if voted.count(a) == most]
    if not tied:
        return 0.0
    return sum(right[answers.index(answer)] for answer in tied) / len(tied)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_majority_of_every_outcome(k):
    """All outcomes of 4 samples: the right answer, two wrong ones, or none."""
    for answers in itertools.product(["right", "a", "b", None], repeat=4):
        right = [answer == "right" for answer in answers]
        groups = [
            majority(answers[start : start + k], right[start : start + k])
            for start in range(0, 4, k)
            if start + k <= 4
        ]
        estimate = success.majority_at_k(answers, right, k=k)
        assert estimate == pytest.approx(np.mean(groups), abs=1e-15), answers


def test_a_majority_by_hand():
    answers = ["a", "b", "a", "b", "b", "c", "a"]
    right = [answer == "a" for answer in answers]
    assert success.majority_at_k(answers, right, k=3) == 0.5
    assert success.majority_at_k(answers[:2], right[:2], k=2) == 0.5  # a tie


@pytest.mark.parametrize("k", [0, 4])
def test_a_k_beyond_the_samples_is_refused(k):
    for call in (
        lambda: success.pass_at_k(1, num_samples=3, k=k),
        lambda: success.best_at_k([1.0, 2.0, 3.0], k=k),
        lambda: success.majority_at_k(["a"] * 3, [True] * 3, k=k),
    ):
        with pytest.raises(InputError, match=f"k: .* at most 3, got {k}; sample more"):
            call()


def test_counts_that_do_not_fit_are_refused():
    with pytest.raises(
        InputError, match=r"correct: .* at least 0 and of at most 3, got 4"
    ):
        success.pass_at_k(4, num_samples=3, k=1)
    with pytest.raises(InputError, match="right: expected one entry for each of the 2"):
        success.majority_at_k(["a", "b"], [True], k=1)
