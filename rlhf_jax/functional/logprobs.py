"""Logits or hidden states -> log-probs of the tokens, and entropy.

This is one of the places where columns shift by one. Position t-1 predicts token t:

    column            0    1    2    3
    tokens            a    b    c    d
    logits[:, t]      of b of c of d of ·
    logprobs[:, t]    0    of b of c of d
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, logprob_chunks

Array = jax.Array

MAX_LOGITS = 2**24  # to hold at a time on one device, 64 MiB


def token_logprobs(logits: Array, tokens: Array, *, temperature: float = 1.0) -> Array:
    """log softmax(logits[:, t-1] / temperature)[tokens[:, t]], column 0 being 0.

    Args:
      logits: floats[B, S, V] of any precision; the log-softmax is taken in float32.
      tokens: i32[B, S].
      temperature: divides the logits, dimensionless; the same in every role.

    Returns:
      f32[B, S], nats; column t is about tokens[:, t].

    Raises:
      ValueError: shapes do not belong together or temperature is not positive.
      TypeError: logits are not floats or tokens not int32.
    """
    checks.shape((None, None), tokens=tokens)
    checks.shape((*tokens.shape, None), logits=logits)
    checks.floating(logits=logits)
    checks.int32(tokens=tokens)
    checks.positive(temperature=temperature)
    logprobs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32) / temperature)
    return jnp.pad(_pick(logprobs, tokens[:, 1:]), ((0, 0), (1, 0)))


def entropy(logits: Array, *, temperature: float = 1.0) -> Array:
    """-Σ_v π(v) log π(v) with π = softmax(logits / temperature) and 0·log 0 = 0.

    Nothing is shifted: entry t is about the token *after* tokens[:, t].

    Args:
      logits: floats[..., V] of any precision; taken to float32.
      temperature: divides the logits, dimensionless.

    Returns:
      f32[...], nats per logit position.

    Raises:
      ValueError: temperature is not positive. TypeError: logits are not floats.
    """
    checks.floating(logits=logits)
    checks.positive(temperature=temperature)
    return _entropy(jax.nn.log_softmax(logits.astype(jnp.float32) / temperature))


def token_logprobs_from_hidden(
    hidden: Array,
    head: Array,
    tokens: Array,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    first_column: int = 1,
    max_logits: int = MAX_LOGITS,
) -> tuple[Array, Array]:
    """`token_logprobs` and `entropy` of logits = hidden·headᵀ, never holding [B, S, V].

    Words are taken some at a time, of all positions at once, so that a batch which is
    sharded stays so; a head which is sharded over words stays so too (on up to 16
    devices that divide it). The backward pass computes the logits of a chunk again.
    Products are taken in hidden's dtype and accumulated in float32. Forward mode
    (`jax.jvp`) computes them again, too.

    Args:
      hidden: floats[B, S, D], the last layer's output after its norm.
      head: floats[V', D], rows from `vocab_size` on being padding, whatever they hold.
      tokens: i32[B, S].
      temperature: divides the logits, dimensionless; the same in every role.
      vocab_size: V, the true vocabulary; None when no row is padding.
      softcap: c of logits c·tanh(x / c), before the temperature (Gemma 2,
        arXiv:2408.00118); None leaves them.
      first_column: the first column that is wanted; earlier ones are not computed
        and come back as 0. The prompt's width P gives the response alone.
      max_logits: logits to hold at a time, on all devices together; 16 words of every
        position are the least (fewer of a head whose rows 16 does not divide).

    Returns:
      f32[B, S] log-probs and f32[B, S] entropies, nats; column t of both is about the
      distribution that tokens[:, t] was drawn from. Column 0 is 0. The gradient
      reaches `hidden`, `head` and `temperature`; a column whose cotangents are 0
      (masked out) plays no part in it, whatever its hidden state.

    Raises:
      ValueError: shapes do not belong together, temperature is not positive, or
      vocab_size, first_column or max_logits is out of range. TypeError: hidden or
      head are not floats or tokens not int32.
    """
    checks.shape((None, None), tokens=tokens)
    checks.shape((*tokens.shape, None), hidden=hidden)
    checks.shape((None, hidden.shape[-1]), head=head)
    checks.floating(hidden=hidden, head=head)
    checks.int32(tokens=tokens)
    checks.positive(
        temperature=temperature,
        first_column=first_column,
        max_logits=max_logits,
        softcap=1.0 if softcap is None else softcap,
    )
    batch, columns = tokens.shape
    padded = head.shape[0]
    vocab_size = padded if vocab_size is None else vocab_size
    if not 0 < vocab_size <= padded:
        raise checks.InputError(
            f"vocab_size: expected 1 to {padded} (the rows of head), got {vocab_size}; "
            "pass the size of the true vocabulary"
        )

    before = ((0, 0), (min(first_column, columns), 0))
    if first_column >= columns or batch == 0:
        nothing = jnp.zeros((batch, columns), jnp.float32)
        return nothing, nothing
    wanted = tokens[:, first_column:]
    # Rows and columns as one axis: products of matrices, the fastest everywhere.
    found = logprob_chunks.logprobs_and_entropy(
        hidden[:, first_column - 1 : -1].reshape(wanted.size, -1),
        head,
        wanted.reshape(-1),
        temperature=temperature,
        plan=logprob_chunks.plan(
            vocab_size=vocab_size,
            rows=padded,
            positions=wanted.size,
            max_logits=max_logits,
            softcap=softcap,
        ),
    )
    logprobs, entropies = (
        jnp.pad(array.reshape(wanted.shape), before) for array in found
    )
    return logprobs, entropies


def _pick(logprobs: Array, tokens: Array) -> Array:
    return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]


def _entropy(logprobs: Array) -> Array:
    possible = jnp.where(logprobs > -jnp.inf, logprobs, 0.0)
    return -jnp.sum(jnp.exp(logprobs) * possible, axis=-1)
