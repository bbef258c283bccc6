"""The forward passes of a divergence over the vocabulary, in chunks of tokens.

`chunks` has the formulas, their symbols and the gradient. Chunks are slices of equal
size of the true vocabulary; the last one starts early enough to be whole, and tokens of
earlier chunks are left out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, unused_ids
from rlhf_jax.functional.kl import mixtures
from rlhf_jax.functional.logprob_chunks import NOWHERE, scan

Array = jax.Array


class Plan(NamedTuple):
    """Sizes and options, fixed at trace time."""

    vocab_size: int  # tokens; rows of a head from here on are padding and never read
    chunk: int  # tokens at a time, 1 to vocab_size
    forward: bool  # KL(ref ‖ π) instead of KL(π ‖ ref)
    k: int | None  # tokens outside the bucket; None has no bucket
    softcap: float | None = None  # c of c·tanh(logit / c), the policy's; None is off
    ref_softcap: float | None = None  # the reference's
    head: bool = False  # only the terms of the k tokens of a reverse KL
    beta: float | None = None  # static β of a Jensen-Shannon divergence
    unused: unused_ids.Ranges = ()  # ids with probability 0 in both distributions


class Model(NamedTuple):
    """Hidden states, a head and a temperature, which give next-token distributions."""

    hidden: Array  # floats[B, T, D]
    head: Array  # floats[V', D]
    temperature: Array  # f32[], divides the logits, dimensionless


class _Sum(NamedTuple):
    """Σ exp(x) = exp(largest)·total, as two numbers that do not overflow."""

    largest: Array  # f32[B, T]
    total: Array  # f32[B, T]

    @property
    def log(self) -> Array:
        return self.largest + jnp.log(self.total)


class Rest(NamedTuple):
    """The tokens of a top-k KL, and d of its bucket."""

    alone: Array  # i32[B, T, k], the tokens outside the bucket
    difference: Array  # f32[B, T], d of the bucket; with `Plan.head` the level, so that
    # no token of the bucket has a term


class Result(NamedTuple):
    """The divergence, and what its gradient needs."""

    kl: Array  # f32[B, T], nats; the divergence
    log_sum: Array  # f32[B, T], log Σ exp(z)
    ref_log_sum: Array  # f32[B, T], log Σ exp(y)
    mean: Array  # f32[B, T], E[d]; with a mixture KL(π ‖ M)
    rest: Rest | None  # None without a bucket


def forward(policy: Model, reference: Model, beta: Array | None, plan: Plan) -> Result:
    """Computes the divergence in one pass over the vocabulary; a mixture takes two."""
    share = plan.beta if beta is None else beta
    return (_exact if plan.k is None else _top_k)(policy, reference, share, plan)


def _exact(
    policy: Model, reference: Model, beta: checks.Scalar | None, plan: Plan
) -> Result:
    # The first chunks may have only unused ids. Their sums are then over NOWHERE, and
    # the first chunk with a token shrinks them to 0; -inf - -inf would be NaN.
    absent = NOWHERE if plan.unused else -jnp.inf

    def step(carry: tuple[_Sum, _Sum, Array], index: Array) -> tuple[Any, ...]:
        total, ref_total, moment = carry
        start, fresh = tokens(index, plan)
        z, y = both(policy, reference, start, plan)
        # d, not log P - log Q: the normalisers are known only after the last chunk.
        difference = jnp.where(fresh, z - y, 0.0)
        grown, terms, shrink = _add(total, jnp.where(fresh, z, absent))
        ref_grown, ref_terms, ref_shrink = _add(ref_total, jnp.where(fresh, y, absent))
        if plan.forward:
            terms, shrink = ref_terms, ref_shrink
        # Between equal models every d is exactly 0, and so is the KL.
        moment = moment * shrink + jnp.sum(terms * difference, axis=-1)
        return grown, ref_grown, moment

    shape = policy.hidden.shape[:2]
    zero, nothing = jnp.zeros(shape, jnp.float32), jnp.full(shape, -jnp.inf)
    empty = _Sum(nothing, zero)
    total, ref_total, moment = loop(step, (empty, empty, zero), plan)
    if beta is not None:
        return _jensen_shannon(policy, reference, total, ref_total, beta, plan)
    mean = moment / (ref_total if plan.forward else total).total
    return _summarise(total, ref_total, mean, None, plan)


def _jensen_shannon(
    policy: Model,
    reference: Model,
    total: _Sum,
    ref_total: _Sum,
    beta: checks.Scalar,
    plan: Plan,
) -> Result:
    """The second pass, which reads the sums of the first."""

    def step(carry: tuple[Array, Array], index: Array) -> tuple[Array, Array]:
        start, fresh = tokens(index, plan)
        z, y = both(policy, reference, start, plan)
        value, mean = _of_mixture(z, y, z - y, total.log, ref_total.log, fresh, beta)
        return carry[0] + value, carry[1] + mean

    zero = jnp.zeros(policy.hidden.shape[:2], jnp.float32)
    value, mean = loop(step, (zero, zero), plan)
    return Result(value, total.log, ref_total.log, mean, None)


def _of_mixture(
    z: Array,
    y: Array,
    difference: Array,
    log_sum: Array,
    ref_log_sum: Array,
    included: Array,
    beta: checks.Scalar,
) -> tuple[Array, Array]:
    """The parts of JSD_β and of KL(π ‖ M) from these tokens, f32[B, T] each."""
    from_mixture, ref_from_mixture = mixtures.mixture_log_ratios(
        (log_sum - ref_log_sum)[..., None] - difference, beta=beta
    )
    of_policy = jnp.exp(z - log_sum[..., None]) * from_mixture
    of_reference = jnp.exp(y - ref_log_sum[..., None]) * ref_from_mixture
    of_tokens = beta * of_reference + (1 - beta) * of_policy
    return (
        jnp.sum(of_tokens, axis=-1, where=included),
        jnp.sum(of_policy, axis=-1, where=included),
    )


def _top_k(
    policy: Model, reference: Model, beta: checks.Scalar | None, plan: Plan
) -> Result:
    """The divergence over the k likeliest tokens of the policy and one bucket.

    A token that drops out of the top k joins the bucket. So the mass of the bucket is a
    sum over its tokens, never 1 minus the others.
    """
    assert plan.k is not None
    k, shape = plan.k, policy.hidden.shape[:2]

    def step(carry: tuple[Array, ...], index: Array) -> tuple[Array, ...]:
        top_z, top_y, ids, rest_z, rest_y = carry
        start, fresh = tokens(index, plan)
        z, y = both(policy, reference, start, plan)
        here = start + jnp.arange(plan.chunk, dtype=jnp.int32)
        z = jnp.concatenate([top_z, jnp.where(fresh, z, -jnp.inf)], axis=-1)
        y = jnp.concatenate([top_y, jnp.where(fresh, y, -jnp.inf)], axis=-1)
        here = jnp.broadcast_to(here[None, None, :], (*shape, plan.chunk))
        ids = jnp.concatenate([ids, here], axis=-1)
        top_z, at = jax.lax.top_k(z, k)
        # bool[B, T, k + chunk]: the new top k among the old top k and this chunk.
        marks = marked(at, size=z.shape[-1])

        def with_dropped(rest: Array, logits: Array) -> Array:
            dropped = jnp.where(marks, -jnp.inf, logits)
            return jnp.logaddexp(rest, jax.nn.logsumexp(dropped, axis=-1))

        return (
            top_z,
            jnp.take_along_axis(y, at, axis=-1),
            jnp.take_along_axis(ids, at, axis=-1),
            with_dropped(rest_z, z),
            with_dropped(rest_y, y),
        )

    none, no_rest = jnp.full((*shape, k), -jnp.inf), jnp.full(shape, -jnp.inf)
    no_ids = jnp.zeros((*shape, k), jnp.int32)
    top_z, top_y, ids, rest_z, rest_y = loop(
        step, (none, none, no_ids, no_rest, no_rest), plan
    )
    z = jnp.concatenate([top_z, rest_z[..., None]], axis=-1)
    y = jnp.concatenate([top_y, rest_y[..., None]], axis=-1)
    # With k = V the bucket is empty: -inf in both.
    difference = jnp.where(z > -jnp.inf, z - y, 0.0)
    empty = _Sum(no_rest, jnp.zeros(shape, jnp.float32))
    total, terms, _ = _add(empty, z)
    ref_total, ref_terms, _ = _add(empty, y)
    if plan.head:
        level = _level(total, ref_total)
        shares = terms[..., :-1] / total.total[..., None]
        log_ratios = difference[..., :-1] - level[..., None]
        head = jnp.sum(shares * log_ratios, axis=-1)
        return Result(head, total.log, ref_total.log, head + level, Rest(ids, level))
    rest = Rest(ids, difference[..., -1])
    if beta is not None:
        sums = total.log, ref_total.log
        some = jnp.ones((1, 1, 1), jnp.bool_)
        value, mean = _of_mixture(z, y, difference, *sums, some, beta)
        return Result(value, *sums, mean, rest)
    if plan.forward:
        mean = jnp.sum(ref_terms * difference, axis=-1) / ref_total.total
    else:
        mean = jnp.sum(terms * difference, axis=-1) / total.total
    return _summarise(total, ref_total, mean, rest, plan)


def _add(total: _Sum, logits: Array) -> tuple[_Sum, Array, Array]:
    """Adds logits f32[B, T, ...]: the sum, their terms, the factor of the old terms."""
    largest = jnp.maximum(total.largest, jnp.max(logits, axis=-1))
    terms = jnp.exp(logits - largest[..., None])
    shrink = jnp.exp(total.largest - largest)
    grown = total.total * shrink + jnp.sum(terms, axis=-1)
    return _Sum(largest, grown), terms, shrink


def _summarise(
    total: _Sum, ref_total: _Sum, mean: Array, rest: Rest | None, plan: Plan
) -> Result:
    level = _level(total, ref_total)
    kl = level - mean if plan.forward else mean - level
    return Result(kl, total.log, ref_total.log, mean, rest)


def _level(total: _Sum, ref_total: _Sum) -> Array:
    """f32[B, T], log Σ exp(z) - log Σ exp(y)."""
    # Subtract before adding: a large value common to both would cost digits.
    level = jnp.log(total.total) - jnp.log(ref_total.total)
    return level + (total.largest - ref_total.largest)


def loop(step: Callable[..., Any], carry: Any, plan: Plan) -> Any:
    """Scans `step` over the indices of the chunks."""
    return scan(step, carry, size=plan.vocab_size, chunk=plan.chunk)


def tokens(index: Array, plan: Plan) -> tuple[Array, Array]:
    """First id of chunk `index`, and bool[1, 1, chunk], True at tokens to read."""
    first = index * plan.chunk
    start = jnp.minimum(first, plan.vocab_size - plan.chunk)
    ids = start + jnp.arange(plan.chunk, dtype=jnp.int32)
    fresh = ids >= first
    if plan.unused:
        fresh &= ~unused_ids.contain(plan.unused, ids)
    return start, fresh[None, None, :]


def both(
    policy: Model, reference: Model, start: Array, plan: Plan
) -> tuple[Array, Array]:
    """Logits f32[B, T, chunk] of both models, divided by the temperature."""

    def logits(model: Model, softcap: float | None) -> Array:
        logits = _raw_logits(model.hidden, model.head, start, plan)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        return logits / model.temperature

    of_policy = logits(policy, plan.softcap)
    with jax.named_scope("reference"):
        return of_policy, logits(reference, plan.ref_softcap)


def _raw_logits(hidden: Array, head: Array, start: Array, plan: Plan) -> Array:
    """hidden·headᵀ of a chunk, f32[B, T, chunk]."""
    # Cast by chunk: the head is never copied whole in the compute dtype.
    rows = jax.lax.dynamic_slice_in_dim(head, start, plan.chunk)
    return jnp.einsum(
        "btd,vd->btv",
        hidden,
        rows.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )


def marked(at: Array, *, size: int) -> Array:
    """bool[..., size], True at the indices `at` i32[..., k] that are within size."""
    at = jnp.where((at >= 0) & (at < size), at, size)
    nothing = jnp.zeros((*at.shape[:-1], size + 1), jnp.bool_)
    return jnp.put_along_axis(nothing, at, True, axis=-1, inplace=False)[..., :size]
