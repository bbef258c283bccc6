"""Positions of columns, their rotary angles, and which columns each attends to.

column       0  1  2  3  4  5  6
segments     0  1  1  1  2  2  0        two texts between padding
3 attends       1  2  3                 its own text, up to itself
5 attends                4  5
3, window 2        2  3                 its own column and one before

`AttentionMask` describes this without an [S, S] array.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.models.axes import Cut, balanced
from rlhf_jax.models.config import ModelConfig, RopeScaling

Array = jax.Array


def positions_of(
    mask: Array, *, segments: Array | None = None, prefixes: Array | None = None
) -> Array:
    """The number of tokens of its text before each column; padding does not count.

        mask         0  0  1  1  1  0
        positions    0  0  0  1  2  3

        segments     0  1  1  2  2  0
        positions    0  0  1  0  1  0

        segments     1  1  2  2  3  3        2 and 3 go on where 1 ends
        prefixes     0  0  1  1  1  1
        positions    0  1  2  3  2  3

    Args:
      mask: bool[B, S], True at tokens.
      segments: i32[B, S], each text in adjacent columns; None is one text per row.
      prefixes: i32[B, S], the text that a text continues; 0 and None are none.

    Returns:
      i32[B, S].
    """
    count = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - mask.astype(jnp.int32)
    if segments is None:
        return count
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    # The count never falls: its running maximum over beginnings is that of the last.
    own = count - jax.lax.cummax(jnp.where(begins, count, 0), axis=1)
    if prefixes is None:
        return own
    rows = jnp.arange(mask.shape[0], dtype=jnp.int32)[:, None]
    lengths = jnp.zeros((mask.shape[0], mask.shape[1] + 1), jnp.int32)
    lengths = lengths.at[rows, segments].add(jnp.where(segments > 0, 1, 0))
    return own + jnp.take_along_axis(lengths, prefixes, axis=1)


def angles(
    positions: Array, *, model: ModelConfig, local: bool = False
) -> tuple[Array, Array] | None:
    """cos and sin of position × frequency, f32[B, 1, T, d / 2] each.

    Frequency i is θ^(-2i / d), stretched by `model.rope_scaling`, for the d dimensions
    of a head that rotate.

    Args:
      positions: i32[B, T].
      local: for layers with a sliding window; if `model.rope_local_theta` is set it is
        their θ, and nothing is stretched.

    Returns:
      The rotary table; None where positions are learned.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 15.
    """
    if model.positions == "learned":
        return None
    theta, scaling = model.rope_theta, model.rope_scaling
    if local and model.rope_local_theta is not None:
        theta, scaling = model.rope_local_theta, None
    head_dim = model.head_dim
    if model.global_heads is not None and not local:
        head_dim = model.global_heads.head_dim
    half = (head_dim if model.rotary_dim is None else model.rotary_dim) // 2
    exponent = jnp.arange(half, dtype=jnp.float32) / half
    frequency, factor = theta**-exponent, 1.0
    if scaling is not None:
        frequency = _stretch(frequency, scaling=scaling, theta=theta)
        factor = scaling.attention_factor
    # In float32: bfloat16 keeps no fraction of position 100,000 times a frequency.
    angle = (
        positions.astype(jnp.float32)[:, None, :, None] * frequency[None, None, None]
    )
    return factor * jnp.cos(angle), factor * jnp.sin(angle)


def unless(unrotated: Array, table: tuple[Array, Array]) -> tuple[Array, Array]:
    """The table, or if `unrotated`, bool[], one that changes nothing, to the bit."""
    cos, sin = table
    return jnp.where(unrotated, 1.0, cos), jnp.where(unrotated, 0.0, sin)


def _stretch(frequency: Array, *, scaling: RopeScaling, theta: float) -> Array:
    match scaling.kind:
        case "linear":
            return frequency / scaling.factor
        case "proportional":
            half = frequency.shape[0]
            turns = jnp.arange(half, dtype=jnp.int32) < int(scaling.share * half)
            return jnp.where(turns, frequency / scaling.factor, 0.0)
        case "llama3":
            turns = scaling.original_max_positions * frequency / (2 * math.pi)
            unscaled = (turns - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
        case "yarn":
            half = frequency.shape[0]

            def dimension(turns: float) -> float:
                """Dimension whose wave turns so often in the original context."""
                wavelength = scaling.original_max_positions / (2 * math.pi * turns)
                return half * math.log(wavelength) / math.log(theta)

            low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, 2 * half - 1)
            high = high + 0.001 if high == low else high  # as in transformers
            unscaled = 1 - (jnp.arange(half, dtype=jnp.float32) - low) / (high - low)
    unscaled = jnp.clip(unscaled, 0.0, 1.0)  # 0: long waves, divided; 1: short
    return (1 - unscaled) * frequency / scaling.factor + unscaled * frequency


def rotate(x: Array, table: tuple[Array, Array]) -> Array:
    """Rotates the pairs (x[i], x[i + d/2]) of every head by its angle.

    The table has d/2 angles; dimensions of a head from d on are left as they are.
    """
    cos, sin = table
    half = cos.shape[-1]
    first, second, rest = (
        x[..., :half].astype(jnp.float32),
        x[..., half : 2 * half].astype(jnp.float32),
        x[..., 2 * half :],
    )
    rotated = [first * cos - second * sin, second * cos + first * sin]
    parts = [part.astype(x.dtype) for part in rotated]
    return jnp.concatenate([*parts, rest] if rest.shape[-1] else parts, axis=-1)


@flax.struct.dataclass
class AttentionMask:
    """Causal attention within segments and a window, and the form of its logits.

    A token attends to columns of its own segment, up to its own, within the window.
    Padding attends to nothing and nothing attends to it: an engine's output at padding
    is finite and has no meaning.
    """

    segments: Array  # i32[B, S], the number of each column's text; 0 is padding
    # i32[B, S], a text further left that each column sees too, such as a prompt that
    # several responses share; 0 is none. Not for splash, a window or a cut.
    prefixes: Array | None = None
    # Columns attended to, the token's own included; i32[] if the layers of a loop
    # differ; None is all.
    window: Array | int | None = None
    # The values that a traced window may have, for an engine with static windows.
    windows: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    # Whether a row may hold several texts; otherwise its tokens are one text.
    packed: bool = flax.struct.field(pytree_node=False, default=True)
    # Multiplies q·k, dimensionless; None is 1 / sqrt(head_dim).
    scale: float | None = flax.struct.field(pytree_node=False, default=None)
    # c of logits c·tanh(x / c) (Gemma 2, arXiv:2408.00118, section 2); None is off.
    softcap: float | None = flax.struct.field(pytree_node=False, default=None)
    # How the columns of queries are shared by devices; None: a device has all columns.
    cut: Cut | None = flax.struct.field(pytree_node=False, default=None)
    share: Array | None = None  # i32[], with a cut: the device that has these queries
    # With a cut, whether a device has only the keys of its own columns, and passes them
    # round (`attention/ring_passes.py`); otherwise it has those of all columns.
    passed: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def rows(self) -> int:
        """Rows of hidden states: B, or B·c with a cut."""
        return self.segments.shape[0] * (1 if self.cut is None else self.cut.count)

    @property
    def columns(self) -> int:
        """S, columns of a row."""
        return self.segments.shape[1]

    def query_columns(self, queries: int) -> Array:
        """i32[T], the increasing columns of the queries: without a cut the last T."""
        if self.share is None:
            return jnp.arange(self.columns - queries, self.columns, dtype=jnp.int32)
        return self.columns_of_devices(queries)[self.share]

    def columns_of_devices(self, queries: int) -> Array:
        """i32[c, T], the columns of every device of a cut."""
        assert self.cut is not None
        of_devices = balanced(self.columns, count=self.cut.count)
        return jnp.asarray(of_devices.reshape(-1, queries))

    def query_segments(self, queries: int) -> Array:
        """i32[B, T], the segments of the queries."""
        if self.share is None:
            return self.segments[:, self.columns - queries :]
        return jnp.take(self.segments, self.query_columns(queries), axis=1)

    def query_prefixes(self, queries: int) -> Array:
        """i32[B, T], the prefixes of the queries; 0 without prefixes."""
        if self.prefixes is None:
            return jnp.zeros_like(self.query_segments(queries))
        return self.prefixes[:, self.columns - queries :]

    def first_columns(self, count: int) -> AttentionMask:
        """The mask of only the first `count` columns."""
        prefixes = None if self.prefixes is None else self.prefixes[:, :count]
        return dataclasses.replace(
            self, segments=self.segments[:, :count], prefixes=prefixes
        )


def with_static_window(
    mask: AttentionMask, attend: Callable[[AttentionMask], Array]
) -> Array:
    """Calls attend(mask) with a static window, by `jax.lax.switch` over a traced one.

    Args:
      mask: a traced window needs `windows`.
    """
    if mask.window is None or isinstance(mask.window, int):
        return attend(mask)
    # Kernels take static windows: one branch for each value that the layers have.
    number = jnp.argmax(jnp.asarray(mask.windows, jnp.int32) == mask.window)
    branches = [
        functools.partial(attend, dataclasses.replace(mask, window=window))
        for window in mask.windows
    ]
    return jax.lax.switch(number, branches)


def mask_of(
    mask: Array,
    *,
    segments: Array | None,
    prefixes: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    cut: Cut | None = None,
) -> AttentionMask:
    """The `AttentionMask` of padded rows, or of rows into which texts are packed.

    Args:
      mask: bool[B, S], True at tokens.
      segments: i32[B, S], from 1 at tokens; None is one text per row.
      prefixes: i32[B, S], a segment that a token sees besides its own, or 0.
    """
    text = mask.astype(jnp.int32)
    return AttentionMask(
        segments=text if segments is None else text * segments,
        prefixes=prefixes,
        packed=segments is not None,
        scale=scale,
        softcap=softcap,
        cut=cut,
    )


def allowed(mask: AttentionMask, *, queries: int) -> Array:
    """The mask as an array, for engines that take no other form.

    Returns:
      bool[B, T, S], True where a query attends to a key.
    """
    segments, of_queries = mask.segments, mask.query_segments(queries)
    column = jnp.arange(mask.columns, dtype=jnp.int32)
    distance = mask.query_columns(queries)[:, None] - column[None, :]
    within = distance >= 0
    if mask.window is not None:
        within &= distance < mask.window
    same = of_queries[:, :, None] == segments[:, None, :]
    if mask.prefixes is not None:
        prefixes = mask.query_prefixes(queries)
        same |= prefixes[:, :, None] == segments[:, None, :]
    # Segment 0 is padding, on both sides of `same`: it must not attend to itself.
    return within[None] & same & (segments > 0)[:, None, :]
