"""Which position each column has, and rotary angles: their table and the rotation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rlhf_jax.models.config import ModelConfig, RopeScaling

Array = jax.Array


def positions_of(
    mask: Array, *, segments: Array | None = None, prefixes: Array | None = None
) -> Array:
    """How many tokens of its text stand before each column; padding does not count.

        mask         0  0  1  1  1  0
        positions    0  0  0  1  2  3

        segments     0  1  1  2  2  0
        positions    0  0  1  0  1  0

        segments     1  1  2  2  3  3        2 and 3 go on where 1 ends
        prefixes     0  0  1  1  1  1
        positions    0  1  2  3  2  3

    Args:
      mask: bool[B, S], True at tokens.
      segments: i32[B, S], each text in columns side by side; None is one text per row.
      prefixes: i32[B, S], the text whose end a text goes on from; 0 and None are none.

    Returns:
      i32[B, S].
    """
    count = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - mask.astype(jnp.int32)
    if segments is None:
        return count
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    # The count never falls: the largest at a beginning so far is the last one's.
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
    """`rotary_table` of positions i32[B, T]; None where positions are learned."""
    if model.positions == "learned":
        return None
    return rotary_table(positions, model=model, local=local)


def rotary_table(
    positions: Array, *, model: ModelConfig, local: bool = False
) -> tuple[Array, Array]:
    """cos and sin of position × frequency, f32[B, 1, T, d / 2] each.

    Frequency i is θ^(-2i / d), stretched as `model.rope_scaling` says, for the d
    dimensions of a head that rotate.

    Args:
      positions: i32[B, T].
      local: of the layers with a sliding window, where `model.rope_local_theta` may
        say θ, and nothing is stretched then.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 15.
    """
    theta, scaling = model.rope_theta, model.rope_scaling
    if local and model.rope_local_theta is not None:
        theta, scaling = model.rope_local_theta, None
    half = (model.head_dim if model.rotary_dim is None else model.rotary_dim) // 2
    exponent = jnp.arange(half, dtype=jnp.float32) / half
    frequency, factor = theta**-exponent, 1.0
    if scaling is not None:
        frequency = _stretch(frequency, scaling=scaling, theta=theta)
        factor = scaling.attention_factor
    # In float32: position 100,000 times a frequency has no fraction left in bfloat16.
    angle = (
        positions.astype(jnp.float32)[:, None, :, None] * frequency[None, None, None]
    )
    return factor * jnp.cos(angle), factor * jnp.sin(angle)


def unless(unrotated: Array, table: tuple[Array, Array]) -> tuple[Array, Array]:
    """The table, or where bool[] says so one that leaves all as it is, to the bit."""
    cos, sin = table
    return jnp.where(unrotated, 1.0, cos), jnp.where(unrotated, 0.0, sin)


def _stretch(frequency: Array, *, scaling: RopeScaling, theta: float) -> Array:
    match scaling.kind:
        case "linear":
            return frequency / scaling.factor
        case "llama3":
            turns = scaling.original_max_positions * frequency / (2 * math.pi)
            unscaled = (turns - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
        case "yarn":
            half = frequency.shape[0]

            def dimension(turns: float) -> float:
                """Where a wave turns so often in the original context."""
                wavelength = scaling.original_max_positions / (2 * math.pi * turns)
                return half * math.log(wavelength) / math.log(theta)

            low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, 2 * half - 1)
            high = high + 0.001 if high == low else high  # as theirs
            unscaled = 1 - (jnp.arange(half, dtype=jnp.float32) - low) / (high - low)
    unscaled = jnp.clip(unscaled, 0.0, 1.0)  # 0: long waves, divided; 1: short
    return (1 - unscaled) * frequency / scaling.factor + unscaled * frequency


def rotate(x: Array, table: tuple[Array, Array]) -> Array:
    """Rotates the pairs (x[i], x[i + d/2]) of every head by its angle.

    Of a head as wide as twice the table all, else its first d dimensions.
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
