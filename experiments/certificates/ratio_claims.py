"""Claims about published ratios, surrogates and masks.

Each claim has its own formula, implemented from the paper for sums over all pairs of
responses (i, j) of the world. The formulas call no function of the library.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax import grpo
from rlhf_jax.algorithms.policy_gradient.options import (
    DAR,
    DPPO,
    GMPO,
    TOPR,
    VESPO,
    ClipCov,
    KLCov,
    TopEntropy,
)
from rlhf_jax.algorithms.policy_gradient.recipe import CISPO, SAPO, Clip
from rlhf_jax.functional.kl.penalty import IN_LOSS, IN_REWARD

Array = jax.Array
# (x f32[N, 1, 4] log-ratios, logprobs f32[N, 1, 4], A f32[N, N, 1], lengths f32[N])
# -> f32[N, N, 4], the surrogate of each token of response i in the pair (i, j).
Surrogate = Callable[[Array, Array, Array, Array], Array]
# (rewards f32[N], ended bool[N]) -> f32[N, N]: the advantage of i in the pair (i, j)
Advantage = Callable[[Array, Array], Array]
# (lengths f32[N], ended bool[N]) -> f32[N, N]: the weight of the tokens of i in (i, j)
Weight = Callable[[Array, Array], Array]


class Batch(NamedTuple):
    """All responses under the sampler; a minibatch is a pair (i, j) of them."""

    logprobs: Array  # f32[N, 4], 0 outside the mask
    tokens: Array  # i32[N, 4]
    mask: Array  # bool[N, 4]
    advantage: Array  # f32[N, N], of i in the pair (i, j)
    ref_logprobs: Array  # f32[N, 4], of the reference


# (worth f32[N, N, 4], x f32[N, 1, 4], Batch) -> f32[N, N, 4]
Choice = Callable[[Array, Array, Batch], Array]


def clip(x: Array, _: Array, advantage: Array, __: Array, *, low: float, high: float):
    """min(ρA, clip(ρ)A): Schulman et al. 2017, eq. 7."""
    ratio = jnp.exp(x)
    bounded = jnp.minimum(jnp.maximum(ratio, 1 - low), 1 + high)
    return jnp.minimum(ratio * advantage, bounded * advantage)


def sequence_clip(
    x: Array,
    logprobs: Array,
    advantage: Array,
    lengths: Array,
    *,
    low: float,
    high: float,
):
    """`clip` of s = (π/π_old)^(1/length): Zheng et al. 2025, eq. 5 to 7."""
    mean = x.sum(axis=2, keepdims=True) / lengths[:, None, None]
    shared = jnp.broadcast_to(mean, x.shape)
    return clip(shared, logprobs, advantage, lengths, low=low, high=high)


def weighted(x: Array, logprobs: Array, advantage: Array, _: Array, *, high: float):
    """sg(min(ρ, 1 + high))·A·log π: MiniMax 2025, eq. 4."""
    weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(x), 1 + high))
    return weight * advantage * logprobs


def gated(x: Array, _: Array, advantage: Array, __: Array):
    """(4/τ)·sigmoid(τ(ρ - 1))·A: Gao et al. 2025, eq. 5."""
    tau = jnp.where(advantage > 0, 1.0, 1.05)
    return 4 / tau / (1 + jnp.exp(-tau * (jnp.exp(x) - 1))) * advantage


def by_divergence(
    x: Array, logprobs: Array, advantage: Array, _: Array, *, kind: str, most: float
):
    """sg(M·min(ρ, 20))·A·log π: Qi et al. 2026, binary divergences."""
    now, old = jax.lax.stop_gradient((jnp.exp(logprobs), jnp.exp(logprobs - x)))
    apart = jnp.abs(now - old)
    if kind == "kl":
        apart = old * jnp.log(old / now) + (1 - old) * jnp.log((1 - old) / (1 - now))
    # Outside the response π and μ are 1; the caller masks the result.
    away = jnp.where(advantage > 0, now > old, now < old) & (apart > most)
    weight = jnp.minimum(jax.lax.stop_gradient(jnp.exp(x)), 20.0)
    return jnp.where(away, 0.0, weight) * advantage * logprobs


def geometric(x: Array, _: Array, advantage: Array, lengths: Array, *, most: float):
    """A·(Π_t w_t)^(1/length), each w_t clipped: Zhao et al. 2025."""
    capped = jnp.where(advantage < 0, jnp.maximum(x, -most), jnp.minimum(x, most))
    mean = capped.sum(axis=2, keepdims=True) / lengths[:, None, None]
    return jnp.broadcast_to(jnp.exp(mean) * advantage, capped.shape)


def soft_weight(x: Array, logprobs: Array, advantage: Array, _: Array):
    """sg(W^c₁·exp(c₂(1 - W)))·A·log π: Shen et al. 2026, eq. 20."""
    ratio = jax.lax.stop_gradient(jnp.exp(x.sum(axis=2, keepdims=True)))
    better = ratio**2 * jnp.exp(3 * (1 - ratio))
    worse = ratio**3 * jnp.exp(2 * (1 - ratio))
    return jnp.where(advantage > 0, better, worse) * advantage * logprobs


def tapered(x: Array, logprobs: Array, advantage: Array, _: Array):
    """sg(1 or min(W, 1))·A·log π, by the sign of A: Le Roux et al. 2025."""
    ratio = jax.lax.stop_gradient(jnp.exp(x.sum(axis=2, keepdims=True)))
    weight = jnp.where(advantage < 0, jnp.minimum(ratio, 1.0), 1.0)
    return weight * advantage * logprobs


def without_mistakes(
    x: Array, logprobs: Array, advantage: Array, lengths: Array, *, most: float
):
    """The clipped token ratio, times DeepSeek-V3.2's mask of responses."""
    mean = -x.sum(axis=2, keepdims=True) / lengths[:, None, None]
    kept = jax.lax.stop_gradient((advantage >= 0) | (mean <= most))
    worth = clip(x, logprobs, advantage, lengths, low=0.2, high=0.2)
    return jnp.where(kept, worth, 0.0)


def covariance(batch: Batch) -> Array:
    """f32[N, N, 4], covariances of the tokens of i in (i, j): Cui et al. 2025."""
    lengths = batch.mask.sum(axis=1)
    count = lengths[:, None] + lengths[None, :]
    total = batch.logprobs.sum(axis=1)
    of_logprobs = (total[:, None] + total[None, :]) / count
    by_row = batch.advantage * lengths[:, None]
    of_advantages = (by_row + by_row.T) / count
    about = batch.logprobs[:, None, :] - of_logprobs[:, :, None]
    return about * (batch.advantage - of_advantages)[:, :, None]


def entropies(batch: Batch) -> Array:
    """f32[N, 4], Σ over continuations y of P(y | prefix)·(-log π(y_t))."""
    agree = batch.tokens[:, None, :] == batch.tokens[None, :, :]
    before = jnp.cumprod(agree, axis=2)[:, :, :-1]
    same = jnp.pad(before, ((0, 0), (0, 0), (1, 0)), constant_values=1)
    ahead = jnp.exp(jnp.cumsum(batch.logprobs[:, ::-1], axis=1)[:, ::-1])
    terms = jnp.where(batch.mask, -batch.logprobs * ahead, 0.0)
    return (same * terms[None]).sum(axis=1)


def largest(x: Array, batch: Batch, share: float) -> Array:
    """bool[N, N, 4]: the tokens of i among the `share` of (i, j) with the largest x."""
    inside = jnp.broadcast_to(batch.mask[:, None, :], x.shape)
    mine = jnp.where(inside, x, -jnp.inf)
    both = jnp.concatenate([mine, mine.swapaxes(0, 1)], axis=2)
    lengths = batch.mask.sum(axis=1)
    count = jnp.floor(share * (lengths[:, None] + lengths[None, :]) + 1e-6)
    above = (both[:, :, None, :] > mine[:, :, :, None]).sum(axis=3)
    return inside & (above < jnp.maximum(count, 1)[:, :, None])


def hesitant(worth: Array, _: Array, batch: Batch, *, share: float) -> Array:
    """Only the tokens with the largest entropies: Wang et al. 2025."""
    entropy = entropies(batch)
    x = jnp.broadcast_to(entropy[:, None, :], worth.shape)
    return jnp.where(largest(x, batch, share), worth, 0.0)


def with_entropy(worth: Array, x: Array, batch: Batch, *, coef: float) -> Array:
    """Adds coef·H(π) at the prefixes of the sampler: He et al. 2025."""
    now = jnp.where(batch.mask, x[:, 0, :] + batch.logprobs, 0.0)
    return worth + coef * entropies(batch._replace(logprobs=now))[:, None, :]


def without_covariance(
    worth: Array, _: Array, batch: Batch, *, low: float, high: float
) -> Array:
    """Clip-Cov that drops every token within its bounds: Cui et al. 2025."""
    x = covariance(batch)
    return jnp.where((x > low) & (x < high), 0.0, worth)


def kl_cov(worth: Array, x: Array, batch: Batch, *, share: float, coef: float) -> Array:
    """KL-Cov: -coef·|log π/π_old| at the largest covariances: Cui et al. 2025."""
    chosen = largest(covariance(batch), batch, share) & (jnp.abs(x) > 1e-5)
    return worth - jnp.where(chosen, coef * jnp.abs(x), 0.0)


def regressed(
    _: Array, x: Array, batch: Batch, *, beta: float, share: float, most: float
) -> Array:
    """min((π_ref/π_old)^α·exp(A/β), most)·log π: He et al. 2026, theorem 4.2."""
    back = (batch.ref_logprobs - batch.logprobs).sum(axis=1)
    weight = jnp.exp(share * back[:, None] + batch.advantage / beta)
    return jnp.minimum(weight, most)[:, :, None] * (x + batch.logprobs[:, None, :])


def others(rewards: Array, _: Array) -> Array:
    """r_i - r_j, leave-one-out in groups of two."""
    return rewards[:, None] - rewards[None, :]


def mean(rewards: Array, ended: Array) -> Array:
    """(r_i - r_j)/2, the reward minus the mean of the two."""
    return others(rewards, ended) / 2


def deviation(rewards: Array, ended: Array) -> Array:
    """`mean` divided by the standard deviation of the two, |r_i - r_j|/√2."""
    spread = jnp.abs(others(rewards, ended)) / jnp.sqrt(2.0)
    return mean(rewards, ended) / (spread + 1e-6)


WEIGHTS = (1.0, 0.5)


def two_rewards(rewards: Array) -> tuple[Array, Array]:
    """Tables of two rewards whose sum, weighted by WEIGHTS, is `rewards`."""
    return rewards - WEIGHTS[1] * rewards[::-1], rewards[::-1]


def decoupled(rewards: Array, ended: Array) -> Array:
    """Σ_k w_k·A_k over its standard deviation in the pair: Liu et al. 2026."""
    one, other = (deviation(reward, ended) for reward in two_rewards(rewards))
    total = WEIGHTS[0] * one + WEIGHTS[1] * other
    # The two advantages of a pair are opposites, so their mean is 0.
    return total / (jnp.abs(total) * jnp.sqrt(2.0) + 1e-6)


def among_ended(rewards: Array, ended: Array) -> Array:
    """r_i - r_j if both have ended, else 0: unfinished responses are no baseline."""
    return jnp.where(ended[:, None] & ended[None, :], others(rewards, ended), 0.0)


def sums(lengths: Array, _: Array) -> Array:
    """1: the mean over responses of the sums over their tokens."""
    return jnp.ones((len(lengths), len(lengths)))


def by_length(lengths: Array, _: Array) -> Array:
    """4/len_i; every measured gradient is multiplied by 4 tokens."""
    return jnp.broadcast_to(4 / lengths[:, None], (len(lengths), len(lengths)))


def by_tokens(lengths: Array, _: Array) -> Array:
    """4·2/(len_i + len_j)."""
    return 8 / (lengths[:, None] + lengths[None, :])


def by_the_other(lengths: Array, _: Array) -> Array:
    """len_j/(len_i + len_j): r_i less the length-weighted mean, over r_i - r_j."""
    return lengths[None, :] / (lengths[:, None] + lengths[None, :])


def of_ended(_: Array, ended: Array) -> Array:
    """1 if both have ended and 2 if only i has: the mean is over ended responses."""
    alone = jnp.where(ended[None, :], 1.0, 2.0)
    return jnp.where(ended[:, None], alone, 0.0)


class Claim(NamedTuple):
    """A method, the formula of its gradient, and the relation of that to ∇E[r]."""

    name: str
    recipe: grpo.GroupRecipe
    surrogate: Surrogate
    target: str  # the gradient's target on the sampler's policy
    share: float | None  # multiple of the target; None if biased, for `bias`
    bias: str = ""  # reason of the bias on the sampler's policy
    advantage: Advantage = others
    weight: Weight = sums
    binary: bool = False  # rewards are 0 and 1
    chosen: Choice | None = None  # applied to the surrogates of the tokens
    optimum: bool = True  # whether the gradient is 0 at π*, with the KL in the reward


REWARD, ENDED, NO = "∇E[r]", "P(it ends)²·∇E[r | it ends]", "of no objective"
WIDE = 1e6  # a clip range that never binds
TOKENS = functools.partial(clip, low=0.2, high=0.2)
PLAIN = {
    "aggregation": "constant",
    "temperature": 1.0,
    "group_size": 2,
    "penalty": IN_REWARD,
}


def _recipe(**choices: Any) -> grpo.GroupRecipe:
    return grpo.GroupRecipe(**{**PLAIN, "baseline": "leave_one_out", **choices})


GSPO = Clip(ratio_level="sequence", clip_range=0.02, clip_range_high=0.03)
OF_SEQUENCE = functools.partial(sequence_clip, low=0.02, high=0.03)
CLAIMS = (
    Claim(
        "token ratio without a clip",
        _recipe(surrogate=Clip(WIDE)),
        functools.partial(clip, low=WIDE, high=WIDE),
        REWARD,
        1.0,
    ),
    Claim("token ratio, clip 0.2 (PPO, RLOO)", _recipe(), TOKENS, REWARD, 1.0),
    Claim(
        "clip-higher, 0.2 and 0.28 (DAPO)",
        _recipe(surrogate=Clip(clip_range_high=0.28)),
        functools.partial(clip, low=0.2, high=0.28),
        REWARD,
        1.0,
    ),
    Claim(
        "Dr. GRPO: the group's mean, a constant divisor",
        _recipe(baseline="group"),
        TOKENS,
        REWARD,
        0.5,
        advantage=mean,
    ),
    Claim(
        "GRPO: the group's mean and std, 1/length",
        _recipe(baseline="group", normalise="group", aggregation="sequence_mean"),
        TOKENS,
        NO,
        None,
        "the std, and by the length of each response",
        advantage=deviation,
        weight=by_length,
    ),
    Claim(
        "two rewards, each by its std, the sum by that of the batch (GDPO)",
        _recipe(baseline="group", normalise="each", penalty=IN_LOSS),
        TOKENS,
        NO,
        None,
        "the stds: of each reward, and of their sum",
        advantage=decoupled,
    ),
    Claim(
        "GRPO with the std alone",
        _recipe(baseline="group", normalise="group"),
        TOKENS,
        NO,
        None,
        "the std: groups pull alike, however little their rewards differ",
        advantage=deviation,
    ),
    Claim(
        "the mean over tokens (DAPO)",
        _recipe(aggregation="token_mean"),
        TOKENS,
        NO,
        None,
        "the number of tokens of its minibatch",
        weight=by_tokens,
    ),
    Claim(
        "the prompt mean (ScaleRL)",
        _recipe(aggregation="prompt_mean"),
        TOKENS,
        NO,
        None,
        "the number of tokens of its prompt's responses",
        weight=by_tokens,
    ),
    Claim(
        "GSPO, a constant divisor (LUSPO)",
        _recipe(surrogate=GSPO),
        OF_SEQUENCE,
        REWARD,
        1.0,
    ),
    Claim(
        "GSPO as published, 1/length",
        _recipe(surrogate=GSPO, aggregation="sequence_mean"),
        OF_SEQUENCE,
        NO,
        None,
        "the length of each response",
        weight=by_length,
    ),
    Claim(
        "GSPO-token, a constant divisor",
        _recipe(surrogate=dataclasses.replace(GSPO, ratio_level="sequence_token")),
        OF_SEQUENCE,  # with one advantage per response the gradient is GSPO's
        REWARD,
        1.0,
    ),
    Claim(
        "CISPO, weights of at most 1.2",
        _recipe(surrogate=CISPO(clip_range=1.0, clip_range_high=0.2)),
        functools.partial(weighted, high=0.2),
        REWARD,
        1.0,
    ),
    Claim("SAPO", _recipe(surrogate=SAPO()), gated, REWARD, 1.0),
    Claim(
        "DPPO, total variation of at most 0.01",
        _recipe(surrogate=DPPO(threshold=0.01)),
        functools.partial(by_divergence, kind="tv", most=0.01),
        REWARD,
        1.0,
    ),
    Claim(
        "DPPO, a KL of at most 0.001",
        _recipe(surrogate=DPPO("kl", threshold=0.001)),
        functools.partial(by_divergence, kind="kl", most=0.001),
        REWARD,
        1.0,
    ),
    Claim(
        "GMPO, a constant divisor, clip 0.05",
        _recipe(surrogate=GMPO(0.05)),
        functools.partial(geometric, most=0.05),
        REWARD,
        1.0,
    ),
    Claim(
        "GMPO as published, 1/length",
        _recipe(surrogate=GMPO(), aggregation="sequence_mean"),
        functools.partial(geometric, most=0.4),
        NO,
        None,
        "the length of each response",
        weight=by_length,
    ),
    Claim("VESPO", _recipe(surrogate=VESPO()), soft_weight, REWARD, 1.0),
    Claim("TOPR", _recipe(surrogate=TOPR()), tapered, REWARD, 1.0),
    Claim(
        "mask of worse responses, 0.01 nats per token (DeepSeek-V3.2)",
        _recipe(off_policy_mask=0.01),
        functools.partial(without_mistakes, most=0.01),
        REWARD,
        1.0,
    ),
    Claim(
        "a response of its own as the baseline (ReMax, of any choice of it)",
        _recipe(baseline="greedy"),
        TOKENS,
        REWARD,
        1.0,
    ),
    Claim(
        "an entropy bonus, however it is controlled (Skywork-OR1)",
        _recipe(entropy_coef=0.1),
        TOKENS,
        NO,
        None,
        "the entropy of single tokens, along the prefixes of the sampler",
        chosen=functools.partial(with_entropy, coef=0.1),
        optimum=False,
    ),
    Claim(
        "half of the tokens, of the largest entropies",
        _recipe(token_choice=TopEntropy(0.5)),
        TOKENS,
        NO,
        None,
        "the tokens that it leaves out",
        chosen=functools.partial(hesitant, share=0.5),
    ),
    Claim(
        "Clip-Cov, all covariances from 0.2 to 2",
        _recipe(token_choice=ClipCov(1.0, low=0.2, high=2.0)),
        TOKENS,
        NO,
        None,
        "the tokens that it leaves out",
        chosen=functools.partial(without_covariance, low=0.2, high=2.0),
    ),
    Claim(
        "KL-Cov, a third of the tokens",
        _recipe(token_choice=KLCov(1 / 3, coef=0.1)),
        TOKENS,
        REWARD,
        1.0,
        chosen=functools.partial(kl_cov, share=1 / 3, coef=0.1),
    ),
    Claim(
        "DAR, weights of at most 2",
        _recipe(surrogate=DAR(beta=1.5, share=0.3, cap=2.0)),
        TOKENS,
        NO,
        None,
        "its target, a mixture of reference and sampler that the advantage tilts",
        chosen=functools.partial(regressed, beta=1.5, share=0.3, most=2.0),
        optimum=False,
    ),
    Claim(
        "OPO: the group's mean by the lengths of its responses",
        _recipe(baseline="length_weighted"),
        TOKENS,
        NO,
        None,
        "a baseline that holds the response itself, by its length",
        weight=by_the_other,
    ),
    Claim(
        "RLOO, unfinished responses left out of loss and baseline",
        _recipe(overlong_mask="group"),
        TOKENS,
        ENDED,
        1.0,
        advantage=among_ended,
    ),
    Claim(
        "unfinished responses left out of the loss alone (DAPO)",
        _recipe(overlong_mask="loss"),
        TOKENS,
        NO,
        None,
        "a baseline that holds what the loss leaves out",
        weight=of_ended,
    ),
    Claim(
        "dynamic sampling: groups drawn until they are mixed (DAPO)",
        _recipe(baseline="group", equal_groups="leave_out"),
        TOKENS,
        REWARD,
        0.5,
        advantage=mean,
        binary=True,
    ),
    Claim(
        "dynamic sampling, divided by the std",
        _recipe(baseline="group", normalise="group", equal_groups="leave_out"),
        TOKENS,
        REWARD,  # rewards of 0 and 1 in mixed groups of two have one std
        0.5 * 2**0.5,
        advantage=deviation,
        binary=True,
    ),
)
