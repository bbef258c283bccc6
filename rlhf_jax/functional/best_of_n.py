"""Best-of-n: what drawing n responses and keeping the best of them does to a policy.

With F(s) = P_ref(score <= s) and F⁻(s) = P_ref(score < s), of one prompt, and ties
broken evenly,

    π_n(y) = π_ref(y)·(F(s_y)ⁿ - F⁻(s_y)ⁿ) / (F(s_y) - F⁻(s_y))

    KL(π_n ‖ π_ref) <= log n - (n - 1)/n          equal where no two draws ever tie

    n        2      4      16     64
    bound    0.193  0.636  1.835  3.175           nats
    exact                  1.330                  of four equally likely scores

Of the scores only their order matters; one that is not finite is below all that are.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.functional import checks

Array = jax.Array


def kl_bound(n: int) -> float:
    """log n - (n - 1)/n, nats: the KL of best-of-n, or a bound of it under ties.

    Args:
      n: responses drawn to a prompt, 1 or more.

    Raises:
      InputError: n is less than 1.

    Source: Hilton & Gao 2022, "Measuring Goodhart's law"; a bound: Beirami et al. 2024,
    arXiv:2401.01879.
    """
    _check_n(n)
    return math.log(n) - (n - 1) / n


def log_ratio(*, below: Array, equal: Array, n: int) -> Array:
    """log π_n(y)/π_ref(y) = log (Fⁿ - F⁻ⁿ)/(F - F⁻), of a response and its score.

    Without ties it is log n + (n - 1) log F.

    Args:
      below: f32[...], F⁻: probability of a lower score under the reference.
      equal: f32[...], F - F⁻: probability of this very score; 0 in a continuum.
      n: responses drawn to a prompt, 1 or more.

    Returns:
      f32[...], nats; log n at most, -inf where nothing lies as low as this response.

    Raises:
      ValueError: shapes differ. TypeError: not f32. InputError: n is less than 1.

    Source: Beirami et al. 2024, arXiv:2401.01879, where scores are distinct.
    """
    _check_n(n)
    checks.same_shape(below=below, equal=equal)
    checks.float32(below=below, equal=equal)
    return _log_ratio(jnp.log(below + equal), below=below, equal=equal, n=n)


def exact_kl(probabilities: Array, *, scores: Array, n: int) -> Array:
    """KL(π_n ‖ π_ref) = Σ_y π_n(y) log π_n(y)/π_ref(y), where all responses are known.

        score            0     1     1     2
        probabilities   1/4   1/8   1/8   1/2
        below            0    1/4   1/4   1/2
        equal           1/4   1/4   1/4   1/2

    Args:
      probabilities: f32[Y], π_ref of every response to one prompt. What their sum lacks
        of 1 by rounding, which n would multiply, is made up for.
      scores: f32[Y], in any unit; equal numbers are ties.
      n: responses drawn to a prompt, 1 or more.

    Returns:
      f32[], nats.

    Raises:
      ValueError: shapes differ or are not one axis. TypeError: not f32.
      InputError: n is less than 1.

    Source: as `log_ratio`.
    """
    checks.shape((None,), probabilities=probabilities, scores=scores)
    checks.same_shape(probabilities=probabilities, scores=scores)
    checks.float32(probabilities=probabilities, scores=scores)
    probabilities = probabilities / jnp.sum(probabilities)
    below, equal = (
        jnp.sum(jnp.where(counted, probabilities[None, :], 0.0), axis=1)
        for counted in _compare(scores, scores)
    )
    found = log_ratio(below=below, equal=equal, n=n)
    chosen = probabilities * jnp.exp(found)
    return jnp.sum(jnp.where(chosen > 0, chosen * found, 0.0))


def estimated_log_ratio(scores: Array, *, among: Array, n: int) -> Array:
    """log π_n(y)/π_ref(y) from other samples; its mean over the chosen ones is the KL.

    F is not known, but of the M samples of `among` b score lower and t the same. With
    c = b + t and ψ the digamma function,

        log F  ≈  ψ(c + 1) - ψ(M + 1)      F⁻/F  ≈  b / c

    The first is finite at c = 0, where log (c/M) is not, and its bias Σ_{k>M} (1-F)ᵏ/k
    vanishes for the high scores that are chosen. The second is needed for ties alone,
    and then is biased by an order of 1/M.

    Args:
      scores: f32[..., B], of responses that best-of-n chose for a prompt.
      among: f32[..., M], of responses to the same prompt that the reference drew apart
        from those; none of them stood for choice.
      n: responses drawn for each choice, 1 or more.

    Returns:
      f32[..., B], nats.

    Raises:
      ValueError: `among` is of other prompts (leading axes), or empty. TypeError: not
      f32. InputError: n is less than 1.

    Source: as `log_ratio`; the harmonic sum as log's unbiased estimate, Grassberger
    2003, arXiv:physics/0307138.
    """
    _check_n(n)
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


def selection_weights(scores: Array, *, n: int) -> Array:
    """w_i: how likely response i is the best of n drawn from N without replacement.

    With b scores below and t equal to response i's own (itself among them),

        w_i = (C(b + t, n) - C(b, n)) / (t·C(N, n))

    and Σ_i w_i·x_i is an unbiased estimate of E[x of the best of n], for any x of a
    response: its score (`expected_best`), what a judge says of it, its log-ratio. Of
    all such estimates from N samples none varies less (it is a U-statistic).

    Args:
      scores: f32[..., N], of independent samples of one prompt.
      n: responses drawn to a prompt, 1 to N.

    Returns:
      f32[..., N]; the last axis sums to 1.

    Raises:
      TypeError: not f32. InputError: n is not 1 to N.

    Source: Nakano et al. 2021, arXiv:2112.09332, appendix I; as pass@k of Chen et al.
    2021, arXiv:2107.03374, eq. 1.
    """
    checks.float32(scores=scores)
    size = scores.shape[-1]
    _check_n(n)
    if n > size:
        raise checks.InputError(
            f"n: expected at most the {size} samples of a prompt, got {n}; sample "
            f"more, or choose a smaller n"
        )
    # C(k, n) / C(N, n) for k = 0 to N, in float64 as C(N, n) soon has 80 digits.
    share = np.ones(size + 1)
    for k in range(size, 0, -1):
        share[k - 1] = share[k] * max(k - n, 0) / k
    table = jnp.asarray(share, jnp.float32)
    below, equal = _count(scores, scores)
    return (table[below + equal] - table[below]) / equal.astype(jnp.float32)


def expected_best(scores: Array, *, n: int) -> Array:
    """Unbiased estimate of E[max of n scores] from N >= n of them.

    Args, Raises: as `selection_weights`.

    Returns:
      f32[...], in the scores' unit; NaN where a score that is not finite would win.
    """
    weights = selection_weights(scores, n=n)
    finite = jnp.where(jnp.isfinite(scores), scores, jnp.nan)
    return jnp.sum(jnp.where(weights > 0, weights * finite, 0.0), axis=-1)


def finite_or_lowest(scores: Array) -> Array:
    """f32[...]: a score that is not finite as -inf, so that it loses to all others."""
    return jnp.where(jnp.isfinite(scores), scores, -jnp.inf)


def _compare(scores: Array, among: Array) -> tuple[Array, Array]:
    """bool[..., B, M] each: the other score is below this one, and is equal to it."""
    ours = finite_or_lowest(scores)[..., :, None]
    others = finite_or_lowest(among)[..., None, :]
    return others < ours, others == ours


def _count(scores: Array, among: Array) -> tuple[Array, Array]:
    """i32[..., B] each, of `_compare`."""
    below, equal = _compare(scores, among)
    return below.sum(axis=-1, dtype=jnp.int32), equal.sum(axis=-1, dtype=jnp.int32)


def _log_ratio(log_up_to: Array, *, below: Array, equal: Array, n: int) -> Array:
    """(n - 1) log F + log Σ_{k<n} ρᵏ with ρ = F⁻/F; the sum as (1 - ρⁿ)/(1 - ρ)."""
    if n == 1:
        return jnp.zeros_like(log_up_to)
    up_to = below + equal
    tie = jnp.where(up_to > 0, equal / jnp.where(up_to > 0, up_to, 1.0), 0.0)
    # A tie too rare to be seen in 1 - tie would be 0/0, and counts as none.
    log_rho = jnp.log1p(-jnp.where((tie > 0) & (tie < 1), tie, 0.5))
    powers = jnp.log(jnp.expm1(n * log_rho) / jnp.expm1(log_rho))
    # Nothing lies below the lowest score: ρ = 0, where log Σ ρᵏ is 0 and its slope 1.
    powers = jnp.where(tie < 1, powers, 1.0 - tie)
    return (n - 1) * log_up_to + jnp.where(tie > 0, powers, math.log(n))


def _check_n(n: int) -> None:
    if n < 1:
        raise checks.InputError(
            f"n: expected at least 1 response to a prompt, got {n}; n = 1 is the "
            f"reference itself"
        )
