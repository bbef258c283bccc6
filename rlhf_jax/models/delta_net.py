"""Gated DeltaNet: a layer whose memory of the text is one matrix per head.

    S ← α_t S,   S ← S + k_t (β_t (v_t - Sᵀ k_t))ᵀ,   o_t = Sᵀ q_t

S is f32[key_dim, value_dim] and 0 where a text begins; k_t has length 1, and q_t length
1/√key_dim. α_t = exp(-rate · softplus(decay_t)) is the decay, and β_t = sigmoid(beta_t)
the share of S at k_t that v_t replaces. Query, key and value are a projection, a causal
convolution of each channel, and silu; o_t is normed, multiplied by silu of a gate, and
projected. G value heads share the query and key of a key head.

`step` computes this recurrence for one decoded token; `chunked` computes whole rows, C
tokens at a time. Within a chunk, with γ_t the product of α from the chunk's start to t,

    Δ = (I + L)⁻¹ (β v - β γ k S),   L_ij = β_i (γ_i/γ_j) k_i·k_j where j < i
    o_i = γ_i q_i S + Σ_{j ≤ i} (γ_i/γ_j) q_i·k_j Δ_j
    S  ← γ_C S + Σ_j (γ_C/γ_j) k_j Δ_jᵀ

Texts are numbered along a row; 0 is the text of the initial state. A token sees only
the tokens of its own text, and S only if S is of its text. Padding has α = 1 and
β = 0, which leaves S unchanged.

Source: Yang et al. 2024, arXiv:2412.06464, eq. 10 and section 3.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.models.blocks import Linear, rematerialised, residual_std
from rlhf_jax.models.caches import DeltaState, blank_state
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.positions import AttentionMask

Array = jax.Array
CHUNK = 64  # tokens at a time, a power of two
# A TPU would otherwise round the factors to bfloat16.
PRECISION = jax.lax.Precision.HIGHEST


class Tokens(NamedTuple):
    """Inputs of the recurrence, in float32."""

    query: Array  # [B, T, K, key_dim]
    key: Array  # [B, T, K, key_dim]
    value: Array  # [B, T, H, value_dim]
    log_decay: Array  # [B, T, H], log α <= 0
    beta: Array  # [B, T, H], 0 to 1


def step(tokens: Tokens, memory: Array) -> tuple[Array, Array]:
    """One step of the recurrence, for one token of every row.

    Args:
      tokens: as above, without the dimension T.
      memory: f32[B, H, key_dim, value_dim].

    Returns:
      o f32[B, H, value_dim] and the memory after the token. The gradient reaches tokens
      and memory.
    """
    groups = tokens.value.shape[1] // tokens.key.shape[1]
    query, key = (jnp.repeat(x, groups, axis=1) for x in (tokens.query, tokens.key))
    memory = memory * jnp.exp(tokens.log_decay)[..., None, None]
    # Sums instead of matrix products: a row's result does not depend on other rows.
    recalled = (memory * key[..., None]).sum(axis=-2)
    change = tokens.beta[..., None] * (tokens.value - recalled)
    memory = memory + key[..., None] * change[..., None, :]
    return (memory * query[..., None]).sum(axis=-2), memory


def chunked(
    tokens: Tokens, memory: Array, *, texts: Array, chunk: int = CHUNK
) -> tuple[Array, Array]:
    """Whole rows, a chunk at a time; equal to `step` on every token up to rounding.

    Args:
      memory: f32[B, H, key_dim, value_dim], of text 0.
      texts: i32[B, T], the number of a token's text, non-decreasing; padding has the
        number of the text before it.
      chunk: C, a power of two.

    Returns:
      o f32[B, T, H, value_dim] and the memory after the last text. The gradient reaches
      tokens and memory.
    """
    rows, columns, heads, _ = tokens.value.shape
    key_heads = tokens.key.shape[2]
    room = -columns % chunk
    texts = jnp.pad(texts, ((0, 0), (0, room)), mode="edge")
    texts = texts.reshape(rows, -1, chunk)

    def chunks(x: Array, *by_head: int) -> Array:
        """[B, N, *by_head, C, ...] of [B, T, heads, ...]."""
        x = jnp.pad(x, ((0, 0), (0, room), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(rows, -1, chunk, *by_head, *x.shape[3:])
        return jnp.moveaxis(x, 2, 2 + len(by_head))

    of_values = key_heads, heads // key_heads  # K and G
    query, key = (chunks(x, key_heads) for x in (tokens.query, tokens.key))
    value = chunks(tokens.value, *of_values)
    beta = chunks(tokens.beta, *of_values)
    passed = jnp.cumsum(chunks(tokens.log_decay, *of_values), axis=-1)  # log γ
    before = jnp.pad(texts[:, :-1, -1], ((0, 0), (1, 0)))
    row, column = (
        x.reshape(1, 1, 1, 1, chunk, chunk) for x in jnp.indices((chunk,) * 2)
    )
    same = texts[..., :, None] == texts[..., None, :]
    sees = same[:, :, None, None] & (row >= column)
    # Masked before `exp`, which would overflow to the right of the diagonal.
    between = passed[..., None] - passed[..., None, :]
    between = jnp.where(sees, jnp.exp(jnp.where(sees, between, 0.0)), 0.0)
    goes_on = (texts == before[..., None])[:, :, None, None]
    since = jnp.where(goes_on, jnp.exp(passed), 0.0)

    def product(equation: str, *factors: Array) -> Array:
        return jnp.einsum(equation, *factors, precision=PRECISION)

    similar = product("bnkid,bnkjd->bnkij", key, key)[:, :, :, None]
    attends = product("bnkid,bnkjd->bnkij", query, key)[:, :, :, None] * between
    below = jnp.where(row > column, beta[..., None] * between * similar, 0.0)
    inverse = _inverse(below)
    written = product("bnkgij,bnkgjv->bnkgiv", inverse, beta[..., None] * value)
    recalling = product("bnkgij,bnkgj,bnkjd->bnkgid", inverse, beta * since, key)

    def one_chunk(memory: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        written, recalling, attends, since, to_end, query, key = chunk
        change = written - product("bkgid,bkgdv->bkgiv", recalling, memory)
        output = since[..., None] * product("bkid,bkgdv->bkgiv", query, memory)
        output = output + product("bkgij,bkgjv->bkgiv", attends, change)
        memory = since[..., -1, None, None] * memory
        memory = memory + product("bkgj,bkjd,bkgjv->bkgdv", to_end, key, change)
        return memory, output

    by_chunk = written, recalling, attends, since, between[..., -1, :], query, key
    shape = memory.shape
    memory, outputs = jax.lax.scan(
        one_chunk,
        memory.reshape(rows, *of_values, *shape[2:]),
        jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), by_chunk),
    )
    # [N, B, K, G, C, value_dim]
    outputs = jnp.moveaxis(outputs, (0, 4), (1, 2)).reshape(rows, -1, heads, shape[-1])
    return outputs[:, :columns], memory.reshape(shape)


@jax.custom_jvp
def _inverse(below: Array) -> Array:
    """(I + L)⁻¹ of a strictly lower triangular L, f32[..., C, C], by block doubling.

    From the inverted diagonal blocks X of size s, those of size 2 s are

        [X₁  0]⁻¹     [X₁           0 ]
        [L   X₂]   =  [-X₂ L X₁     X₂]

    A power series of L would lose precision: its terms are far larger than their sum.
    """
    size = below.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape)
    shape = *(1,) * (below.ndim - 2), size, size
    row, column = (x.reshape(shape) for x in jnp.indices((size, size)))
    half = 1
    while half < size:
        corner = row // (2 * half) == column // (2 * half)
        corner &= row // half > column // half
        left = jnp.matmul(inverse, jnp.where(corner, below, 0.0), precision=PRECISION)
        inverse = inverse - jnp.matmul(left, inverse, precision=PRECISION)
        half *= 2
    return inverse


@_inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # d (I + L)⁻¹ = -(I + L)⁻¹ dL (I + L)⁻¹: a gradient keeps only the result.
    inverse = _inverse(*primals)
    left = jnp.matmul(inverse, tangents[0], precision=PRECISION)
    return inverse, -jnp.matmul(left, inverse, precision=PRECISION)


def convolved(x: Array, taps: Array, *, tail: Array, texts: Array) -> Array:
    """silu(Σ_i taps[i] · x[t - W + 1 + i]), over the tokens of t's own text.

    Args:
      x: [B, T, C], 0 at padding.
      taps: [W, C].
      tail: [B, W - 1, C], x of the preceding tokens, of text 0.
      texts: as in `chunked`.
    """
    columns, before = x.shape[1], tail.shape[1]
    x, of = jnp.concatenate([tail, x], axis=1), jnp.pad(texts, ((0, 0), (before, 0)))
    total = jnp.zeros((), jnp.float32)
    for i, tap in enumerate(taps.astype(jnp.float32)):
        near = slice(i, i + columns)
        same = (of[:, near] == texts)[..., None]
        term = x[:, near].astype(jnp.float32) * tap[None, None]
        total = total + jnp.where(same, term, 0.0)
    return nn.silu(total).astype(x.dtype)


def _tail(x: Array, *, tail: Array, end: Array) -> Array:
    """The last W - 1 inputs before column `end`, i32[B], of x: [B, W - 1, C]."""
    both = jnp.concatenate([tail, x], axis=1)
    column = end[:, None] + jnp.arange(tail.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(both, column[..., None], axis=1)


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)


def _rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """log of U(1/16, 16): heads begin with memories of different length."""
    return jnp.log(jax.random.uniform(key, shape, dtype, minval=1 / 16, maxval=16.0))


class GatedDeltaNet(nn.Module):
    """The layer, with its projections, convolutions and norm.

    Args of a call:
      x: [B·T, D].
      mask: an `AttentionMask` of T columns, or with a cache bool[B, T], True at tokens;
        None: all are.

    Returns:
      [B·T, D], and the state after the last token.
    """

    model: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Array,
        *,
        rows: int,
        mask: AttentionMask | Array | None,
        cache: DeltaState | None,
    ) -> tuple[Array, DeltaState]:
        model, shape = self.model, self.model.delta_net
        assert shape is not None
        columns = x.shape[0] // rows
        if isinstance(mask, AttentionMask):
            live, texts = mask.segments > 0, texts_of(mask.segments)
        else:
            texts = jnp.zeros((rows, columns), jnp.int32)
            live = jnp.ones((rows, columns), bool) if mask is None else mask
        state = blank_state(model, rows=rows) if cache is None else cache
        end = (live * jnp.arange(1, columns + 1, dtype=jnp.int32)[None]).max(axis=1)

        def projected(name: str, size: int) -> Array:
            y = Linear(size, False, name=name)(x).reshape(rows, columns, size)
            return jnp.where(live[..., None], y, jnp.zeros_like(y))

        def mixed(name: str, heads: int, size: int, tail: Array) -> tuple[Array, Array]:
            y = projected(name, heads * size)
            start = nn.initializers.normal(shape.conv_width**-0.5)
            taps = self.param(
                f"{name}_taps", start, (shape.conv_width, heads * size), jnp.float32
            ).astype(x.dtype)
            new = rematerialised(convolved, model=model)(
                y, taps, tail=tail, texts=texts
            )
            new = new.reshape(rows, columns, heads, size).astype(jnp.float32)
            return new, _tail(y, tail=tail, end=end)

        keys = shape.num_key_heads, shape.key_dim
        values = shape.num_value_heads, shape.value_dim
        query, query_tail = mixed("query", *keys, state.tails[0])
        key, key_tail = mixed("key", *keys, state.tails[1])
        value, value_tail = mixed("value", *values, state.tails[2])
        heads = (shape.num_value_heads,)
        log_rate = self.param("log_rate", _rates, heads, jnp.float32)
        bias = self.param("decay_bias", nn.initializers.ones, heads, jnp.float32)
        decay = projected("decay", *heads).astype(jnp.float32)
        rate = jnp.exp(log_rate.astype(jnp.float32))[None, None]
        log_decay = -rate * nn.softplus(decay + bias.astype(jnp.float32)[None, None])
        beta = nn.sigmoid(projected("beta", *heads).astype(jnp.float32))
        tokens = Tokens(
            query=_unit(query) * shape.key_dim**-0.5,
            key=_unit(key),
            value=value,
            log_decay=jnp.where(live[..., None], log_decay, 0.0),
            beta=jnp.where(live[..., None], beta, 0.0),
        )
        if columns == 1 and cache is not None:
            y, memory = step(Tokens(*(part[:, 0] for part in tokens)), state.memory)
        else:
            y, memory = chunked(tokens, state.memory, texts=texts)
        gate = Linear(values[0] * values[1], False, name="gate")(x)
        scale = self.param(
            "norm_scale", nn.initializers.ones, (shape.value_dim,), jnp.float32
        )

        def normed(y: Array, scale: Array, gate: Array) -> Array:
            y = y.astype(jnp.float32).reshape(-1, *values)
            variance = jnp.square(y).mean(axis=-1, keepdims=True)
            y = y * jax.lax.rsqrt(variance + model.norm_eps) * scale[None, None]
            y = y * nn.silu(gate.astype(jnp.float32).reshape(y.shape))
            return y.reshape(gate.shape).astype(gate.dtype)

        y = rematerialised(normed, model=model)(y, scale.astype(jnp.float32), gate)
        y = Linear(
            x.shape[-1],
            False,
            init_std=residual_std(model),
            name="output",
        )(y)
        return y, DeltaState(memory, (query_tail, key_tail, value_tail))


def texts_of(segments: Array) -> Array:
    """Numbers the texts of a row from 1: segments i32[B, T] to i32[B, T].

    >>> print(texts_of(jnp.array([[0, 3, 3, 5, 0]])))
    [[0 1 1 2 2]]
    """
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    begins = (segments > 0) & (segments != before)
    return jnp.cumsum(begins, axis=1, dtype=jnp.int32)
