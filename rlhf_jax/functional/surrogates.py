"""Probability ratios, and the surrogates CISPO and SAPO.

CISPO clips the ratio as a constant weight, SAPO has a soft gate in place of the clip:

                 gradient of a token's loss with respect to its log-prob
    policy_loss  -ρA where the clip does not bind, else 0
    CISPO        -min(max(ρ, 1 - ε), 1 + ε_high)·A     no token is left out
    SAPO         -4·σ(1 - σ)·ρA,  σ = sigmoid(τ(ρ - 1))   falls off smoothly

At ρ = 1 all three are -A.
"""

from __future__ import annotations

from typing import Literal, Unpack, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.aggregation import Mean, aggregate

Array = jax.Array
Scalar = checks.Scalar
Stats = masked.Stats
LARGE = 80.0  # nats: products above e^80 are computed as sums of logs
LARGEST = 88.72  # nats: e^88.72 is the largest exponential in float32

BinaryDivergence = Literal["tv", "kl"]
"""Over the sampled token and all others: total variation |π - μ|, or KL(μ ‖ π)."""

RatioLevel = Literal["token", "sequence", "sequence_token"]
"""The probability ratio ρ that the loss of a token reads.

token: the ratio of the token itself.
sequence: the ratio of its response, to the power of 1/length, which is the geometric
mean of the ratios of its tokens (GSPO).
sequence_token: the same number, with the gradient of the token's own log-prob, for
advantages that differ within a response (GSPO-token).
"""


def capped_exp(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """exp(min(x, 88.72)), whose slope equals its value above 88.72 too.

    The slope at infinity is 0.

    Returns:
      f32[...], dimensionless, finite unless x is NaN.

    >>> print(capped_exp(jnp.array([0.0, 1.0, -jnp.inf])))
    [1.    2.718 0.   ]
    >>> print(jnp.isfinite(capped_exp(jnp.array([80.0, 1000.0, jnp.inf]))))
    [ True  True  True]
    """
    # min(x, ·) alone has slope 0 above the bound: a token far off would get no gradient
    # that brings it back.
    capped = jnp.exp(jax.lax.stop_gradient(jnp.minimum(x, LARGEST)))
    finite = jnp.where(jnp.isinf(x), 0.0, x)
    return capped * (1.0 + (finite - jax.lax.stop_gradient(finite)))


def at_level(
    log_ratio: Float32[Array, "*shape"],
    *,
    mask: Bool[Array, "*shape"],
    ratio_level: RatioLevel,
) -> Float32[Array, "*shape"]:
    """log ρ of each token at a ratio level, from the log-ratios of single tokens.

        token             log ρ_t = x_t
        sequence          log ρ_t = log s,  log s = (1/len) Σ_t m·x_t
        sequence_token    log ρ_t = sg(log s) + x_t - sg(x_t)

    Where all advantages of a response are equal, as group advantages are, the last two
    have the same gradient under every aggregation.

    Args:
      log_ratio: f32[B, S], nats, x = log π - log π_old; the gradient reaches it.

    Returns:
      f32[B, S], nats, 0 outside the mask; for token, `log_ratio` itself.

    Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 7 and 14.

    >>> x = jnp.array([[0.2, -0.1, 9.0], [0.3, 9.0, 9.0]])
    >>> mask = jnp.array([[True, True, False], [True, False, False]])
    >>> print(at_level(x, mask=mask, ratio_level="sequence"))
    [[0.05 0.05 0.  ]
     [0.3  0.   0.  ]]
    >>> print(at_level(x, mask=mask, ratio_level="sequence_token"))
    [[0.05 0.05 0.  ]
     [0.3  0.   0.  ]]
    """
    checks.one_of(ratio_level=ratio_level, among=get_args(RatioLevel))
    if ratio_level == "token":
        return log_ratio
    checks.shape((None, None), mask=mask)
    total = masked.masked_sum(log_ratio, mask=mask, axis=1)
    length = jnp.maximum(mask.sum(axis=1, dtype=jnp.float32), 1.0)
    mean = jnp.broadcast_to((total / length)[:, None], mask.shape)
    if ratio_level == "sequence_token":
        own = jnp.where(mask, log_ratio, 0.0)
        # Adds 0 to the value, and the token's own gradient.
        mean = jax.lax.stop_gradient(mean) + (own - jax.lax.stop_gradient(own))
    return jnp.where(mask, mean, 0.0)


def cispo_loss(
    *,
    logprobs: Float32[Array, "*shape"],
    old_logprobs: Float32[Array, "*shape"],
    advantages: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    clip_range: Scalar,
    clip_range_high: Scalar | None = None,
    ratio_level: RatioLevel = "token",
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """CISPO, the mean of -sg(w)·A·log π with w = clip(ρ, 1 - ε, 1 + ε_high).

    The clip acts on the weight alone, so every token has a gradient, whatever its
    ratio. The value of the loss has no meaning of its own.

    Args:
      clip_range: ε, dimensionless; 1 or more is no lower bound, as published.
      clip_range_high: ε_high, dimensionless: the weight is at most 1 + ε_high; None is
        ε.
      ratio_level: ρ of a token or of its response (`at_level`); both sequence levels
        are the same here, as the weight has no gradient.
      the others: as in `losses.policy_loss`.

    Returns:
      f32[] loss and {name: (sum, weight)} as in `losses.policy_loss`, without dual clip
      and overflow; `policy/clipfrac` is the share of tokens whose weight is clipped.
      The gradient reaches `logprobs` only, and no clip range.

    Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5.

    >>> old_logprobs = jnp.log(jnp.array([[0.5, 0.5, 0.1]]))
    >>> logprobs = jnp.log(jnp.array([[0.5, 0.8, 0.9]]))  # ratios 1, 1.6 and 9
    >>> arrays = {"old_logprobs": old_logprobs, "mask": jnp.ones((1, 3), bool)}
    >>> arrays |= {"advantages": jnp.array([[1.0, 1.0, -1.0]])}
    >>> bounds = {"clip_range": 1.0, "clip_range_high": 4.0}  # weights of at most 5
    >>> print(cispo_loss(logprobs=logprobs, **arrays, **bounds)[0])
    0.174
    >>> loss = lambda x: cispo_loss(logprobs=x, **arrays, **bounds)[0]
    >>> print(jax.grad(loss)(logprobs))  # -wA/3
    [[-0.333 -0.533  1.667]]
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    checks.positive(clip_range=clip_range, clip_range_high=clip_range_high)
    if clip_range_high is None:
        clip_range_high = clip_range
    level = at_level(log_ratio, mask=mask, ratio_level=ratio_level)
    ratio = jnp.exp(level)
    weight = jnp.clip(ratio, 1.0 - clip_range, 1.0 + clip_range_high)
    # The weight is a coefficient; log π below carries the whole gradient.
    weight = jax.lax.stop_gradient(weight)
    loss, stats = aggregate(
        "loss/policy",
        -weight * advantages * jnp.where(mask, logprobs, 0.0),
        mask,
        **mean,
    )
    # Exact: the clip returns the ratio itself where it does not act.
    bounded = (weight != ratio).astype(jnp.float32)
    stats |= masked.sum_stats({"policy/clipfrac": bounded}, mask=mask)
    return loss, stats | ratio_stats(log_ratio, ratio, mask=mask)


def sapo_loss(
    *,
    logprobs: Float32[Array, "*shape"],
    old_logprobs: Float32[Array, "*shape"],
    advantages: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    temperature: Scalar,
    negative_temperature: Scalar,
    ratio_level: RatioLevel = "token",
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """SAPO, the mean of -f(ρ)·A with the soft gate f(ρ) = (4/τ)·sigmoid(τ(ρ - 1)).

    The slope of f is 1 at ρ = 1 and falls off on both sides, faster with a larger τ.
    τ is `temperature` where A > 0, `negative_temperature` elsewhere.

    Args:
      temperature, negative_temperature: τ, dimensionless, above 0. Published are 1 and
        1.05: a token that is pushed down moves the whole vocabulary.
      the others: as in `losses.policy_loss`.

    Returns:
      f32[] loss and {name: (sum, weight)}: the ratio statistics of
      `losses.policy_loss`, and `policy/gate`: the mean slope of f, 1 where the policy
      has not moved. The gradient reaches `logprobs` and both temperatures.

    Source: Gao et al. 2025, arXiv:2511.20347, eq. 5 to 7.

    >>> old_logprobs = jnp.log(jnp.array([[0.5, 0.5, 0.1]]))
    >>> logprobs = jnp.log(jnp.array([[0.5, 0.8, 0.9]]))  # ratios 1, 1.6 and 9
    >>> arrays = {"old_logprobs": old_logprobs, "mask": jnp.ones((1, 3), bool)}
    >>> arrays |= {"advantages": jnp.array([[1.0, 1.0, -1.0]])}
    >>> gates = {"temperature": 1.0, "negative_temperature": 1.05}
    >>> print(sapo_loss(logprobs=logprobs, **arrays, **gates)[0])
    -0.258
    >>> loss = lambda x: sapo_loss(logprobs=x, **arrays, **gates)[0]
    >>> print(jax.grad(loss)(logprobs))  # the last gate is nearly shut
    [[-0.333 -0.488  0.003]]
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    checks.positive(temperature=temperature, negative_temperature=negative_temperature)
    level = at_level(log_ratio, mask=mask, ratio_level=ratio_level)
    true_ratio = jax.lax.stop_gradient(jnp.exp(level))
    # Before exp: the gate is shut there, and the gradient of infinity would be NaN.
    ratio = jnp.exp(jnp.where(level > LARGE, LARGE, level))
    tau = jnp.where(advantages > 0, temperature, negative_temperature)
    tau = tau.astype(jnp.float32)
    open_share = jax.nn.sigmoid(tau * (ratio - 1.0))
    loss, stats = aggregate(
        "loss/policy", -(4.0 / tau) * open_share * advantages, mask, **mean
    )
    # σ(1 - σ) is at most 1/4, at ρ = 1.
    slope = 4.0 * jax.lax.stop_gradient(open_share * (1.0 - open_share))
    stats |= masked.sum_stats({"policy/gate": slope}, mask=mask)
    return loss, stats | ratio_stats(log_ratio, true_ratio, mask=mask)


def ratio_stats(
    log_ratio: Float32[Array, "*shape"],
    ratio: Float32[Array, "*shape"],
    *,
    mask: Bool[Array, "*shape"],
) -> Stats:
    """The ratio statistics that every surrogate reports.

    Args:
      log_ratio: f32[B, S], nats, of single tokens.
      ratio: f32[B, S], ρ as the loss reads it.

    Returns:
      {name: (sum, weight)}, without gradient: `policy/approxkl`, ½(log ratio)² of
      tokens, nats per token; `policy/ratio_mean` and `policy/ratio_max`, of ρ.

    >>> x, mask = jnp.array([0.0, 1.0, 9.0]), jnp.array([True, True, False])
    >>> stats = ratio_stats(x, jnp.exp(x), mask=mask)
    >>> print(stats["policy/ratio_max"][0])
    2.718
    >>> print(masked.mean_stats(stats)["policy/approxkl"])
    0.25
    """
    stats = masked.sum_stats(
        {
            "policy/approxkl": 0.5 * jnp.square(log_ratio),
            "policy/ratio_mean": ratio,
        },
        mask=mask,
    )
    # A weight of None marks a maximum, which is not averaged over parts.
    largest = jax.lax.stop_gradient(jnp.max(ratio, where=mask, initial=0.0))
    return stats | {"policy/ratio_max": (largest, None)}


def masked_inputs(
    logprobs: Float32[Array, "*shape"],
    old_logprobs: Float32[Array, "*shape"],
    advantages: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> tuple[Float32[Array, "*shape"], Float32[Array, "*shape"]]:
    """Checks the inputs of a surrogate, and sets them to 0 outside the mask.

    Returns:
      log π - log π_old, f32[...], nats, whose gradient reaches `logprobs` only; and the
      advantages, which have none.

    >>> x, mask = jnp.array([-1.0, -2.0]), jnp.array([True, False])
    >>> print(masked_inputs(x, 2 * x, x, mask)[0])
    [1. 0.]
    >>> print(masked_inputs(x, 2 * x, x, mask)[1])
    [-1.  0.]
    """
    floats = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "advantages": advantages,
    }
    checks.masked_floats(mask, **floats)
    log_ratio = jnp.where(mask, logprobs - jax.lax.stop_gradient(old_logprobs), 0.0)
    # Advantages are coefficients, even where the caller computed them from a model.
    return log_ratio, jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0))
