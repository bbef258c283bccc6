"""The KL of two models at every token, exactly, from their hidden states."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks
from rlhf_jax.functional.kl import chunks
from rlhf_jax.functional.kl.estimators import Direction, check_k

Array = jax.Array


def exact_from_hidden(
    hidden: Array,
    head: Array,
    ref_hidden: Array,
    ref_head: Array,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    first_column: int = 1,
    direction: Direction = "reverse",
    max_logits: int = 2**24,
) -> Array:
    """`exact` of logits = hidden·headᵀ, never holding [B, S, V], forward or backward.

    Words are taken some at a time, of all positions at once, so that a batch which is
    sharded stays so; a head which is sharded over words is gathered. The backward pass
    computes the logits of a chunk again. Products are taken in hidden's dtype and
    accumulated in float32.

    Args:
      hidden: floats[B, S, D], the policy's last layer after its norm.
      head: floats[V', D], rows from `vocab_size` on being padding that is not read.
      ref_hidden, ref_head: floats[B, S, D'] and floats[V'', D'], the reference's; its
        width and its padding may differ.
      temperature: divides the logits of both, dimensionless.
      vocab_size: V, the true vocabulary; None when no row is padding.
      softcap: c of logits c·tanh(x / c) of both, before the temperature; None leaves
        them.
      first_column: the first column that is wanted; earlier ones are not computed
        and come back as 0. The prompt's width P gives the response alone.
      direction: "reverse" is KL(π ‖ π_ref), "forward" KL(π_ref ‖ π).
      max_logits: logits to hold at a time, those of both models together; one word of
        each (2·B·S) is the least.

    Returns:
      f32[B, S], nats; column t is about the distribution that tokens[:, t] was drawn
      from, given the columns before it. Column 0 is 0. The gradient reaches `hidden`
      and `head` only; a column whose cotangent is 0 (masked out) plays no part in it,
      whatever its hidden state.

    Raises:
      ValueError: shapes do not belong together, temperature is not positive, or
      vocab_size, first_column or max_logits is out of range. TypeError: not floats.

    Source: as `exact`; the running sums are those of Milakov and Gimelshein 2018,
    arXiv:1805.02867.
    """
    return _from_hidden(
        (hidden, head),
        (ref_hidden, ref_head),
        k=None,
        temperature=temperature,
        vocab_size=vocab_size,
        softcap=softcap,
        first_column=first_column,
        direction=direction,
        max_logits=max_logits,
    )


def top_k_from_hidden(
    hidden: Array,
    head: Array,
    ref_hidden: Array,
    ref_head: Array,
    *,
    k: int,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    first_column: int = 1,
    direction: Direction = "reverse",
    max_logits: int = 2**24,
) -> Array:
    """`top_k` of logits = hidden·headᵀ, never holding [B, S, V].

    The k words are found on the way; which they are, no gradient knows.

    Args:
      k: words that stand alone, 1 to V.
      hidden, head, ref_hidden, ref_head, temperature, vocab_size, softcap,
        first_column, direction, max_logits: as `exact_from_hidden`.

    Returns, Raises: as `exact_from_hidden`; ValueError also where k is out of range.
    """
    return _from_hidden(
        (hidden, head),
        (ref_hidden, ref_head),
        k=k,
        temperature=temperature,
        vocab_size=vocab_size,
        softcap=softcap,
        first_column=first_column,
        direction=direction,
        max_logits=max_logits,
    )


def _from_hidden(
    policy: tuple[Array, Array],
    reference: tuple[Array, Array],
    *,
    k: int | None,
    temperature: float,
    vocab_size: int | None,
    softcap: float | None,
    first_column: int,
    direction: Direction,
    max_logits: int,
) -> Array:
    (hidden, head), (ref_hidden, ref_head) = policy, reference
    checks.shape((None, None, None), hidden=hidden)
    batch, columns, _ = hidden.shape
    checks.shape((batch, columns, None), ref_hidden=ref_hidden)
    checks.shape((None, hidden.shape[-1]), head=head)
    checks.shape((None, ref_hidden.shape[-1]), ref_head=ref_head)
    checks.floating(hidden=hidden, head=head, ref_hidden=ref_hidden, ref_head=ref_head)
    checks.positive(
        temperature=temperature,
        first_column=first_column,
        max_logits=max_logits,
        softcap=1.0 if softcap is None else softcap,
    )
    padded, ref_padded = head.shape[0], ref_head.shape[0]
    if vocab_size is None and padded != ref_padded:
        raise checks.InputError(
            f"vocab_size: expected the true vocabulary's size where the heads have "
            f"{padded} and {ref_padded} rows, got None; pass it"
        )
    vocab_size = padded if vocab_size is None else vocab_size
    if not 0 < vocab_size <= min(padded, ref_padded):
        raise checks.InputError(
            f"vocab_size: expected 1 to {min(padded, ref_padded)} (the rows of head "
            f"and of ref_head), got {vocab_size}; pass the size of the true vocabulary"
        )
    if k is not None:
        check_k(k, vocab_size)
    before = ((0, 0), (min(first_column, columns), 0))
    if first_column >= columns:
        return jnp.zeros((batch, columns), jnp.float32)
    found = chunks.divergence(
        hidden[:, first_column - 1 : -1],
        head,
        ref_hidden[:, first_column - 1 : -1],
        ref_head,
        temperature=temperature,
        plan=chunks.Plan(
            vocab_size=vocab_size,
            chunk=_chunk(vocab_size, max_logits // (2 * batch * columns)),
            forward=direction == "forward",
            k=k,
            softcap=softcap,
        ),
    )
    return jnp.pad(found, before)


def _chunk(vocab_size: int, most: int) -> int:
    """Words at a time: even chunks leave the fewest that are seen twice."""
    num_chunks = -(-vocab_size // max(1, most))
    return -(-vocab_size // num_chunks)
