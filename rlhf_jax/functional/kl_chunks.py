"""KL of two heads over one vocabulary, some words at a time, with its own gradient.

Nothing here shifts columns: position t is about the distribution that hidden[:, t]
gives. `kl.exact_from_hidden` and `kl.top_k_from_hidden` are the public names.

With z, y the logits / temperature of policy and reference, P, Q their softmax, and
L_v = log(P_b / Q_b) of the bucket b that holds word v (a bucket of its own, unless v is
in the tail of a top-k KL), the gradient with respect to z_v is

    reverse  Σ_b P_b log(P_b/Q_b)    P_v (L_v - KL)
    forward  Σ_b Q_b log(Q_b/P_b)    P_v (1 - exp(-L_v))

so the backward pass needs the two log-sum-exps and the KL of a position, and computes
the logits of a chunk again. Chunks are slices of equal size of the true vocabulary; the
last one starts early enough to be whole, and words that were seen before are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Plan(NamedTuple):
    """What is fixed at trace time."""

    temperature: float  # divides the logits, dimensionless
    vocab_size: int  # words; rows of a head from here on are padding and never read
    chunk: int  # words at a time, 1 to vocab_size
    forward: bool  # KL(ref ‖ π) and not KL(π ‖ ref)
    k: int | None  # words of the policy one by one, the rest in one bucket; None is all


class _Tail(NamedTuple):
    """The buckets of a top-k KL."""

    ids: Array  # i32[B, T, k], words that are a bucket each
    log_ratio: Array  # f32[B, T], L of the bucket of all other words


def divergence(
    hidden: Array, head: Array, ref_hidden: Array, ref_head: Array, plan: Plan
) -> Array:
    """KL of softmax(hidden·headᵀ / T) and softmax(ref_hidden·ref_headᵀ / T).

    Args:
      hidden: floats[B, T, D]. head: floats[V', D].
      ref_hidden: floats[B, T, D']. ref_head: floats[V'', D'].
      plan: direction, buckets, chunks.

    Returns:
      f32[B, T], nats. The gradient reaches `hidden` and `head` only; a position whose
      cotangent is 0 plays no part in it, whatever stands there.
    """
    with_gradient = jax.custom_vjp(_value, nondiff_argnums=(4,))
    with_gradient.defvjp(_forward, _backward)
    return jnp.asarray(with_gradient(hidden, head, ref_hidden, ref_head, plan))


def _value(
    hidden: Array, head: Array, ref_hidden: Array, ref_head: Array, plan: Plan
) -> Array:
    return _forward(hidden, head, ref_hidden, ref_head, plan)[0]


def _forward(
    hidden: Array, head: Array, ref_hidden: Array, ref_head: Array, plan: Plan
) -> tuple[Array, Any]:
    policy, reference = (hidden, head), (ref_hidden, ref_head)
    if plan.k is None:
        first, second = (reference, policy) if plan.forward else (policy, reference)
        kl, log_sum, other_log_sum = _exact(first, second, plan)
        sums = (other_log_sum, log_sum) if plan.forward else (log_sum, other_log_sum)
        return kl, (policy, reference, kl, sums, None)
    kl, sums, tail = _top_k(policy, reference, plan)
    return kl, (policy, reference, kl, sums, tail)


def _exact(
    first: tuple[Array, Array], second: tuple[Array, Array], plan: Plan
) -> tuple[Array, Array, Array]:
    """KL(first ‖ second) and the log-sum-exp of both, in one pass.

    Σ_v e^(z_v - max)(z_v - y_v) goes along with the two sums; of equal models it is 0
    to the bit, and so is the KL.
    """

    def step(carry: tuple[Array, ...], index: Array) -> tuple[Array, ...]:
        largest, total, other_largest, other_total, moment = carry
        start, fresh = _words(index, plan)
        z, y = _logits(*first, start, plan), _logits(*second, start, plan)
        difference = jnp.where(fresh, z - y, 0.0)
        z, y = jnp.where(fresh, z, -jnp.inf), jnp.where(fresh, y, -jnp.inf)
        top = jnp.maximum(largest, jnp.max(z, axis=-1))
        weights = jnp.exp(z - top[..., None])
        shrink = jnp.exp(largest - top)
        other_top = jnp.maximum(other_largest, jnp.max(y, axis=-1))
        other_sum = jnp.sum(jnp.exp(y - other_top[..., None]), axis=-1)
        return (
            top,
            total * shrink + jnp.sum(weights, axis=-1),
            other_top,
            other_total * jnp.exp(other_largest - other_top) + other_sum,
            moment * shrink + jnp.sum(weights * difference, axis=-1),
        )

    shape = first[0].shape[:2]
    zero, nothing = jnp.zeros(shape, jnp.float32), jnp.full(shape, -jnp.inf)
    largest, total, other_largest, other_total, moment = _loop(
        step, (nothing, zero, nothing, zero, zero), plan
    )
    log_total, other_log_total = jnp.log(total), jnp.log(other_total)
    # Differences before sums: a level that both logits share would cost digits.
    level = (largest - other_largest) + (log_total - other_log_total)
    return moment / total - level, largest + log_total, other_largest + other_log_total


def _top_k(
    policy: tuple[Array, Array], reference: tuple[Array, Array], plan: Plan
) -> tuple[Array, tuple[Array, Array], _Tail]:
    """KL over the k likeliest words of the policy and a bucket, found in one pass.

    A word that a likelier one drives out joins the bucket then, so that the mass of the
    bucket is a sum of its own words and never 1 minus the others.
    """
    assert plan.k is not None
    k, shape = plan.k, policy[0].shape[:2]

    def step(carry: tuple[Array, ...], index: Array) -> tuple[Array, ...]:
        top_z, top_y, ids, tail_z, tail_y = carry
        start, fresh = _words(index, plan)
        z, y = _logits(*policy, start, plan), _logits(*reference, start, plan)
        here = jnp.broadcast_to(
            start + jnp.arange(plan.chunk, dtype=jnp.int32), z.shape
        )
        z = jnp.concatenate([top_z, jnp.where(fresh, z, -jnp.inf)], axis=-1)
        y = jnp.concatenate([top_y, jnp.where(fresh, y, -jnp.inf)], axis=-1)
        ids = jnp.concatenate([ids, here], axis=-1)
        top_z, at = jax.lax.top_k(z, k)
        kept = marked(at, size=z.shape[-1])

        def with_dropped(tail: Array, logits: Array) -> Array:
            dropped = jnp.where(kept, -jnp.inf, logits)
            return jnp.logaddexp(tail, jax.nn.logsumexp(dropped, axis=-1))

        return (
            top_z,
            jnp.take_along_axis(y, at, axis=-1),
            jnp.take_along_axis(ids, at, axis=-1),
            with_dropped(tail_z, z),
            with_dropped(tail_y, y),
        )

    none, no_tail = jnp.full((*shape, k), -jnp.inf), jnp.full(shape, -jnp.inf)
    no_ids = jnp.zeros((*shape, k), jnp.int32)
    top_z, top_y, ids, tail_z, tail_y = _loop(
        step, (none, none, no_ids, no_tail, no_tail), plan
    )
    z = jnp.concatenate([top_z, tail_z[..., None]], axis=-1)
    y = jnp.concatenate([top_y, tail_y[..., None]], axis=-1)
    sums = jax.nn.logsumexp(z, axis=-1), jax.nn.logsumexp(y, axis=-1)
    z, y = z - sums[0][..., None], y - sums[1][..., None]
    kl = of_buckets(y, z) if plan.forward else of_buckets(z, y)
    # Without a word in the bucket nothing will read its ratio, -inf - -inf.
    return kl, sums, _Tail(ids=ids, log_ratio=z[..., -1] - y[..., -1])


def _backward(plan: Plan, residuals: Any, cotangent: Array) -> tuple[Any, ...]:
    (hidden, head), (ref_hidden, ref_head), kl, sums, tail = residuals
    log_sum, ref_log_sum = sums
    live = cotangent != 0
    scale = (cotangent / plan.temperature)[..., None]
    seen = jnp.where(live[..., None], hidden, jnp.zeros_like(hidden))

    def step(carry: tuple[Array, Array], index: Array) -> tuple[Array, Array]:
        for_hidden, for_head = carry
        start, fresh = _words(index, plan)
        logprobs = _logits(hidden, head, start, plan) - log_sum[..., None]
        ref_logprobs = _logits(ref_hidden, ref_head, start, plan)
        ref_logprobs -= ref_log_sum[..., None]
        log_ratio = logprobs - ref_logprobs
        if tail is not None:
            alone = marked(tail.ids - start, size=plan.chunk)
            log_ratio = jnp.where(alone, log_ratio, tail.log_ratio[..., None])
        if plan.forward:
            for_logits = jnp.exp(logprobs) - jnp.exp(logprobs - log_ratio)
        else:
            for_logits = jnp.exp(logprobs) * (log_ratio - kl[..., None])
        for_logits = jnp.where(live[..., None] & fresh, for_logits * scale, 0.0)
        for_logits = for_logits.astype(hidden.dtype)
        words = jax.lax.dynamic_slice_in_dim(head, start, plan.chunk)
        for_hidden += jnp.einsum(
            "btv,vd->btd",
            for_logits,
            words.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        for_words = jnp.einsum(
            "btv,btd->vd", for_logits, seen, preferred_element_type=jnp.float32
        ).astype(head.dtype)
        # A word is fresh in one chunk, and adds 0 where it is seen again.
        for_words += jax.lax.dynamic_slice_in_dim(for_head, start, plan.chunk)
        return for_hidden, jax.lax.dynamic_update_slice_in_dim(
            for_head, for_words, start, axis=0
        )

    empty = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head)
    for_hidden, for_head = _loop(step, empty, plan)
    return for_hidden.astype(hidden.dtype), for_head, None, None


def of_buckets(logprobs: Array, ref_logprobs: Array) -> Array:
    """Σ_b exp(logprobs)·(logprobs - ref_logprobs), with 0·log 0 = 0.

    Args:
      logprobs, ref_logprobs: f32[..., K], nats, of K outcomes that exclude each other.

    Returns:
      f32[...], nats.
    """
    possible = logprobs > -jnp.inf
    log_ratio = jnp.where(possible, logprobs, 0.0) - jnp.where(
        possible, ref_logprobs, 0.0
    )
    return jnp.sum(jnp.exp(logprobs) * log_ratio, axis=-1)


def _loop(step: Callable[[Any, Array], Any], carry: Any, plan: Plan) -> Any:
    """`step` over the chunks' numbers."""
    num_chunks = -(-plan.vocab_size // plan.chunk)
    steps = jnp.arange(num_chunks, dtype=jnp.int32)
    return jax.lax.scan(lambda carry, index: (step(carry, index), None), carry, steps)[
        0
    ]


def _words(index: Array, plan: Plan) -> tuple[Array, Array]:
    """The first word of chunk `index`, and bool[1, 1, chunk]: not in one before it."""
    wanted = index * plan.chunk
    start = jnp.minimum(wanted, plan.vocab_size - plan.chunk)
    fresh = start + jnp.arange(plan.chunk, dtype=jnp.int32) >= wanted
    return start, fresh[None, None, :]


def _logits(hidden: Array, head: Array, start: Array, plan: Plan) -> Array:
    """f32[B, T, chunk], divided by the temperature."""
    words = jax.lax.dynamic_slice_in_dim(head, start, plan.chunk)
    logits = jnp.einsum(
        "btd,vd->btv",
        hidden,
        words.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    return logits / plan.temperature


def marked(at: Array, *, size: int) -> Array:
    """bool[..., size], True at the places `at` i32[..., k]; others are left out."""
    at = jnp.where((at >= 0) & (at < size), at, size)
    nothing = jnp.zeros((*at.shape[:-1], size + 1), jnp.bool_)
    return jnp.put_along_axis(nothing, at, True, axis=-1, inplace=False)[..., :size]
