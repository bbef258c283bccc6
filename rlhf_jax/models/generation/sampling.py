"""One token from logits: of the policy itself, or shaped for evaluation."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from rlhf_jax.functional import logprobs, unused_ids
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.unused_ids import Ranges
from rlhf_jax.models import axes

Array = jax.Array

BLOCK = 256  # tokens of the vocabulary that `drawn` adds up at a time
_BELOW_ONE = 1 - 2.0**-24  # the largest share of a total that is not all of it


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
    unused: Ranges = (),
) -> tuple[Array, Array, Array]:
    """Draws one token per row by the inverse of the cumulative distribution.

    A uniform number has 23 bits: tokens of a probability below 1e-7 come as often
    together as they should, but not each of them. `drawn` says which never come.

    Args:
      logits: floats[B, V] of any precision; taken to float32.
      keys: key[B], each used for one uniform number.
      temperature: > 0, divides the logits, dimensionless.
      shaping: for evaluation only; None draws from the policy itself.
      predicted: bool[B], rows in which a token stands before the one to draw; None is
        every row. Nothing predicts the first token of an empty prompt: it is drawn
        uniformly, and its log-probability is 0, as `policy.logprobs` has it.
      unused: ranges of ids that no token has (`ModelConfig.unused_ids`), which are at
        -inf in `logits`: that uniform draw leaves them out too.

    Returns:
      token i32[B], its log-probability f32[B] and the entropy f32[B], nats, of the
      distribution drawn from: softmax(logits / temperature), or its shaped form. A
      greedy choice draws nothing; log-probability and entropy are what they would be
      had it been drawn.
    """
    if predicted is not None:
        predicted = axes.rows_apart(predicted)
        logits = jnp.where(predicted[:, None], logits, 0.0)
        logits = unused_ids.masked(logits, unused)
    # As `logprobs` does it: log-probs of sampler and trainer must agree to 1e-4 nats.
    logits = logits.astype(jnp.float32) / temperature
    if shaping is not None:
        logits = shape_logits(logits, shaping=shaping)
    log_softmax = jax.nn.log_softmax(logits, axis=-1)
    entropy = logprobs.entropy(logits)
    if shaping is not None and shaping.greedy:
        # No key is used: greedy responses do not depend on the seed.
        token = jnp.argmax(logits, axis=-1)
    else:
        # Else what the keys come from would be spread as the logits are.
        uniform = axes.rows_apart(jax.vmap(lambda key: jax.random.uniform(key))(keys))
        token = drawn(jnp.exp(log_softmax), uniform=uniform)
    logprob = jnp.take_along_axis(log_softmax, token[:, None], axis=-1)[:, 0]
    if predicted is not None:
        logprob = jnp.where(predicted, logprob, 0.0)
        entropy = jnp.where(predicted, entropy, 0.0)
    # A row's numbers go back to where its columns are, however it was drawn.
    of_rows = token.astype(jnp.int32), logprob, entropy
    token, logprob, entropy = map(axes.rows_apart, of_rows)
    return token, logprob, entropy


def drawn(weights: Array, *, uniform: Array) -> Array:
    """The index at which the weights reach a uniform share of their total.

    A uniform number of 23 bits stands for the middle of its interval: its lower end
    would take the first token at 0, however unlikely. A large vocabulary is searched by
    blocks first, then within one block by the share that is left, so that no sum runs
    along all of it.

    Args:
      weights: f32[B, V], >= 0, and in each row one above 0.
      uniform: f32[B], in [0, 1), a multiple of 2^-23.

    Returns:
      i32[B], V - 1 where the weights are not finite. Never a weight of 0, a block of
      less than 2^-31 of the total, or a weight of less than 2^-31 of its block.
    """
    size = weights.shape[-1]
    share = jnp.minimum(uniform + 2.0**-24, _BELOW_ONE)
    if size <= BLOCK:
        index, _ = _reached(weights, share=share)
    else:
        room = -size % BLOCK
        blocks = jnp.pad(weights, ((0, 0), (0, room))).reshape(len(weights), -1, BLOCK)
        block, share = _reached(blocks.sum(axis=-1), share=share)
        inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
        index = block * BLOCK + _reached(inside, share=share)[0]
    finite = jnp.isfinite(weights.sum(axis=-1))
    return jnp.where(finite, index, size - 1)


def _reached(weights: Array, *, share: Array) -> tuple[Array, Array]:
    """Where the sum of weights exceeds a share of the total, and the share left of it.

    Weights are counted in whole units of 2^-30 of their total. Sums of floats would
    round: where they do, the neighbour of a likely token comes too often, at 1e-7
    instead of its own probability.

    Returns:
      i32[B], of a count above 0, and f32[B], above 0 and below 1: how far the share
      reaches into that weight.
    """
    total = weights.sum(axis=-1, keepdims=True)
    # Integers add up exactly, whatever the order in which a backend sums them.
    counts = jnp.round(weights / total * 2.0**30).astype(jnp.int32)
    cumulative = jnp.cumsum(counts, axis=-1)
    target = (share * cumulative[:, -1].astype(jnp.float32)).astype(jnp.int32)
    index = jnp.argmax(cumulative > target[:, None], axis=-1)
    count, end = (
        jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]
        for x in (counts, cumulative)
    )
    left = (target - (end - count)).astype(jnp.float32) + 0.5
    return index, jnp.minimum(left / count.astype(jnp.float32), _BELOW_ONE)


def shape_logits(logits: Array, *, shaping: Shaping) -> Array:
    """Logits with every token that the shaping drops at -inf.

    top-k, top-p and min-p act in turn, each on what the one before has left, as in
    `transformers`. Tokens that tie with the last one kept are kept.

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
        # Exclusive: the token that crosses top_p is kept.
        before = jnp.cumsum(probs, axis=-1) - probs
        kept = jnp.where(before < shaping.top_p, descending, jnp.inf)
        smallest = kept.min(axis=-1, keepdims=True)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if shaping.min_p is not None:
        # p >= min_p · p_max, taken as logs: no softmax needed.
        smallest = logits.max(axis=-1, keepdims=True) + math.log(shaping.min_p)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    return logits
