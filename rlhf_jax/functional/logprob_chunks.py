"""Log-probs and entropies from hidden states, some words at a time, with a gradient.

Nothing here shifts columns: position n is about the distribution that hidden[n] gives.
`logprobs.token_logprobs_from_hidden` is the public name.

With z the logits / temperature τ, p their softmax, a the word that was drawn and m the
largest logit so far, one pass over the words keeps

    Σ exp(z - m)      Σ exp(z - m)·(z - m)      z_a

and gives log p_a = z_a - log Σ exp(z) and the entropy H = -Σ p log p. The backward pass
computes the logits of a chunk again; their gradients, times τ, are

    of log p_a    1[v = a] - p_v
    of H          -p_v (log p_v + H)

and as both depend on hidden / τ alone, that of τ is -⟨hidden, its gradient⟩ / τ.

Words are dealt to C chunks like cards, word v to chunk v mod C, which is the head seen
as [V'/C, C, D]: a head that is sharded over words stays so, chunk by chunk, and each
device computes the logits of its own words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

Array = jax.Array


class Plan(NamedTuple):
    """What is fixed at trace time."""

    vocab_size: int  # words; rows of the head from here on are padding
    num_chunks: int  # C, 1 to the rows of the head


class _Found(NamedTuple):
    """Of all words up to here; f32[N] each."""

    largest: Array  # m
    total: Array  # Σ exp(z - m)
    moment: Array  # Σ exp(z - m)·(z - m)
    picked: Array  # z_a, NaN where the word has not come yet


class _Saved(NamedTuple):
    """What the backward pass needs."""

    hidden: Array
    head: Array
    tokens: Array
    temperature: Array
    log_sum: Array  # f32[N]
    entropy: Array  # f32[N]


def plan(*, vocab_size: int, rows: int, positions: int, max_logits: int) -> Plan:
    """As few chunks as leave no more than `max_logits` logits at a time.

    A few more where these deal out the `rows` of the head without remainder, since it
    must be copied, with padding, for others.
    """
    least = -(-rows // max(1, max_logits // positions))
    even = (count for count in range(least, 4 * least) if rows % count == 0)
    return Plan(vocab_size=vocab_size, num_chunks=next(even, least))


def price(
    hidden: Array, head: Array, tokens: Array, *, temperature: float | Array, plan: Plan
) -> tuple[Array, Array]:
    """log softmax(hidden·headᵀ / temperature)[tokens], and the entropy of the softmax.

    Args:
      hidden: floats[N, D]. head: floats[V', D].
      tokens: i32[N]; others than the words of the head have log-prob NaN.
      temperature: f32[], dimensionless.
      plan: vocabulary and chunks.

    Returns:
      f32[N] each, nats. The gradient reaches `hidden`, `head` and `temperature`; a
      position whose cotangents are 0 plays no part in it, whatever stands there.
    """
    with_gradient = jax.custom_vjp(_price, nondiff_argnums=(4,))
    with_gradient.defvjp(_forward, _backward, symbolic_zeros=True)
    scale = jnp.asarray(temperature, jnp.float32)
    return with_gradient(hidden, head, tokens, scale, plan)


def _price(
    hidden: Array, head: Array, tokens: Array, temperature: Array, plan: Plan
) -> tuple[Array, Array]:
    found = _pass(hidden, head, tokens, temperature, plan)
    log_total = jnp.log(found.total)
    logprobs = found.picked - found.largest - log_total
    return logprobs, log_total - found.moment / found.total


def _forward(
    hidden: Any, head: Any, tokens: Any, temperature: Any, plan: Plan
) -> tuple[tuple[Array, Array], _Saved]:
    arrays = hidden.value, head.value, tokens.value, temperature.value
    found = _pass(*arrays, plan)
    log_total = jnp.log(found.total)
    logprobs = found.picked - found.largest - log_total
    entropy = log_total - found.moment / found.total
    return (logprobs, entropy), _Saved(*arrays, found.largest + log_total, entropy)


def _pass(
    hidden: Array, head: Array, tokens: Array, temperature: Array, plan: Plan
) -> _Found:
    dealt = _deal(head, plan)

    def step(found: _Found, index: Array) -> tuple[_Found, None]:
        words, real = _words(dealt, index, plan, hidden.dtype)
        z = _logits(hidden, words, temperature)
        largest = jnp.maximum(
            found.largest, jnp.max(z, axis=-1, where=real, initial=-jnp.inf)
        )
        # Nothing was found before the first chunk: it has a real word, number 0.
        down = jnp.where(found.total > 0, found.largest - largest, 0.0)
        shrink = jnp.exp(down)
        above = jnp.where(real, z - largest[:, None], 0.0)
        terms = jnp.where(real, jnp.exp(above), 0.0)
        total = shrink * found.total + jnp.sum(terms, axis=-1)
        moment = shrink * (found.moment + down * found.total)
        moment += jnp.sum(terms * above, axis=-1)
        row, chunk = jnp.divmod(tokens, plan.num_chunks)
        own = (chunk == index) & (tokens >= 0) & (tokens < head.shape[0])
        there = jnp.take_along_axis(
            z, jnp.where(own, row, 0)[:, None], axis=-1
        )[:, 0]
        there = jnp.where(tokens < plan.vocab_size, there, -jnp.inf)
        picked = jnp.where(own, there, found.picked)
        return _Found(largest, total, moment, picked), None

    shape = hidden.shape[:1]
    none = jnp.zeros(shape, jnp.float32)
    empty = _Found(none - jnp.inf, none, none, none + jnp.nan)
    return _scan(step, empty, plan)


def _backward(
    plan: Plan, saved: _Saved, cotangents: tuple[Any, Any]
) -> tuple[Array, Array, None, Array]:
    hidden, head, tokens, temperature, log_sum, entropy = saved
    for_logprobs, for_entropy = cotangents
    of_entropy = not isinstance(for_entropy, SymbolicZero)
    zero = jnp.zeros_like(log_sum)
    for_logprobs = zero if isinstance(for_logprobs, SymbolicZero) else for_logprobs
    live = for_logprobs != 0
    if of_entropy:
        live |= for_entropy != 0
        for_entropy = (for_entropy / temperature)[:, None]
        entropy = jnp.where(live, entropy, 0.0)[:, None]
    for_logprobs = (for_logprobs / temperature)[:, None]
    log_sum = jnp.where(live, log_sum, 0.0)[:, None]
    seen = jnp.where(live[:, None], hidden, jnp.zeros_like(hidden))
    dealt = _deal(head, plan)
    row, chunk = jnp.divmod(tokens, plan.num_chunks)

    def step(carry: tuple[Array, Array], index: Array) -> tuple[Any, None]:
        for_hidden, for_head = carry
        words, real = _words(dealt, index, plan, hidden.dtype)
        z = _logits(seen, words, temperature) - log_sum
        slope = for_logprobs
        if of_entropy:
            slope += for_entropy * (z + entropy)
        drawn = jnp.where(chunk == index, row, -1)[:, None]
        here = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
        for_logits = jnp.where(here == drawn, for_logprobs, 0.0) - jnp.exp(z) * slope
        for_logits = jnp.where(real, for_logits, 0.0).astype(hidden.dtype)
        for_hidden += jnp.matmul(
            for_logits, words, preferred_element_type=jnp.float32
        )
        for_words = jnp.matmul(
            for_logits.T, seen, preferred_element_type=jnp.float32
        ).astype(head.dtype)
        for_head = jax.lax.dynamic_update_index_in_dim(
            for_head, for_words, index, axis=1
        )
        return (for_hidden, for_head), None

    empty = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(dealt)
    for_hidden, for_head = _scan(step, empty, plan)
    for_temperature = -jnp.sum(for_hidden * seen.astype(jnp.float32)) / temperature
    for_head = for_head.reshape(-1, head.shape[-1])[: head.shape[0]]
    return for_hidden.astype(hidden.dtype), for_head, None, for_temperature


def _deal(head: Array, plan: Plan) -> Array:
    """[V'/C, C, D], padded where C does not divide V'."""
    rows, width = head.shape
    missing = -rows % plan.num_chunks
    head = jnp.pad(head, ((0, missing), (0, 0))) if missing else head
    return head.reshape(-1, plan.num_chunks, width)


def _words(
    dealt: Array, index: Array, plan: Plan, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Words [W, D] of a chunk, padding being 0; bool[1, W], which are none."""
    words = jax.lax.dynamic_index_in_dim(dealt, index, axis=1, keepdims=False)
    size = words.shape[0]
    real = jnp.arange(size, dtype=jnp.int32) * plan.num_chunks + index < plan.vocab_size
    words = jnp.where(real[:, None], words, jnp.zeros_like(words)).astype(dtype)
    return words, real[None, :]


def _logits(hidden: Array, words: Array, temperature: Array) -> Array:
    logits = jnp.matmul(hidden, words.T, preferred_element_type=jnp.float32)
    return logits / temperature


def _scan(step: Any, carry: Any, plan: Plan) -> Any:
    return jax.lax.scan(step, carry, jnp.arange(plan.num_chunks, dtype=jnp.int32))[0]
