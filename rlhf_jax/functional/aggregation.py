"""Aggregation: how the losses of tokens become one loss.

The weights are computed over the whole minibatch, so the losses of its micro-batches
*add up* to its loss, and so do their gradients.

                     weight of a token of response b
    token_mean       1/N               N = Σ_b len_b of the minibatch
    sequence_mean    1/(B·len_b)
    prompt_mean      1/(B·c_b)         c_b: mean length of the responses to its prompt
    constant         1/(B·c)           c = loss_scale_factor, the same at every update

A policy gradient is the mean over responses of a *sum* over tokens. So `constant` is
the only one of the four whose expected gradient is that of the objective, times 1/c.
The three means divide by lengths. The policy chooses lengths, and they are correlated
with rewards, so with a stop token the expected direction is biased. Under sequence_mean
a token of a long response has a smaller weight than a token of a short one. Under
token_mean all tokens of a minibatch have the same weight, which is smaller where
responses are longer; prompt_mean does so within the responses to each prompt. Where all
responses have one length the four agree, up to the factor c/len.
"""

from __future__ import annotations

from typing import Literal, TypedDict, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Shaped

from rlhf_jax.functional import checks, masked

Array = jax.Array
Stats = masked.Stats

LossScale = checks.Scalar | Float32[Array, " B"] | None
"""Number of tokens that divides the sum over a response: c for constant, c_b of each
row for prompt_mean; None for token_mean and sequence_mean, which count tokens."""
Aggregation = Literal["token_mean", "sequence_mean", "prompt_mean", "constant"]
"""token_mean: mean over tokens. sequence_mean: mean over responses of their means over
tokens. prompt_mean: mean over prompts of the mean over the tokens of all responses to
the prompt. constant: mean over responses of their sums over tokens, divided by c."""


class Mean(TypedDict, total=False):
    """Keyword arguments that losses pass on to `aggregate` (see `token_weights`)."""

    aggregation: Aggregation
    loss_scale_factor: LossScale
    num_tokens: Shaped[Array, ""] | None
    num_responses: Shaped[Array, ""] | None


def bias(aggregation: Aggregation) -> str | None:
    """Returns how the expected gradient is biased where lengths differ; None if not.

    `kl.gradients` and `advantages` describe gradients of sums over responses, which
    `constant` has, times 1/loss_scale_factor.

    >>> bias("sequence_mean")[:43]
    "aggregation 'sequence_mean' divides the sum"
    >>> print(bias("constant"))
    None
    """
    divisor = {
        "token_mean": "the tokens of its minibatch",
        "sequence_mean": "its own tokens",
        "prompt_mean": "the tokens of all responses to its prompt",
        "constant": None,
    }[aggregation]
    if divisor is None:
        return None
    return (
        f"aggregation {aggregation!r} divides the sum over a response by the number of "
        f"{divisor}: where responses differ in length, the expected gradient does not "
        f"have the direction named; with aggregation 'constant' it has"
    )


def token_weights(
    mask: Bool[Array, "*shape"],
    *,
    aggregation: Aggregation = "token_mean",
    loss_scale_factor: LossScale = None,
    num_tokens: Shaped[Array, ""] | None = None,
    num_responses: Shaped[Array, ""] | None = None,
) -> Float32[Array, "*shape"]:
    """Weights w of loss = Σ w·x: m/N, m/(B·len_b), m/(B·c_b) or m/(B·c).

        mask     1  1  1  0      token_mean     1/4  1/4  1/4   0
                 1  0  0  0                     1/4   0    0    0
                 0  0  0  0                      0    0    0    0

                                 sequence_mean  1/6  1/6  1/6   0
                                                1/2   0    0    0
                                                 0    0    0    0

                                 constant, 4    1/8  1/8  1/8   0
                                                1/8   0    0    0
                                                 0    0    0    0

                                 prompt_mean    1/4  1/4  1/4   0    the first two
                                                1/4   0    0    0    rows one prompt
                                                 0    0    0    0

    Args:
      mask: bool[B, S], response tokens, EOS included. Rows without a token do not count
        as responses.
      aggregation: one of the four above.
      loss_scale_factor: with constant c, tokens: 1 sums over a response; the largest
        number of response tokens keeps the loss about as large as a mean. With
        prompt_mean f32[B], c_b of each row (`prompt_scale`). None otherwise.
      num_tokens: f32[], N of the whole minibatch when this is a micro-batch; None
        counts mask. Read by token_mean.
      num_responses: f32[], rows with a response token in the whole minibatch; None
        counts mask. Read by all aggregations but token_mean.

    Returns:
      f32[B, S], dimensionless, 0 outside the mask. The weights of a whole minibatch sum
      to 1; with constant, to the mean length divided by c; with prompt_mean, to 1 on
      average over minibatches, and exactly where one has all responses to its prompts.

    Raises:
      ValueError: a count is not a scalar, or only the count that is not read is given.
      TypeError: mask is not bool. InputError: aggregation is unknown, or
      loss_scale_factor does not fit it.

    Source: constant is Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2;
    prompt_mean is Khatri et al. 2025 (ScaleRL), arXiv:2510.13786, section 3.2.

    >>> mask = jnp.array([[True, True, True, False], [True, False, False, False]])
    >>> print(token_weights(mask))
    [[0.25 0.25 0.25 0.  ]
     [0.25 0.   0.   0.  ]]
    >>> print(token_weights(mask, aggregation="sequence_mean"))
    [[0.167 0.167 0.167 0.   ]
     [0.5   0.    0.    0.   ]]
    >>> print(token_weights(mask, aggregation="constant", loss_scale_factor=4))
    [[0.125 0.125 0.125 0.   ]
     [0.125 0.    0.    0.   ]]
    """
    checks.boolean(mask=mask)
    weights, weight = _weights(mask, aggregation, loss_scale_factor)
    return weights / _count(weight, aggregation, num_tokens, num_responses)


def aggregate(
    name: str,
    x: Float32[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    aggregation: Aggregation = "token_mean",
    loss_scale_factor: LossScale = None,
    num_tokens: Shaped[Array, ""] | None = None,
    num_responses: Shaped[Array, ""] | None = None,
) -> tuple[Float32[Array, ""], Stats]:
    """Σ w·x with the weights w of `token_weights`, and its statistic.

    Args:
      x: f32[B, S], one number per token; entries outside the mask are not read.
      the others: as in `token_weights`.

    Returns:
      f32[] and {name: (sum, weight)} of these rows alone, without gradient. sum/weight
      is the loss where these rows are the whole minibatch.

    >>> x = jnp.array([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0]])
    >>> mask = jnp.array([[True, True, True, False], [True, False, False, False]])
    >>> print(aggregate("kl", x, mask)[0])
    2.5
    >>> print(aggregate("kl", x, mask, aggregation="sequence_mean")[0])
    3.0
    """
    weights, weight = _weights(mask, aggregation, loss_scale_factor)
    count = _count(weight, aggregation, num_tokens, num_responses)
    total = masked.masked_sum(weights * x, mask=mask)
    # Loss and statistic differ in the divisor: the loss takes the minibatch's count,
    # the statistic its own weight, so that both add up over parts.
    return total / count, {name: jax.lax.stop_gradient((total, weight))}


def prompt_scale(mask: Bool[Array, "B S"], *, group_size: int) -> Float32[Array, " B"]:
    """c_b = N_p/(B/P), the divisor of prompt_mean for a response b to prompt p.

    N_p is the number of tokens in the responses to p, B the number of responses with a
    token, and P the number of prompts with one. So 1/(B·c_b) = 1/(P·N_p) over a whole
    rollout. A row keeps its c_b in every minibatch, whatever the other rows are.

        mask     1  1  1  0    group_size = 2: N = (4, 2), B/P = 3/2
                 1  0  0  0
                 1  1  0  0    c = (8/3, 8/3, 4/3, 4/3)
                 0  0  0  0

    Args:
      mask: bool[B, S], response tokens of a whole rollout, each group in neighbouring
        rows.
      group_size: G, responses to each prompt; divides B.

    Returns:
      f32[B], tokens; 1 for prompts without a token.

    >>> rows = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    >>> mask = jnp.array(rows, bool)
    >>> print(prompt_scale(mask, group_size=2))
    [2.667 2.667 1.333 1.333]
    >>> print(prompt_scale(mask[:2], group_size=2))  # the mean length
    [2. 2.]
    """
    checks.boolean(mask=mask)
    checks.groups(mask.shape[0], group_size=group_size)
    lengths = mask.sum(axis=1, dtype=jnp.float32).reshape(-1, group_size)
    tokens = lengths.sum(axis=1)
    # Rows that were left out have no token, and do not count as responses.
    responses = (lengths > 0).sum(dtype=jnp.float32)
    prompts = (tokens > 0).sum(dtype=jnp.float32)
    # Counted over the rollout: the shuffled rows of a minibatch split groups.
    scale = tokens * prompts / jnp.maximum(responses, 1.0)
    return jnp.repeat(jnp.where(tokens > 0, scale, 1.0), group_size)


def check_scale(
    aggregation: Aggregation, *, loss_scale_factor: checks.Scalar | None
) -> None:
    """Checks that constant has a positive loss_scale_factor, and a mean has none.

    Args:
      loss_scale_factor: c, tokens, or None.

    Raises:
      InputError: constant without a positive number, or a mean with a number.

    >>> print(check_scale("constant", loss_scale_factor=128))
    None
    >>> check_scale("token_mean", loss_scale_factor=128)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: loss_scale_factor: expected None with
        aggregation 'token_mean', which divides by what it counts, got 128; choose
        aggregation 'constant', or leave it out
    """
    if loss_scale_factor is None:
        if aggregation == "constant":
            raise checks.InputError(
                "loss_scale_factor: expected the number of tokens that aggregation "
                "'constant' divides by, got None; give the largest number of tokens "
                "of a response, or 1 for the sum over a response"
            )
        return
    if aggregation != "constant":
        raise checks.InputError(
            f"loss_scale_factor: expected None with aggregation {aggregation!r}, which "
            f"divides by what it counts, got {loss_scale_factor}; choose aggregation "
            f"'constant', or leave it out"
        )
    checks.positive(loss_scale_factor=loss_scale_factor)


def _weights(
    mask: Array, aggregation: Aggregation, loss_scale_factor: LossScale
) -> tuple[Array, Array]:
    """f32[B, S] weights, to be divided by a count, and f32[], these rows' count."""
    checks.one_of(aggregation=aggregation, among=get_args(Aggregation))
    weights = mask.astype(jnp.float32)
    shape = () if loss_scale_factor is None else jnp.shape(loss_scale_factor)
    per_row = shape != ()
    if per_row != (aggregation == "prompt_mean"):
        expected = {
            "prompt_mean": "the f32[B] of `prompt_scale`, of the whole rollout,",
            "constant": "one number of tokens",
        }.get(aggregation, "None")
        got = f"an array {shape}" if per_row else "no array"
        raise checks.InputError(
            f"loss_scale_factor: expected {expected} with aggregation "
            f"{aggregation!r}, got {got}; pass what it divides by, or choose another "
            f"aggregation"
        )
    if loss_scale_factor is not None and per_row:
        checks.shape((None, None), mask=mask)
        loss_scale_factor = jnp.asarray(loss_scale_factor)
        checks.shape((mask.shape[0],), loss_scale_factor=loss_scale_factor)
        # Packed parts have c_b = 0 in the rows of other parts.
        scale = jax.lax.stop_gradient(loss_scale_factor)
        scale = jnp.where(scale > 0, scale, 1.0)
        responses = jnp.sum(mask.any(axis=1), dtype=jnp.float32)
        return weights / scale[:, None], responses
    check_scale(aggregation, loss_scale_factor=loss_scale_factor)
    if aggregation == "token_mean":
        return weights, jnp.sum(weights)
    checks.shape((None, None), mask=mask)
    lengths = jnp.sum(weights, axis=1, keepdims=True)
    responses = jnp.sum(lengths > 0, dtype=jnp.float32)
    if loss_scale_factor is not None:
        scale = jnp.asarray(loss_scale_factor, jnp.float32)
        return weights / jax.lax.stop_gradient(scale), responses
    return weights / jnp.maximum(lengths, 1.0), responses


def _count(
    weight: Array,
    aggregation: Aggregation,
    num_tokens: Array | None,
    num_responses: Array | None,
) -> Array:
    """f32[], the count that divides a loss: of the whole minibatch if it is given."""
    read, other = "num_tokens", "num_responses"
    count, unread = num_tokens, num_responses
    if aggregation != "token_mean":
        read, other, count, unread = other, read, unread, count
    if count is None:
        if unread is not None:
            raise ValueError(
                f"{read}: expected the count of the whole minibatch, which "
                f"{aggregation} divides by, got {other} alone; give {read} or neither"
            )
        return jnp.maximum(weight, 1.0)
    checks.shape((), **{read: count})
    return jnp.maximum(jax.lax.stop_gradient(jnp.asarray(count, jnp.float32)), 1.0)
