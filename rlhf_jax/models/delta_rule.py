"""The gated delta rule: a memory of the text that is one matrix per head.

    S ← α_t S,   S ← S + k_t (β_t (v_t - Sᵀ k_t))ᵀ,   o_t = Sᵀ q_t

S is f32[key_dim, value_dim] and 0 where a text begins; α_t is the decay, from 0 to 1,
and β_t the share of S at k_t, of length 1, that v_t replaces. G value heads share the
query and key of a key head.

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

from typing import NamedTuple

import jax
import jax.numpy as jnp

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
