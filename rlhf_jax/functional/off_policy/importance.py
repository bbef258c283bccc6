"""Importance weights for tokens that another policy than the trainer drew.

μ drew the tokens, π_old is the trainer before the update. With r_t = π_old/μ of token t
and R = Π_t r_t of its response, the advantage of a token is multiplied by w_t:

    token_truncate      w_t = min(r_t, cap)
    token_mask          w_t = r_t where floor <= r_t <= cap, else 0
    sequence_truncate   w_t = min(R, cap)
    sequence_mask       w_t = R where floor <= R <= cap, else 0
    sequence_reject     w_t = 1; a response outside floor <= R <= cap is left out
    geometric_reject    w_t = 1; the same with R^(1/length)

Masked tokens (w_t = 0) still count in the divisor of a loss. Rejected responses do not.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, surrogates
from rlhf_jax.functional.errors import expect_none

Array = jax.Array
Correction = Literal[
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "sequence_reject",
    "geometric_reject",
]


class Weights(NamedTuple):
    """Importance weights of tokens, and where the bounds acted."""

    weights: Float32[Array, "B S"]  # w, 1 outside the mask, 0 where masked or rejected
    mask: Bool[Array, "B S"]  # the mask without rejected responses
    cut: Bool[Array, "B S"]  # tokens that were truncated, masked or rejected


def check_bounds(
    correction: Correction, *, cap: checks.Scalar, floor: checks.Scalar | None = None
) -> None:
    """Checks that a ratio of 1 is within the bounds of a correction.

    Args:
      cap: upper bound of a ratio, dimensionless, 1 or more.
      floor: lower bound, above 0 and at most 1; None is no bound. A truncation takes
        none.

    Raises:
      InputError: there is no such correction, or a bound does not fit.

    >>> print(check_bounds("token_mask", cap=5.0, floor=0.5))
    None
    >>> check_bounds("token_truncate", cap=0.5)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: cap: expected a number of at
        least 1, got 0.5; ...
    """
    checks.one_of(correction=correction, among=get_args(Correction))
    advice = "choose another, or leave it out"
    checks.within(least=1, advice=advice, cap=cap)
    checks.within(above=0, most=1, advice=advice, floor=floor)
    if correction.endswith("_truncate"):
        expect_none(
            f"with {correction!r}, which bounds weights from above alone",
            advice="leave it out, or choose a correction that masks or rejects",
            floor=floor,
        )


def importance_weights(
    *,
    logprobs: Float32[Array, "B S"],
    sampler_logprobs: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    correction: Correction,
    cap: checks.Scalar,
    floor: checks.Scalar | None = None,
) -> Weights:
    """w of each token, by the formula of `correction` in the module's table.

    Where logprobs and sampler_logprobs are equal every w is exactly 1. Weights have no
    gradient: they correct the distribution of the samples.

    Args:
      logprobs: f32[B, S], nats, log π_old of the trainer; column t is about
        tokens[:, t].
      sampler_logprobs: f32[B, S], nats, log μ of the policy that drew the tokens.
      cap, floor: bounds of the ratio (`check_bounds`).

    Returns:
      Weights[B, S]. `cut` marks tokens at or above the cap of a truncation, and tokens
      that are masked or rejected.

    Source: truncation is Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training" (of tokens), and Espeholt et al. 2018, arXiv:1802.01561;
    masks are IcePop, Ling Team 2025, arXiv:2510.18855 (of tokens), and Liu et al. 2025,
    "When speed kills stability", which also has truncation and rejection of sequences
    and of geometric means.

    >>> logprobs = jnp.log(jnp.array([[0.5, 0.9, 0.3]]))
    >>> sampler_logprobs = jnp.log(jnp.array([[0.5, 0.3, 0.6]]))  # r = 1, 3, 0.5
    >>> arrays = {"logprobs": logprobs, "sampler_logprobs": sampler_logprobs}
    >>> arrays |= {"mask": jnp.ones((1, 3), bool), "cap": 2.0}
    >>> print(importance_weights(**arrays, correction="token_truncate").weights)
    [[1.  2.  0.5]]
    >>> print(importance_weights(**arrays, correction="token_mask").weights)
    [[1.  0.  0.5]]
    >>> print(importance_weights(**arrays, correction="sequence_mask").weights)
    [[1.5 1.5 1.5]]
    """
    check_bounds(correction, cap=cap, floor=floor)
    checks.shape((None, None), mask=mask)
    checks.masked_floats(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    # Entries outside the mask become 0, -inf - -inf included.
    log_ratio = jax.lax.stop_gradient(jnp.where(mask, logprobs - sampler_logprobs, 0.0))
    if correction == "geometric_reject":
        log_ratio = surrogates.at_level(log_ratio, mask=mask, ratio_level="sequence")
    elif not correction.startswith("token"):
        total = jnp.sum(log_ratio, axis=1, keepdims=True)
        log_ratio = jnp.where(mask, total, 0.0)
    log_cap = jnp.log(jnp.float32(cap))
    if correction.endswith("_truncate"):
        # Bounded in logs: the ratio of a long response may overflow float32.
        weights = jnp.exp(jnp.minimum(log_ratio, log_cap))
        return Weights(weights, mask, mask & (log_ratio >= log_cap))
    within = log_ratio <= log_cap
    if floor is not None:
        within &= log_ratio >= jnp.log(jnp.float32(floor))
    cut = mask & ~within
    if correction.endswith("_reject"):
        return Weights(jnp.where(cut, 0.0, 1.0), mask & ~cut, cut)
    # Select before exp: ratios that are cut may overflow.
    weights = jnp.exp(jnp.where(within, log_ratio, 0.0))
    return Weights(jnp.where(cut, 0.0, weights), mask, cut)
