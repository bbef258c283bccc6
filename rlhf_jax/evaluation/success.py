"""Scores of the best, or the majority, of k responses to one prompt.

n responses are sampled, and the expectation over k <= n of them is estimated.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError


def pass_at_k(correct: int, *, num_samples: int, k: int) -> float:
    """Probability that at least one of k responses is right.

        pass@k = 1 - C(n - c, k) / C(n, k)

    c = `correct` of the n = `num_samples` are right. k of them are drawn without
    replacement, which is unbiased for k fresh samples; 1 - (1 - c/n)^k is not.

    Raises:
      InputError: k is not in [1, n], or c not in [0, n].

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    _check_k(k, num_samples=num_samples)
    checks.within(
        least=0,
        most=num_samples,
        advice="count the right ones among the samples",
        correct=correct,
    )
    # Exact integers, rounded only by the division.
    wrong, drawn = math.comb(num_samples - correct, k), math.comb(num_samples, k)
    return (drawn - wrong) / drawn


def best_at_k(scores: Sequence[float], *, k: int) -> float:
    """Expected largest score of k responses (best-of-k).

        best@k = Σ_i s_(i) C(i - 1, k - 1) / C(n, k),      s_(1) <= ... <= s_(n)

    k of the n samples are drawn without replacement: the i-th smallest is the largest
    of C(i - 1, k - 1) of the C(n, k) subsets. Equal to `pass_at_k` for scores of 0 and
    1, and to the mean for k = 1.

    Scores and result are in reward units.

    Raises:
      InputError: k is not in [1, n].
    """
    ordered = sorted(scores)
    _check_k(k, num_samples=len(ordered))
    drawn = math.comb(len(ordered), k)
    return math.fsum(
        score * (math.comb(rank, k - 1) / drawn) for rank, score in enumerate(ordered)
    )


def majority_at_k(
    answers: Sequence[str | None], right: Sequence[bool], *, k: int
) -> float:
    """Share of groups of k responses whose most frequent answer is right (maj@k).

        k = 3        a  b  a | b  b  c | a         a is right: 1/2

    The groups are consecutive and disjoint; a shorter rest at the end is not counted.
    Tied answers share the vote equally. A response without an answer does not vote, and
    a group without votes is wrong. Equal answers must be equal strings.

    Raises:
      InputError: k is not in [1, n], or the lengths differ.

    Source: Wang et al. 2022, arXiv:2203.11171 (self-consistency).
    """
    if len(answers) != len(right):
        raise InputError(
            f"right: expected one entry for each of the {len(answers)} answers, got "
            f"{len(right)}; give both for every sample"
        )
    _check_k(k, num_samples=len(answers))
    groups = [
        _majority(answers[start : start + k], right[start : start + k])
        for start in range(0, len(answers) - k + 1, k)
    ]
    return math.fsum(groups) / len(groups)


def _majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Share of the votes for a group's most frequent answers that are right."""
    votes = collections.Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = {answer for answer, count in votes.items() if count == most}
    # A verifier may judge equal answers differently, so each vote counts by itself.
    counted = [
        ok for answer, ok in zip(answers, right, strict=True) if answer in winners
    ]
    return sum(counted) / len(counted)


def _check_k(k: int, *, num_samples: int) -> None:
    advice = "sample more responses to a prompt, or ask for less"
    checks.within(least=1, most=num_samples, advice=advice, k=k)
