"""Best-of-n: the policy that draws n responses from the reference and keeps the best.

For one prompt let F(s) = P_ref(score <= s) and F⁻(s) = P_ref(score < s). With ties
broken evenly,

    π_n(y) = π_ref(y)·(F(s_y)ⁿ - F⁻(s_y)ⁿ) / (F(s_y) - F⁻(s_y))

    KL(π_n ‖ π_ref) <= log n - (n - 1)/n          with equality where scores never tie

    n        2      4      16     64
    bound    0.193  0.636  1.835  3.175           nats
    exact                  1.330                  of four equally likely scores

n is the number of responses that are drawn for a prompt, 1 or more. Only the order
of the scores matters. A score that is not finite is below all others.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32

from rlhf_jax.functional import checks

Array = jax.Array


def kl_bound(n: int) -> float:
    """log n - (n - 1)/n: the KL of best-of-n, an upper bound where scores tie.

    Source: Hilton & Gao 2022, "Measuring Goodhart's law"; a bound: Beirami et al. 2024,
    arXiv:2401.01879.

    >>> print(f"{kl_bound(4):.3f}")
    0.636
    >>> print(kl_bound(1))  # best-of-1 is the reference
    0.0
    """
    checks.at_least_one(n=n)
    return math.log(n) - (n - 1) / n


def log_ratio(
    *, below: Float32[Array, "*shape"], equal: Float32[Array, "*shape"], n: int
) -> Float32[Array, "*shape"]:
    """log π_n(y)/π_ref(y) = log (Fⁿ - F⁻ⁿ)/(F - F⁻) of a response y.

    Without ties it is log n + (n - 1) log F.

    Args:
      below: f32[...], F⁻: probability of a lower score under the reference.
      equal: f32[...], F - F⁻: probability of an equal score; 0 for continuous scores.

    Returns:
      f32[...], nats; at most log n, and -inf where F is 0.

    Source: Beirami et al. 2024, arXiv:2401.01879, for distinct scores.

    >>> below, equal = jnp.array([0.0, 0.5]), jnp.array([0.5, 0.5])
    >>> print(log_ratio(below=below, equal=equal, n=2))  # log(0.5), log(1.5)
    [-0.693  0.405]
    >>> print(log_ratio(below=jnp.array([0.5, 1.0]), equal=jnp.zeros(2), n=4))
    [-0.693  1.386]
    """
    checks.at_least_one(n=n)
    checks.same_shape(below=below, equal=equal)
    checks.float32(below=below, equal=equal)
    return _log_ratio(jnp.log(below + equal), below=below, equal=equal, n=n)


def exact_kl(
    probabilities: Float32[Array, " Y"], *, scores: Float32[Array, " Y"], n: int
) -> Float32[Array, ""]:
    """KL(π_n ‖ π_ref) = Σ_y π_n(y) log π_n(y)/π_ref(y), over all possible responses.

        score            0     1     1     2
        probabilities   1/4   1/8   1/8   1/2
        below            0    1/4   1/4   1/2
        equal           1/4   1/4   1/4   1/2

    Args:
      probabilities: f32[Y], π_ref of every response to one prompt. They are divided by
        their sum, as n would amplify its rounding error.
      scores: f32[Y], in any unit; equal numbers are ties.

    Source: Beirami et al. 2024, arXiv:2401.01879, for distinct scores.

    >>> quarter = jnp.array([0.25, 0.25, 0.25, 0.25])
    >>> scores = jnp.array([0.0, 1.0, 2.0, 3.0])
    >>> print(exact_kl(quarter, scores=scores, n=16))  # at most log 4
    1.33
    >>> print(exact_kl(quarter, scores=jnp.array([5.0, 5.0, 5.0, 5.0]), n=16))
    0.0
    """
    checks.shape((None,), probabilities=probabilities, scores=scores)
    checks.same_shape(probabilities=probabilities, scores=scores)
    checks.float32(probabilities=probabilities, scores=scores)
    probabilities = probabilities / jnp.sum(probabilities)
    below, equal = (
        jnp.sum(jnp.where(counted, probabilities[None, :], 0.0), axis=1)
        for counted in _compare(scores, scores)
    )
    log_ratios = log_ratio(below=below, equal=equal, n=n)
    chosen = probabilities * jnp.exp(log_ratios)
    return jnp.sum(jnp.where(chosen > 0, chosen * log_ratios, 0.0))


def estimated_log_ratio(
    scores: Float32[Array, "*prompts B"], *, among: Float32[Array, "*prompts M"], n: int
) -> Float32[Array, "*prompts B"]:
    """log π_n(y)/π_ref(y) estimated from samples; its mean over chosen y is the KL.

    F is estimated from M samples `among`, of which b have a lower score and t an equal
    one. With c = b + t and ψ the digamma function,

        log F  ≈  ψ(c + 1) - ψ(M + 1)      F⁻/F  ≈  b / c

    The first estimate is finite at c = 0, unlike log (c/M), and its bias
    Σ_{k>M} (1-F)ᵏ/k vanishes for the high scores that are chosen. The second one
    matters for ties only, and has a bias of order 1/M.

    Args:
      scores: f32[..., B], of responses that best-of-n chose for a prompt.
      among: f32[..., M], of other responses of the reference to the same prompt; none
        may have been a candidate for `scores`.

    Raises:
      ValueError: the leading axes (prompts) differ, or `among` is empty. TypeError: not
      f32. InputError: n is less than 1.

    Source: Beirami et al. 2024, arXiv:2401.01879; the estimate of log F by harmonic
    sums is Grassberger 2003, arXiv:physics/0307138.

    >>> among = jnp.array([0.0, 1.0, 2.0, 3.0])
    >>> print(estimated_log_ratio(jnp.array([1.0, 4.0]), among=among, n=2))
    [-0.178  0.693]
    >>> print(estimated_log_ratio(jnp.array([1.0, 4.0]), among=among, n=1))
    [0. 0.]
    """
    checks.at_least_one(n=n)
    checks.float32(scores=scores, among=among)
    checks.shape((*scores.shape[:-1], None), among=among)
    size = among.shape[-1]
    if not size:
        raise checks.InputError(
            "among: expected at least 1 score to compare with, got none; sample more "
            "responses to each prompt"
        )
    below, equal = _count(scores, among)
    # ψ(c + 1) - ψ(M + 1) = -(1/(c + 1) + ... + 1/M) for c = 0 to M, in float64.
    table = np.append(-np.cumsum(1 / np.arange(size, 0.0, -1))[::-1], 0.0)
    return _log_ratio(
        jnp.asarray(table, jnp.float32)[below + equal],
        below=below.astype(jnp.float32),
        equal=equal.astype(jnp.float32),
        n=n,
    )


def selection_weights(
    scores: Float32[Array, "*prompts N"], *, n: int
) -> Float32[Array, "*prompts N"]:
    """w_i: probability that response i is the best of n drawn without replacement.

    Let b of the N scores be below that of response i, and t equal to it (i included):

        w_i = (C(b + t, n) - C(b, n)) / (t·C(N, n))

    Σ_i w_i·x_i is an unbiased estimate of E[x of the best of n] for any number x of a
    response: its score (`expected_best`), another reward, its log-ratio. It is a
    U-statistic: no unbiased estimate from the N samples has a smaller variance.

    Args:
      scores: f32[..., N], of independent samples of one prompt.

    Returns:
      f32[..., N], dimensionless; the last axis sums to 1.

    Source: Nakano et al. 2021, arXiv:2112.09332, appendix I; compare pass@k of Chen et
    al. 2021, arXiv:2107.03374, eq. 1.

    >>> print(selection_weights(jnp.array([3.0, 1.0, 2.0, 0.0]), n=2))
    [0.5   0.167 0.333 0.   ]
    >>> print(selection_weights(jnp.array([3.0, 3.0, 2.0, 0.0]), n=4))  # a tie
    [0.5 0.5 0.  0. ]
    """
    checks.float32(scores=scores)
    size = scores.shape[-1]
    checks.at_least_one(n=n)
    checks.within(most=size, advice="sample more, or choose a smaller n", n=n)
    # C(k, n) / C(N, n) for k = 0 to N, in float64: C(N, n) exceeds float32.
    share = np.ones(size + 1)
    for k in range(size, 0, -1):
        share[k - 1] = share[k] * max(k - n, 0) / k
    table = jnp.asarray(share, jnp.float32)
    below, equal = _count(scores, scores)
    return (table[below + equal] - table[below]) / equal.astype(jnp.float32)


def expected_best(
    scores: Float32[Array, "*prompts N"], *, n: int
) -> Float32[Array, "*prompts"]:
    """Returns an unbiased estimate of E[max of n scores] from N >= n samples.

    Args:
      scores: f32[..., N], of independent samples of one prompt.

    Returns:
      f32[...], in the scores' unit; NaN where a score that is not finite can win.

    >>> scores = jnp.array([3.0, 1.0, 2.0, 0.0])
    >>> print(expected_best(scores, n=1))  # the mean
    1.5
    >>> print(expected_best(scores, n=4))  # the largest
    3.0
    """
    weights = selection_weights(scores, n=n)
    finite = jnp.where(jnp.isfinite(scores), scores, jnp.nan)
    return jnp.sum(jnp.where(weights > 0, weights * finite, 0.0), axis=-1)


def finite_or_lowest(scores: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Replaces scores that are not finite by -inf, so that they never win.

    >>> print(finite_or_lowest(jnp.array([1.0, jnp.inf, jnp.nan, -2.0])))
    [  1. -inf -inf  -2.]
    >>> print(jnp.argmax(finite_or_lowest(jnp.array([1.0, jnp.inf, 2.0, -2.0]))))
    2
    """
    return jnp.where(jnp.isfinite(scores), scores, -jnp.inf)


def _compare(
    scores: Float32[Array, "*prompts B"], among: Float32[Array, "*prompts M"]
) -> tuple[Bool[Array, "*prompts B M"], Bool[Array, "*prompts B M"]]:
    """Whether each score `among` is below each of `scores`, and whether it is equal."""
    ours = finite_or_lowest(scores)[..., :, None]
    others = finite_or_lowest(among)[..., None, :]
    return others < ours, others == ours


def _count(
    scores: Float32[Array, "*prompts B"], among: Float32[Array, "*prompts M"]
) -> tuple[Int32[Array, "*prompts B"], Int32[Array, "*prompts B"]]:
    """The numbers of scores `among` below each of `scores`, and equal to it."""
    below, equal = _compare(scores, among)
    return below.sum(axis=-1, dtype=jnp.int32), equal.sum(axis=-1, dtype=jnp.int32)


def _log_ratio(log_up_to: Array, *, below: Array, equal: Array, n: int) -> Array:
    """(n - 1) log F + log Σ_{k<n} ρᵏ with ρ = F⁻/F; the sum as (1 - ρⁿ)/(1 - ρ)."""
    if n == 1:
        return jnp.zeros_like(log_up_to)
    up_to = below + equal
    tie = jnp.where(up_to > 0, equal / jnp.where(up_to > 0, up_to, 1.0), 0.0)
    # Where 1 - tie rounds to 1 the quotient would be 0/0: count such a tie as none.
    log_rho = jnp.log1p(-jnp.where((tie > 0) & (tie < 1), tie, 0.5))
    powers = jnp.log(jnp.expm1(n * log_rho) / jnp.expm1(log_rho))
    # The lowest score has ρ = 0, where log Σ ρᵏ is 0 and its slope is 1.
    powers = jnp.where(tie < 1, powers, 1.0 - tie)
    return (n - 1) * log_up_to + jnp.where(tie > 0, powers, math.log(n))
