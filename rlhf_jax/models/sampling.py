"""One token from logits: of the policy itself, or shaped for evaluation."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from rlhf_jax.functional import logprobs as logprobs_
from rlhf_jax.functional.checks import InputError

Array = jax.Array

BLOCK = 256  # words, of those that `drawn` adds up at a time


@dataclasses.dataclass(frozen=True)
class Shaping:
    """How an *evaluation* sample departs from the policy; None is off.

    Training rollouts use none of these: with them the sampled distribution would no
    longer be the one whose KL to the reference is penalised.
    """

    greedy: bool = False  # the most likely token, whatever the key
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float | None = None  # keep the smallest set of at least this probability
    min_p: float | None = None  # keep tokens of at least this share of the largest

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"expected top_k >= 1, got {self.top_k}; None is off")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                raise InputError(f"expected 0 < {name} <= 1, got {value}; None is off")


def sample_token(
    logits: Array,
    *,
    keys: Array,
    temperature: float,
    shaping: Shaping | None = None,
    predicted: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Draws one token a row by the inverse of the cumulative distribution.

    A uniform number has 23 bits: tokens of a probability below 1e-7 come as often
    together as they should, but not each of them.

    Args:
      logits: f32[B, V].
      keys: key[B], each used for one uniform number.
      temperature: > 0, divides the logits, dimensionless.
      shaping: for evaluation only; None draws from the policy itself.
      predicted: bool[B], rows in which a token stands before the one to draw; None is
        every row. Nothing predicts the first token of an empty prompt: it is drawn
        uniformly, and its log-probability is 0, as `policy.logprobs` has it.

    Returns:
      token i32[B], its log-probability f32[B] and the entropy f32[B], nats, of the
      distribution drawn from: softmax(logits / temperature), or its shaped form. A
      greedy choice draws nothing; log-probability and entropy are what they would be
      had it been drawn.
    """
    if predicted is not None:
        logits = jnp.where(predicted[:, None], logits, 0.0)
    logits = logits / temperature
    if shaping is not None:
        logits = shape_logits(logits, shaping=shaping)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    entropy = logprobs_.entropy(logits)
    if shaping is not None and shaping.greedy:
        token = jnp.argmax(logits, axis=-1)
    else:
        uniform = jax.vmap(lambda key: jax.random.uniform(key))(keys)
        token = drawn(jnp.exp(logprobs), uniform=uniform)
    logprob = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
    if predicted is not None:
        logprob = jnp.where(predicted, logprob, 0.0)
        entropy = jnp.where(predicted, entropy, 0.0)
    return token.astype(jnp.int32), logprob, entropy


def drawn(weights: Array, *, uniform: Array) -> Array:
    """The index at which the weights reach a uniform share of their total.

    The block first, then within it: no sum runs along all of a large vocabulary.

    Args:
      weights: f32[B, V], >= 0, and in each row one above 0.
      uniform: f32[B], in [0, 1).

    Returns:
      i32[B], of a weight > 0; V - 1 where the weights are not finite.
    """
    if weights.shape[-1] <= BLOCK:
        return _reached(weights, target=uniform * weights.sum(axis=-1))[0]
    room = -weights.shape[-1] % BLOCK
    blocks = jnp.pad(weights, ((0, 0), (0, room))).reshape(len(weights), -1, BLOCK)
    totals = blocks.sum(axis=-1)
    block, rest = _reached(totals, target=uniform * totals.sum(axis=-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    place = _reached(inside, target=rest)[0]
    return jnp.minimum(block * BLOCK + place, weights.shape[-1] - 1)


def _reached(weights: Array, *, target: Array) -> tuple[Array, Array]:
    """Where the sum of weights exceeds the target, and the target less those before.

    Sums round: a weight of 0 is never taken, a target that rounds up to the total takes
    the last that is above, and what is left of a target may be a little below 0.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    possible = weights > 0
    reached = (cumulative > target[:, None]) & possible
    last = weights.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
    index = jnp.where(reached.any(axis=-1), jnp.argmax(reached, axis=-1), last)
    before = jnp.take_along_axis(cumulative - weights, index[:, None], axis=-1)[:, 0]
    return index, target - before


def shape_logits(logits: Array, *, shaping: Shaping) -> Array:
    """Logits with every token that the shaping drops at -inf.

    top-k, top-p and min-p act in turn, each on what the one before has left, as in
    `transformers`. Tokens that tie with the last one kept are kept.

    Args:
      logits: f32[B, V], already divided by the temperature.

    Returns:
      f32[B, V].

    Sources: top-k, Fan et al. 2018; top-p, Holtzman et al. 2020, arXiv:1904.09751;
    min-p, Nguyen et al. 2024, arXiv:2407.01082.
    """
    if shaping.top_k is not None and shaping.top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, shaping.top_k)[0][:, -1:]
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if shaping.top_p is not None:
        descending = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        kept = jnp.where(before < shaping.top_p, descending, jnp.inf)
        smallest = kept.min(axis=-1, keepdims=True)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if shaping.min_p is not None:
        # p >= min_p · p_max, taken as logs: no softmax needed.
        smallest = logits.max(axis=-1, keepdims=True) + math.log(shaping.min_p)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    return logits
