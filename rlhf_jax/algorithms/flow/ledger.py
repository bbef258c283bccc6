"""The ledger of trust: tests on every batch that the sampler drew what it reports.

    rollout ──entries──> Sampled ──forward pass of the loss──> sums ──settle──┬─> trust/
            └─duplicates──────────────────────────────────────────────────────┘

Let μ be the probabilities that the sampler reports, π and H the trainer's probabilities
and entropies of the first minibatch before any step, and w = π/μ of a token. An honest
sampler has, for every prefix and parameters of any age,

    |log π - log μ| ≈ 0      at tokens drawn with the trainer's own parameters
    E[w] = 1                 the reported probabilities are those of the draws
    E[w·(-log π)] = E[w·H]   violated by greedy or top-p sampling: likelier tokens
    P(y' = y) = μ(y)         for two responses to one prompt: a shared seed repeats y

The differences are martingales: their sums are compared with their spread, as z-scores.
No model runs here: the update computes log-probs and entropies anyway.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Rollout, Sampled
from rlhf_jax.functional import masked

Array = jax.Array

PREFIX = "trust/"
LARGEST_WEIGHT = 10.0  # bound of w, so that false reports stay finite
OUTLIER = 1.0  # nats between log π and log μ of a token, beyond any rounding
PARTS = 4  # into which response columns and prompt lengths are divided


def entries(rollout: Rollout, *, step: Array, rows: Array) -> Sampled:
    """The entries of a rollout, kept until the trainer's log-probs are known.

    Args:
      rows: i32[N], rows that the policy drew; Nash-MD draws others from a mixture.
    """
    ours = jnp.zeros(rollout.tokens.shape[0], bool).at[rows].set(True)
    mask = rollout.response_mask & ours[:, None]
    age = jnp.zeros(mask.shape, jnp.int32)
    if rollout.version is not None:
        age = jnp.where(mask, step - rollout.version, 0)
    return Sampled(logprobs=rollout.behaviour_logprobs, mask=mask, age=age)


def sums(
    sampled: Sampled,
    *,
    logprobs: Array,
    entropy: Array,
    mask: Array,
    max_new_tokens: int,
    vocab_size: int,
) -> masked.Stats:
    """Sums over the rows of a (micro-)batch, which add up; `settle` makes the stats.

    Args:
      vocab_size: V, ids that are tokens: padding would widen the variance.

    Returns:
      {name: (sum, weight)}, without gradient. For names that end with `_z` the pair is
      a sum of differences and an estimate of its variance.
    """
    logprobs, entropy = jax.lax.stop_gradient((logprobs, entropy))
    drawn = sampled.mask
    # Select before any arithmetic: entries outside the mask count nowhere.
    surprise = jnp.where(drawn, -logprobs, 0.0)
    # Rounding may make the entropy of a certain token, and its variance, negative.
    entropy = jnp.where(drawn, jnp.maximum(entropy, 0.0), 0.0)
    reported = jnp.where(drawn, sampled.logprobs, 0.0)
    log_ratio = -surprise - reported
    # Bounded before the exp, which may overflow.
    weight = jnp.exp(jnp.minimum(log_ratio, math.log(LARGEST_WEIGHT)))

    # Older parameters may differ; E[w] = 1 below holds for them too.
    fresh = drawn & (sampled.age == 0)
    distance = jnp.abs(log_ratio)
    outlier = (distance > OUTLIER).astype(jnp.float32)
    stats = masked.sum_stats(
        {"trust/distance": distance, "trust/outliers": outlier}, mask=fresh
    )
    before = mask.shape[1] - max_new_tokens
    column = jnp.arange(mask.shape[1]) - before
    length = mask[:, :before].sum(axis=1)
    parts = {
        "position": (column * PARTS // max_new_tokens)[None, :],
        "prompt": (jnp.maximum(length - 1, 0) * PARTS // max(before, 1))[:, None],
    }
    for name, part in parts.items():
        for number in range(PARTS):
            of_part = {f"trust/distance_{name}_{number + 1}": distance}
            stats |= masked.sum_stats(of_part, mask=fresh & (part == number))

    stats |= masked.sum_stats({"trust/weight": weight}, mask=drawn)
    error = jnp.where(drawn, weight - 1, 0.0)
    stats["trust/weight_z"] = error.sum(), jnp.square(error).sum()

    # The variance of -log π is at most about H·(log V - H): most where one token has
    # half of the probability and all others share the rest.
    largest = math.log(max(vocab_size, 2))
    variance = entropy * jnp.maximum(largest - entropy, 1.0)
    expected = (weight * entropy).sum()
    excess = (weight * surprise).sum() - expected
    stats["trust/entropy_ratio"] = excess + expected, expected
    stats["trust/entropy_z"] = excess / largest, variance.sum() / largest**2
    stats["trust/age_max"] = jnp.max(sampled.age).astype(jnp.float32), None
    return stats


def settle(stats: masked.Stats) -> masked.Stats:
    """Makes the stats of a whole minibatch from its `sums`; z = S / √(V + |S| / 3).

    By Freedman's inequality, for differences of at most 1, an honest sampler has z > k
    with a probability of at most exp(-k²/2), and z < -k likewise.
    """
    settled = dict(stats)
    for name, (total, variance) in stats.items():
        if name.endswith("_z"):
            assert variance is not None  # of `sums`
            spread = jnp.sqrt(variance + jnp.abs(total) / 3)
            score = total / jnp.where(spread > 0, spread, 1.0)
            settled[name] = score, jnp.ones_like(score)
    return settled


def duplicates(rollout: Rollout, *, rows: Array) -> masked.Stats:
    """Counts equal responses to one prompt, and how many to expect.

    For neighbouring rows with the same prompt, the second response equals the first
    with probability μ(first): a policy without entropy may repeat itself.

    Returns:
      `trust/duplicates` and `trust/duplicates_expected`, shares of the neighbours, and
      `trust/duplicates_z` ≥ 0: by Chernoff's bound so many duplicates or more have a
      probability of at most exp(-z²/2). Without neighbours the weights are 0.
    """
    at = jax.tree.map(
        lambda x: x[rows],
        (rollout.tokens, rollout.mask, rollout.response_mask, rollout.index),
    )
    tokens, mask, response, index = at
    behaviour = rollout.behaviour_logprobs[rows]
    padded = jnp.where(mask, tokens, -1)
    alike = (padded[1:] == padded[:-1]) & (response[1:] == response[:-1])
    same = alike.all(axis=1).astype(jnp.float32)
    began = response.any(axis=1)  # False for an episode that did not begin in time
    pairs = (index[1:] == index[:-1]) & began[1:] & began[:-1]
    total = masked.masked_sum(behaviour, mask=response, axis=1)[:-1]
    stats = masked.sum_stats(
        {
            "trust/duplicates": same,
            "trust/duplicates_expected": jnp.exp(jnp.minimum(total, 0.0)),
        },
        mask=pairs,
    )
    means = masked.mean_stats(stats)
    share = jnp.clip(means["trust/duplicates"], 0.0, 1.0)
    expected = jnp.clip(means["trust/duplicates_expected"], 1e-30, 1 - 1e-6)
    divergence = jax.scipy.special.rel_entr(
        jnp.stack([share, 1 - share]), jnp.stack([expected, 1 - expected])
    ).sum()
    count = pairs.sum(dtype=jnp.float32)
    score = jnp.sqrt(jnp.maximum(2 * count * divergence, 0.0))
    score = jnp.where(share > expected, score, 0.0)
    stats["trust/duplicates_z"] = score, (count > 0).astype(jnp.float32)
    return jax.lax.stop_gradient(stats)
