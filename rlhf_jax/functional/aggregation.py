"""What a loss over tokens is the mean of, tokens or responses, in whatever parts.

Both means are sums with weights that know the whole minibatch, so that the losses of
its micro-batches *add up* to its loss, and so do their gradients.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, masked

Array = jax.Array
Stats = masked.Stats

Aggregation = Literal["token_mean", "sequence_mean"]
"""What a loss is the mean of: tokens, (1/N) Σ m·x, so that a long response weighs more,
or responses, (1/B) Σ_b (1/len_b) Σ_t m·x, so that all weigh the same."""


def token_weights(
    mask: Array,
    *,
    aggregation: Aggregation = "token_mean",
    num_tokens: Array | None = None,
    num_responses: Array | None = None,
) -> Array:
    """w with loss = Σ w·x: m/N, or m/(B·len_b) where responses weigh the same.

        mask     1  1  1  0      token_mean     1/4  1/4  1/4   0
                 1  0  0  0                     1/4   0    0    0
                 0  0  0  0                      0    0    0    0

                                 sequence_mean  1/6  1/6  1/6   0
                                                1/2   0    0    0
                                                 0    0    0    0

    Args:
      mask: bool[B, S], response tokens, EOS included. A row without any is not
        counted.
      aggregation: what the loss is the mean of.
      num_tokens: f32[], N of the whole minibatch when this is a micro-batch; None
        counts mask. Read by token_mean.
      num_responses: f32[], rows with a response token in the whole minibatch; None
        counts mask. Read by sequence_mean.

    Returns:
      f32[B, S], dimensionless, 0 outside the mask. Over a whole minibatch it sums to 1,
      in whatever parts it is taken.

    Raises:
      ValueError: a count is not a scalar, or only the count that is not read is given.
      TypeError: mask is not bool. InputError: no such aggregation.
    """
    checks.boolean(mask=mask)
    weights, weight = _weights(mask, aggregation)
    return weights / _count(weight, aggregation, num_tokens, num_responses)


def aggregate(
    name: str,
    x: Array,
    mask: Array,
    *,
    aggregation: Aggregation,
    num_tokens: Array | None,
    num_responses: Array | None,
) -> tuple[Array, Stats]:
    """Σ w·x, w as `token_weights`, and its statistic.

    Args:
      name: of the statistic.
      x: f32[B, S], one number a token; what stands outside the mask is not read.
      mask, aggregation, num_tokens, num_responses: as `token_weights`.

    Returns:
      f32[] and {name: (sum, weight)} of this part alone, without gradient, whose mean
      is the loss where the part is the whole.

    Raises:
      As `token_weights`. TypeError: x is not f32.
    """
    weights, weight = _weights(mask, aggregation)
    count = _count(weight, aggregation, num_tokens, num_responses)
    total = masked.masked_sum(weights * x, mask=mask)
    return total / count, {name: jax.lax.stop_gradient((total, weight))}


def _weights(mask: Array, aggregation: Aggregation) -> tuple[Array, Array]:
    """(f32[B, S], f32[]): what each token weighs here, and what all of them do."""
    weights = mask.astype(jnp.float32)
    if aggregation == "token_mean":
        return weights, jnp.sum(weights)
    if aggregation != "sequence_mean":
        raise checks.InputError(
            f"aggregation: expected 'token_mean' or 'sequence_mean', got "
            f"{aggregation!r}; choose one"
        )
    checks.shape((None, None), mask=mask)
    lengths = jnp.sum(weights, axis=1, keepdims=True)
    responses = jnp.sum(lengths > 0, dtype=jnp.float32)
    return weights / jnp.maximum(lengths, 1.0), responses


def _count(
    weight: Array,
    aggregation: Aggregation,
    num_tokens: Array | None,
    num_responses: Array | None,
) -> Array:
    """f32[], what a loss divides by: the given count, or what this part weighs."""
    read, other = "num_tokens", "num_responses"
    count, unread = num_tokens, num_responses
    if aggregation == "sequence_mean":
        read, other, count, unread = other, read, unread, count
    if count is None:
        if unread is not None:
            raise ValueError(
                f"{read}: expected the count of the whole minibatch, which "
                f"{aggregation} divides by, got {other} alone; give {read} or neither"
            )
        return jnp.maximum(weight, 1.0)
    checks.shape((), **{read: count})
    return jnp.maximum(jnp.asarray(count, jnp.float32), 1.0)
