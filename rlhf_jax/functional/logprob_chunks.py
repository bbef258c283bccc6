"""Log-probs and entropies from hidden states in chunks, with a custom VJP.

Nothing here shifts columns: position n is about the distribution that hidden[n] gives.
`logprobs.token_logprobs_from_hidden` is the public name.

With z the logits / temperature τ, p their softmax, a the token that was drawn and m the
largest logit so far, one pass over the vocabulary keeps

    Σ exp(z - m)      Σ exp(z - m)·(z - m)      z_a

and gives log p_a = z_a - log Σ exp(z) and the entropy H = -Σ p log p. The backward pass
rematerialises the logits of each chunk. The gradients with respect to z_v are

    of log p_a    1[v = a] - p_v
    of H          -p_v (log p_v + H)

Both depend on hidden / τ only, so the gradient of τ is -⟨hidden, gradient of hidden⟩/τ.
Soft-capped logits x become l = c·tanh(x / c) before τ divides them: the gradient of x
is (1 - (l / c)²) times that of l, and the gradient of τ is -⟨l, gradient of l⟩ / τ.

The head is read as A blocks of equal size, [A, V'/A, D], and a chunk takes the same
rows of every block. So a head that is sharded over the vocabulary stays sharded, and
each device computes the logits of its own tokens. The last chunk starts early enough to
be whole; tokens of earlier chunks are left out of it, as padding is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from rlhf_jax.functional import checks, unused_ids

Array = jax.Array

BLOCKS = 16  # devices that may share the vocabulary, if they divide the head's rows
NOWHERE = -1e30  # a logit whose exp is 0; finite, as 0 · inf and -inf - -inf are NaN


class Plan(NamedTuple):
    """Sizes and options, fixed at trace time."""

    vocab_size: int  # tokens; rows of the head from here on are padding
    blocks: int  # A, which divides the rows of the head
    size: int  # of a block, rows
    chunk: int  # rows of each block at a time, 1 to size
    softcap: float | None = None  # c of c·tanh(logit / c); None disables it
    unused: unused_ids.Ranges = ()  # ids that are left out as padding is


class _Sums(NamedTuple):
    """Running sums over the tokens so far, f32[N] each."""

    largest: Array  # m
    total: Array  # Σ exp(z - m)
    moment: Array  # Σ exp(z - m)·(z - m)
    picked: Array  # z_a, NaN where the token has not come yet


class _Saved(NamedTuple):
    """What the backward pass needs."""

    hidden: Array
    head: Array
    tokens: Array
    temperature: Array
    log_sum: Array  # f32[N]
    entropy: Array  # f32[N]


def plan(
    *,
    vocab_size: int,
    rows: int,
    positions: int,
    max_logits: int,
    softcap: float | None = None,
    unused: unused_ids.Ranges = (),
) -> Plan:
    """Plans the fewest chunks of equal size with at most `max_logits` logits each."""
    # Blocks divide the head, so each device of a sharded head has whole blocks.
    blocks = math.gcd(rows, BLOCKS)
    size = rows // blocks
    chunk = chunk_size(size, most=max_logits // (positions * blocks))
    return Plan(vocab_size, blocks, size, chunk=chunk, softcap=softcap, unused=unused)


def logprobs_and_entropy(
    hidden: Array, head: Array, tokens: Array, *, temperature: checks.Scalar, plan: Plan
) -> tuple[Array, Array]:
    """log softmax(hidden·headᵀ / temperature)[tokens], and the entropy of the softmax.

    Args:
      hidden: floats[N, D]. head: floats[V', D].
      tokens: i32[N]; a padding or unused id has log-prob -inf, an id that is not a row
        of the head NaN.

    Returns:
      f32[N] each, nats. The gradient reaches `hidden`, `head` and `temperature`; a
      position whose cotangents are 0 contributes nothing, whatever its hidden state.
    """
    scale = jnp.asarray(temperature, jnp.float32)
    return _logprobs_and_entropy(plan, hidden, head, tokens, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs_and_entropy(
    plan: Plan, hidden: Array, head: Array, tokens: Array, temperature: Array
) -> tuple[Array, Array]:
    return _results(_pass(hidden, head, tokens, temperature, plan))[:2]


def _forward(
    plan: Plan, *primals: CustomVJPPrimal
) -> tuple[tuple[Array, Array], _Saved]:
    hidden, head, tokens, temperature = (primal.value for primal in primals)
    logprobs, entropy, log_sum = _results(
        _pass(hidden, head, tokens, temperature, plan)
    )
    saved = _Saved(hidden, head, tokens, temperature, log_sum, entropy)
    return (logprobs, entropy), saved


def _results(sums: _Sums) -> tuple[Array, Array, Array]:
    """Log-probs, entropies, log Σ exp(z)."""
    log_total = jnp.log(sums.total)
    logprobs = sums.picked - sums.largest - log_total
    entropy = log_total - sums.moment / sums.total
    return logprobs, entropy, sums.largest + log_total


def _pass(
    hidden: Array, head: Array, tokens: Array, temperature: Array, plan: Plan
) -> _Sums:
    def step(sums: _Sums, index: Array) -> _Sums:
        rows, fresh = _rows(head, index, plan, hidden.dtype)
        # f32[N, A·chunk]: logits of one chunk, never of the whole vocabulary.
        z = jnp.where(fresh[None], _logits(hidden, rows, temperature, plan), NOWHERE)
        # The largest logit so far is subtracted before every exp: sums never overflow.
        largest = jnp.maximum(sums.largest, jnp.max(z, axis=-1))
        # Nothing is summed before the first chunk. Where a whole chunk is left out, its
        # sum is over NOWHERE, and the first chunk with a token shrinks it to 0.
        down = jnp.where(sums.total > 0, sums.largest - largest, 0.0)
        above = z - largest[:, None]
        terms = jnp.exp(above)
        shrink = jnp.exp(down)
        total = shrink * sums.total + jnp.sum(terms, axis=-1)
        # A new m changes both factors of the earlier terms (z - m)·exp(z - m).
        moment = shrink * (sums.moment + down * sums.total)
        moment += jnp.sum(terms * above, axis=-1)
        at = _drawn(tokens, index, plan)
        drawn_z = jnp.take_along_axis(z, jnp.maximum(at, 0)[:, None], axis=-1)[:, 0]
        picked = jnp.where(at < 0, sums.picked, drawn_z)
        return _Sums(largest, total, moment, picked)

    zero = jnp.zeros(hidden.shape[:1], jnp.float32)
    # A token that is left out is impossible (-inf); an id beyond the head is a mistake.
    row = (tokens >= 0) & (tokens < head.shape[0])
    absent = jnp.where(row, -jnp.inf, jnp.nan)
    sums = _Sums(zero - jnp.inf, zero, zero, absent)
    return scan(step, sums, size=plan.size, chunk=plan.chunk)


def _backward(
    plan: Plan,
    saved: _Saved,
    cotangents: tuple[Array | SymbolicZero, Array | SymbolicZero],
) -> tuple[Array, Array, None, Array]:
    hidden, head, tokens, temperature, log_sum, entropy = saved
    # An entropy that no loss reads has a symbolic zero for a cotangent: skip its work.
    for_logprobs, for_entropy = (
        None if isinstance(x, SymbolicZero) else x for x in cotangents
    )
    for_logprobs = jnp.zeros_like(log_sum) if for_logprobs is None else for_logprobs
    live = for_logprobs != 0
    if for_entropy is not None:
        live |= for_entropy != 0
        for_entropy = (for_entropy / temperature)[:, None]
        entropy = jnp.where(live, entropy, 0.0)[:, None]
    for_logprobs = (for_logprobs / temperature)[:, None]
    log_sum = jnp.where(live, log_sum, 0.0)[:, None]
    # A masked position may hold NaN, and 0 · NaN would reach the head's gradient.
    live_hidden = jnp.where(live[:, None], hidden, jnp.zeros_like(hidden))

    def step(carry: tuple[Array, ...], index: Array) -> tuple[Array, ...]:
        for_hidden, for_head, inner = carry
        rows, fresh = _rows(head, index, plan, hidden.dtype)
        # Rows that are left out may hold NaN, and 0 · NaN would reach the gradient.
        rows = jnp.where(fresh[:, None], rows, jnp.zeros_like(rows))
        scaled = _logits(live_hidden, rows, temperature, plan)
        z = scaled - log_sum
        slope = for_logprobs
        if for_entropy is not None:
            slope += for_entropy * (z + entropy)
        here = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
        drawn = here == _drawn(tokens, index, plan)[:, None]
        for_logits = jnp.where(drawn, for_logprobs, 0.0) - jnp.exp(z) * slope
        for_logits = jnp.where(fresh[None], for_logits, 0.0)
        if plan.softcap is not None:
            inner += jnp.sum(for_logits * scaled)
            for_logits *= 1 - jnp.square(scaled * (temperature / plan.softcap))
        # The backward products run in the compute dtype, as the forward products do.
        for_logits = for_logits.astype(hidden.dtype)
        for_hidden += _product(for_logits, rows, 1, 0)
        for_rows = _product(for_logits, live_hidden, 0, 0).astype(head.dtype)
        # Where chunks overlap, a token is fresh in one and adds 0 in the other.
        start = _start(index, plan)
        for_rows = for_rows.reshape(plan.blocks, plan.chunk, -1)
        for_rows += jax.lax.dynamic_slice_in_dim(for_head, start, plan.chunk, axis=1)
        return (
            for_hidden,
            jax.lax.dynamic_update_slice_in_dim(for_head, for_rows, start, axis=1),
            inner,
        )

    empty = (
        jnp.zeros(hidden.shape, jnp.float32),
        jnp.zeros((plan.blocks, plan.size, head.shape[-1]), head.dtype),
        jnp.zeros((), jnp.float32),  # ⟨l, gradient of l⟩ / τ for soft-capped logits
    )
    # Gradients are carried from chunk to chunk: logits of one chunk live at a time.
    for_hidden, for_head, inner = scan(step, empty, size=plan.size, chunk=plan.chunk)
    if plan.softcap is None:
        inner = jnp.sum(for_hidden * live_hidden.astype(jnp.float32)) / temperature
    return for_hidden.astype(hidden.dtype), for_head.reshape(head.shape), None, -inner


_logprobs_and_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _start(index: Array, plan: Plan) -> Array:
    """The first row of chunk `index` in every block."""
    return jnp.minimum(index * plan.chunk, plan.size - plan.chunk)


def _rows(
    head: Array, index: Array, plan: Plan, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Rows [A·chunk, D] of the head; bool[A·chunk], True at tokens to read."""
    start = _start(index, plan)
    blocks = head.reshape(plan.blocks, plan.size, -1)
    rows = jax.lax.dynamic_slice_in_dim(blocks, start, plan.chunk, axis=1)
    place = start + jnp.arange(plan.chunk, dtype=jnp.int32)[None, :]
    first = plan.size * jnp.arange(plan.blocks, dtype=jnp.int32)[:, None]
    fresh = (first + place < plan.vocab_size) & (place >= index * plan.chunk)
    if plan.unused:
        fresh &= ~unused_ids.contain(plan.unused, first + place)
    return rows.astype(dtype).reshape(-1, rows.shape[-1]), fresh.reshape(-1)


def _drawn(tokens: Array, index: Array, plan: Plan) -> Array:
    """i32[N], the place of each token in chunk `index`; -1 where it is not fresh."""
    block, place = jnp.divmod(tokens, plan.size)
    own = (place // plan.chunk == index) & (tokens >= 0) & (tokens < plan.vocab_size)
    if plan.unused:
        own &= ~unused_ids.contain(plan.unused, tokens)
    return jnp.where(own, block * plan.chunk + place - _start(index, plan), -1)


def _logits(hidden: Array, rows: Array, temperature: Array, plan: Plan) -> Array:
    logits = _product(hidden, rows, 1, 1)
    if plan.softcap is not None:
        logits = plan.softcap * jnp.tanh(logits / plan.softcap)
    return logits / temperature


def _product(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """Product of two matrices over an axis of each, accumulated in float32."""
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def chunk_size(size: int, *, most: int) -> int:
    """Size of the fewest chunks of at most `most`; even ones overlap the least."""
    num_chunks = -(-size // max(1, most))
    return -(-size // num_chunks)


def scan(step: Callable[..., Any], carry: Any, *, size: int, chunk: int) -> Any:
    """The last carry of step(carry, index) -> carry over the indices of the chunks."""

    def with_output(carry: Any, index: Array) -> tuple[Any, None]:
        return step(carry, index), None

    indices = jnp.arange(-(-size // chunk), dtype=jnp.int32)
    return jax.lax.scan(with_output, carry, indices)[0]
