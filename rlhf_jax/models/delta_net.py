"""Gated DeltaNet: a layer that remembers the text in one matrix per head.

    q, k, v    = silu(convolution of each channel (projection x))
    q, k       ← q / |q| / √key_dim, k / |k|
    α, β       = exp(-rate · softplus(decay x + bias)), sigmoid(beta x)
    o          = `delta_rule` of q, k, v, α and β
    y          = output(norm(o) · silu(gate x))

All between the projections runs a block of columns at a time: a block reads what the
projections wrote, in the compute dtype, and what the block before left. So float32
numbers and the [C, C] factors of chunks stay in a chip's own memory, and a gradient
keeps the states between blocks alone.

    columns    0 ··· 255   256 ··· 511   512 ···         one row per device
    blocks     ─────────→  ───────────→  ──────→     memory, inputs of convolutions

Source: Yang et al. 2024, arXiv:2412.06464, section 3.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.models import axes, delta_rule
from rlhf_jax.models.blocks import Linear, residual_std
from rlhf_jax.models.caches import DeltaState, blank_state
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.delta_rule import CHUNK, Tokens
from rlhf_jax.models.positions import AttentionMask

Array = jax.Array
BLOCK = 256  # tokens of a device whose float32 numbers are in memory at a time


class Inputs(NamedTuple):
    """What a layer computes of each column by itself, in the compute dtype."""

    query: Array  # [B, T, K·key_dim], before the convolution
    key: Array  # [B, T, K·key_dim]
    value: Array  # [B, T, H·value_dim]
    gate: Array  # [B, T, H·value_dim]
    decay: Array  # [B, T, H]
    beta: Array  # [B, T, H]
    live: Array  # bool[B, T], True at tokens
    texts: Array  # i32[B, T], as in `delta_rule.chunked`


class Weights(NamedTuple):
    """The parameters of a layer that are no projections, in float32."""

    taps: tuple[Array, ...]  # [W, width] of query, key and value
    log_rate: Array  # [H]
    decay_bias: Array  # [H]
    norm_scale: Array  # [value_dim]


class Before(NamedTuple):
    """What the columns of a block read of those before it."""

    memory: Array  # f32[B, H, key_dim, value_dim], of the text of the last column
    tails: tuple[Array, ...]  # [B, W - 1, width], inputs of the convolutions
    texts: Array  # i32[B, W - 1]


def _mixed(
    before: Before,
    inputs: Inputs,
    weights: Weights,
    *,
    model: ModelConfig,
    one_token: bool = False,
) -> tuple[Before, Array]:
    """What columns write for the projection `output`, [B, T, H·value_dim].

    Also returns what the next block reads.
    """
    shape = model.delta_net
    assert shape is not None
    (rows, columns), live = inputs.live.shape, inputs.live[..., None]
    texts = jnp.concatenate([before.texts, inputs.texts], axis=1)

    def heads(x: Array, tail: Array, taps: Array, count: int) -> tuple[Array, Array]:
        x = jnp.concatenate([tail, jnp.where(live, x, jnp.zeros_like(x))], axis=1)
        y = convolved(x, taps, texts=texts).astype(x.dtype).astype(jnp.float32)
        return y.reshape(rows, columns, count, -1), x[:, columns:]

    counts = shape.num_key_heads, shape.num_key_heads, shape.num_value_heads
    of_each = inputs[:3], before.tails, weights.taps, counts
    (query, key, value), tails = zip(*map(heads, *of_each), strict=True)
    decay = inputs.decay.astype(jnp.float32) + weights.decay_bias[None, None]
    log_decay = -jnp.exp(weights.log_rate)[None, None] * nn.softplus(decay)
    tokens = Tokens(
        query=_unit(query) * shape.key_dim**-0.5,
        key=_unit(key),
        value=value,
        log_decay=jnp.where(live, log_decay, 0.0),
        beta=jnp.where(live, nn.sigmoid(inputs.beta.astype(jnp.float32)), 0.0),
    )
    if one_token:
        y, memory = delta_rule.step(
            Tokens(*(part[:, 0] for part in tokens)), before.memory
        )
        y = y[:, None]
    else:
        since = inputs.texts - before.texts[:, -1:]
        y, memory = delta_rule.chunked(tokens, before.memory, texts=since)
    variance = jnp.square(y).mean(axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(variance + model.norm_eps)
    y = y * weights.norm_scale[None, None, None]
    y = y * nn.silu(inputs.gate.astype(jnp.float32).reshape(y.shape))
    y = y.reshape(inputs.gate.shape).astype(inputs.gate.dtype)
    return Before(memory, tails, texts[:, columns:]), y


def block_columns(rows: int) -> int:
    """Columns of a block, whole chunks, on a device that has `rows` rows."""
    return CHUNK * max(BLOCK // max(rows, 1) // CHUNK, 1)


def _in_blocks(
    mixed: Callable[[Before, Inputs], tuple[Before, Array]],
    before: Before,
    inputs: Inputs,
    *,
    model: ModelConfig,
) -> tuple[Before, Array]:
    """`mixed` of whole rows, a block of columns at a time.

    A gradient keeps what the blocks read and recomputes the rest, so that float32 and
    the factors of chunks are never in memory for more than a block.
    """
    rows, columns = inputs.live.shape
    count = -(-columns // block_columns(rows // axes.row_devices(rows)))
    if count == 1:
        return jax.checkpoint(mixed, prevent_cse=model.unroll)(before, inputs)
    size = CHUNK * -(-columns // (count * CHUNK))
    room = count * size - columns

    def split(x: Array, mode: str = "constant") -> Array:
        """[blocks, B, columns of a block, ...]."""
        x = jnp.pad(x, ((0, 0), (0, room), *((0, 0),) * (x.ndim - 2)), mode=mode)
        return jnp.moveaxis(x.reshape(rows, count, size, *x.shape[2:]), 1, 0)

    blocks = jax.tree.map(split, inputs)._replace(texts=split(inputs.texts, "edge"))
    # A loop keeps the two forward passes apart.
    run = jax.checkpoint(mixed, prevent_cse=False)
    before, y = jax.lax.scan(run, before, blocks)
    y = jnp.moveaxis(y, 0, 1).reshape(rows, count * size, -1)
    return before, y[:, :columns]


def convolved(x: Array, taps: Array, *, texts: Array) -> Array:
    """f32 silu(Σ_i taps[i] · x[t - W + 1 + i]), over the tokens of t's own text.

    Args:
      x: [B, W - 1 + T, C], 0 at padding.
      taps: f32[W, C].
      texts: i32[B, W - 1 + T], as in `delta_rule.chunked`.
    """
    columns = x.shape[1] - taps.shape[0] + 1
    own, total = texts[:, -columns:], jnp.zeros((), jnp.float32)
    for i, tap in enumerate(taps):
        near = slice(i, i + columns)
        same = (texts[:, near] == own)[..., None]
        term = x[:, near].astype(jnp.float32) * tap[None, None]
        total = total + jnp.where(same, term, 0.0)
    return nn.silu(total)


def _tail(x: Array, *, live: Array, tail: Array, end: Array) -> Array:
    """The last W - 1 inputs before column `end`, i32[B], of x: [B, W - 1, C]."""
    x = jnp.where(live[..., None], x, jnp.zeros_like(x))
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
        key_width = shape.num_key_heads * shape.key_dim
        heads, width = shape.num_value_heads, shape.num_value_heads * shape.value_dim

        def projected(name: str, size: int) -> Array:
            return Linear(size, False, name=name)(x).reshape(rows, columns, size)

        def taps(name: str, size: int) -> Array:
            start = nn.initializers.normal(shape.conv_width**-0.5)
            leaf = self.param(f"{name}_taps", start, (shape.conv_width, size), f32)
            return leaf.astype(x.dtype).astype(f32)

        def vector(name: str, start: Callable[..., Array], size: int) -> Array:
            return self.param(name, start, (size,), f32).astype(f32)

        f32, ones = jnp.float32, nn.initializers.ones
        mixes = {"query": key_width, "key": key_width, "value": width}
        inputs = Inputs(
            **{name: projected(name, size) for name, size in mixes.items()},
            gate=projected("gate", width),
            decay=projected("decay", heads),
            beta=projected("beta", heads),
            live=live,
            texts=texts,
        )
        weights = Weights(
            taps=tuple(taps(name, size) for name, size in mixes.items()),
            log_rate=vector("log_rate", _rates, heads),
            decay_bias=vector("decay_bias", ones, heads),
            norm_scale=vector("norm_scale", ones, shape.value_dim),
        )
        mixed = functools.partial(_mixed, weights=weights, model=model)
        before = jnp.zeros((rows, shape.conv_width - 1), jnp.int32)
        before = Before(state.memory, state.tails, before)
        if columns == 1 and cache is not None:
            after, y = mixed(before, inputs, one_token=True)
        else:
            after, y = _in_blocks(mixed, before, inputs, model=model)
        y = Linear(
            x.shape[-1],
            False,
            init_std=residual_std(model),
            name="output",
        )(y.reshape(-1, width))
        end = (live * jnp.arange(1, columns + 1, dtype=jnp.int32)[None]).max(axis=1)
        tails = (
            _tail(one, live=live, tail=tail, end=end)
            for one, tail in zip(inputs[:3], state.tails, strict=True)
        )
        return y, DeltaState(after.memory, tuple(tails))


def texts_of(segments: Array) -> Array:
    """Numbers the texts of a row from 1: segments i32[B, T] to i32[B, T].

    >>> print(texts_of(jnp.array([[0, 3, 3, 5, 0]])))
    [[0 1 1 2 2]]
    """
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    begins = (segments > 0) & (segments != before)
    return jnp.cumsum(begins, axis=1, dtype=jnp.int32)
