"""Exact divergences of two models at every token, from their hidden states.

Columns shift by one here, as in `logprobs`: position t - 1 predicts token t.
"""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int32

from rlhf_jax.functional import checks, unused_ids
from rlhf_jax.functional.kl import chunks, passes
from rlhf_jax.functional.kl.estimators import Direction
from rlhf_jax.functional.logprob_chunks import chunk_size

Array = jax.Array
Scalar = checks.Scalar


def exact_from_hidden(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "rows D"],
    ref_hidden: Float[Array, "B S ref_D"],
    ref_head: Float[Array, "ref_rows ref_D"],
    *,
    temperature: Scalar = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    ref_softcap: float | None = None,
    first_column: int = 1,
    direction: Direction = "reverse",
    k: int | None = None,
    max_logits: int = 2**24,
    unused: unused_ids.Ranges = (),
) -> Float32[Array, "B S"]:
    """Exact KL of logits = hidden·headᵀ, without an array [B, S, V] in either pass.

    With k it is `kl.top_k`: over the policy's k most likely tokens and one bucket.

    The vocabulary is read in chunks, each for all positions at once: a sharded batch
    stays sharded, and a head that is sharded over the vocabulary is gathered. The
    backward pass rematerialises the logits of each chunk. Products are computed in
    hidden's dtype and accumulated in float32.

    Args:
      hidden: floats[B, S, D], the policy's last layer after its norm.
      head: floats[V', D]; rows from `vocab_size` on are padding and are not read.
      ref_hidden, ref_head: floats[B, S, D'] and floats[V'', D'], the reference's; its
        width and its padding may differ.
      vocab_size: V, the true vocabulary; None when no row is padding.
      softcap, ref_softcap: c of the soft-capped logits c·tanh(x / c) of the policy and
        the reference, before the temperature; None disables it.
      first_column: the first column to compute; earlier ones are 0. The prompt's width
        P gives the response alone.
      direction: "reverse" is KL(π ‖ π_ref), "forward" KL(π_ref ‖ π).
      k: tokens outside the bucket, 1 to V, found in the same pass; no gradient flows
        through their choice. None takes every token.
      max_logits: logits of both models in memory at a time. The least is one token of
        the vocabulary for every position (2·B·S).
      unused: ranges of ids below `vocab_size` that are not tokens; they have
        probability 0 in both distributions.

    Returns:
      f32[B, S], nats; column t is about the distribution that tokens[:, t] was drawn
      from, given the columns before it. Column 0 is 0. The gradient reaches `hidden`,
      `head` and `temperature`. Columns whose cotangent is 0 (masked out) do not
      contribute to it, whatever their hidden states.

    Source: Cover and Thomas, Elements of Information Theory, eq. 2.26, and for the
    bucket theorem 2.7.1, the log-sum inequality; the running sums are those of Milakov
    and Gimelshein 2018, arXiv:1805.02867.

    >>> hidden = jnp.array([[[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]])
    >>> head = jnp.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    >>> print(exact_from_hidden(hidden, head, hidden, 2 * head))
    [[0.    0.16  0.174]]
    >>> print(exact_from_hidden(hidden, head, hidden, 2 * head, k=1))
    [[0.    0.132 0.156]]
    >>> from rlhf_jax import kl
    >>> print(kl.exact(hidden @ head.T, 2 * hidden @ head.T)[:, :-1])  # unshifted
    [[0.16  0.174]]
    """
    return _from_hidden(
        (hidden, head),
        (ref_hidden, ref_head),
        k=k,
        temperature=temperature,
        vocab_size=vocab_size,
        softcap=softcap,
        ref_softcap=ref_softcap,
        first_column=first_column,
        direction=direction,
        max_logits=max_logits,
        unused=unused,
    )


def head_from_hidden(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "rows D"],
    ref_hidden: Float[Array, "B S ref_D"],
    ref_head: Float[Array, "ref_rows ref_D"],
    *,
    tokens: Int32[Array, "B S"],
    k: int,
    temperature: Scalar = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    ref_softcap: float | None = None,
    first_column: int = 1,
    max_logits: int = 2**24,
    unused: unused_ids.Ranges = (),
) -> tuple[Float32[Array, "B S"], Bool[Array, "B S"]]:
    """Σ_{v in K} P_v log(P_v/Q_v) of the policy's k most likely tokens K.

    P and Q are normalised over the whole vocabulary. `penalty.with_sampled_tail` adds
    an estimate of the other tokens' part of the KL.

    Args:
      tokens: i32[B, S], the sampled tokens; column t is about tokens[:, t].
      k: number of tokens in K, 1 to V.
      the others: as in `exact_from_hidden`.

    Returns:
      f32[B, S], nats, of either sign, and bool[B, S], True where tokens[:, t] is in K.
      The gradient, Σ_{v in K} ∇P_v·log(P_v/Q_v), reaches `hidden` and `head`.

    Source: Zhang and Ba 2026, arXiv:2602.04417, top-k KL.

    >>> hidden = jnp.array([[[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]])
    >>> head = jnp.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    >>> models = hidden, head, hidden, 2 * head
    >>> part, inside = head_from_hidden(*models, tokens=jnp.array([[0, 2, 1]]), k=1)
    >>> print(part, inside)
    [[ 0.    -0.176 -0.108]] [[False  True False]]
    >>> print(head_from_hidden(*models, tokens=jnp.array([[0, 2, 1]]), k=3)[0])  # all
    [[0.    0.16  0.174]]
    """
    checks.shape(hidden.shape[:2], tokens=tokens)
    return _from_hidden(
        (hidden, head),
        (ref_hidden, ref_head),
        k=k,
        temperature=temperature,
        vocab_size=vocab_size,
        softcap=softcap,
        ref_softcap=ref_softcap,
        first_column=first_column,
        direction="reverse",
        max_logits=max_logits,
        tokens=tokens,
        unused=unused,
    )


def jensen_shannon_from_hidden(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "rows D"],
    ref_hidden: Float[Array, "B S ref_D"],
    ref_head: Float[Array, "ref_rows ref_D"],
    *,
    beta: Scalar,
    k: int | None = None,
    temperature: Scalar = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    ref_softcap: float | None = None,
    first_column: int = 1,
    max_logits: int = 2**24,
    unused: unused_ids.Ranges = (),
) -> Float32[Array, "B S"]:
    """Generalised Jensen-Shannon divergence, without an array [B, S, V] in either pass.

    JSD_β = β·KL(π_ref ‖ M) + (1 - β)·KL(π ‖ M) with M = β·π_ref + (1 - β)·π: it is
    `kl.jensen_shannon` of logits = hidden·headᵀ. The vocabulary is read twice, as the
    mixture needs both normalisers, and once more in the backward pass.

    Args:
      beta: β, share of the reference in the mixture, between 0 and 1; the gradient
        reaches it.
      k: take the policy's k most likely tokens one by one and all others as one bucket,
        as `kl.top_k` does; None takes every token.
      the others, and the result: as in `exact_from_hidden`.

    Source: Agarwal et al. 2023, arXiv:2306.13649, eq. 1.

    >>> hidden = jnp.array([[[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]])
    >>> head = jnp.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    >>> models = hidden, head, hidden, 2 * head
    >>> print(jensen_shannon_from_hidden(*models, beta=0.5))
    [[0.    0.032 0.027]]
    >>> print(jensen_shannon_from_hidden(*models, beta=0.5, k=1))
    [[0.    0.029 0.026]]
    """
    return _from_hidden(
        (hidden, head),
        (ref_hidden, ref_head),
        k=k,
        temperature=temperature,
        vocab_size=vocab_size,
        softcap=softcap,
        ref_softcap=ref_softcap,
        first_column=first_column,
        direction="reverse",
        max_logits=max_logits,
        beta=beta,
        unused=unused,
    )


def _from_hidden(
    policy: tuple[Array, Array],
    reference: tuple[Array, Array],
    *,
    k: int | None,
    temperature: Scalar,
    vocab_size: int | None,
    softcap: float | None,
    ref_softcap: float | None,
    first_column: int,
    direction: Direction,
    max_logits: int,
    unused: unused_ids.Ranges,
    beta: Scalar | None = None,
    tokens: Array | None = None,
) -> Any:
    (hidden, head), (ref_hidden, ref_head) = policy, reference
    checks.shape((None, None, None), hidden=hidden)
    batch, columns, _ = hidden.shape
    checks.shape((batch, columns, None), ref_hidden=ref_hidden)
    checks.shape((None, hidden.shape[-1]), head=head)
    checks.shape((None, ref_hidden.shape[-1]), ref_head=ref_head)
    checks.floating(hidden=hidden, head=head, ref_hidden=ref_hidden, ref_head=ref_head)
    checks.at_least_one(max_logits=max_logits)
    checks.one_of(direction=direction, among=get_args(Direction))
    checks.positive(
        temperature=temperature,
        first_column=first_column,
        softcap=softcap,
        ref_softcap=ref_softcap,
    )
    padded, ref_padded = head.shape[0], ref_head.shape[0]
    if vocab_size is None and padded != ref_padded:
        raise checks.InputError(
            f"vocab_size: expected the true vocabulary's size where the heads have "
            f"{padded} and {ref_padded} rows, got None; pass it"
        )
    vocab_size = padded if vocab_size is None else vocab_size
    checks.within(
        least=1,
        most=min(padded, ref_padded),
        advice="pass the true vocabulary's size, at most the rows of either head",
        vocab_size=vocab_size,
    )
    if unused:
        unused_ids.check(unused, vocab_size=vocab_size)
    checks.within(
        least=1,
        most=vocab_size,
        advice="choose fewer tokens of the vocabulary, or the exact KL",
        k=k,
    )
    before = ((0, 0), (min(first_column, columns), 0))
    if first_column >= columns or batch == 0:
        nothing = jnp.zeros((batch, columns), jnp.float32)
        return nothing if tokens is None else (nothing, nothing > 0)
    plan = passes.Plan(
        vocab_size=vocab_size,
        chunk=chunk_size(vocab_size, most=max_logits // (2 * batch * columns)),
        forward=direction == "forward",
        k=k,
        head=tokens is not None,
        softcap=softcap,
        ref_softcap=ref_softcap,
        unused=unused,
    )
    preceding = slice(first_column - 1, -1)
    models = hidden[:, preceding], head, ref_hidden[:, preceding], ref_head
    if tokens is None:
        results = chunks.divergence(
            *models, temperature=temperature, plan=plan, beta=beta
        )
    else:
        tokens = tokens[:, first_column:]
        results = chunks.head_and_inside(
            *models, tokens=tokens, temperature=temperature, plan=plan
        )
    return jax.tree.map(lambda x: jnp.pad(x, before), results)
