"""Which tokens a token attends to, without an array of [S, S].

column       0  1  2  3  4  5  6
segments     0  1  1  1  2  2  0        two texts between padding
3 attends       1  2  3                 its own text, up to itself
5 attends                4  5
3, window 2        2  3                 its own column and one before
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.models.context import Cut, balanced

Array = jax.Array


@flax.struct.dataclass
class AttentionMask:
    """Causal attention within segments and a window, and the form of its logits.

    A token attends to the columns up to its own, of its own segment, within the window.
    Padding attends to nothing and is attended to by nothing: what an engine returns
    there is finite and without meaning.
    """

    segments: Array  # i32[B, S], the text that each column is of; 0 is padding
    # i32[B, S], a text further left that each column sees too, such as a prompt that
    # several responses share; 0 is none. Not for splash, a window or a cut.
    prefixes: Array | None = None
    # Columns that are attended to, its own included; i32[] where it differs between
    # the layers of a loop; None is all.
    window: Array | int | None = None
    # The values that a traced window may have, for an engine with static windows.
    windows: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    # Whether a row may hold several texts; without, what is not padding is one text.
    packed: bool = flax.struct.field(pytree_node=False, default=True)
    # Of q·k, dimensionless; None is 1 / sqrt(head_dim).
    scale: float | None = flax.struct.field(pytree_node=False, default=None)
    # c of logits c·tanh(x / c) (Gemma 2, arXiv:2408.00118, section 2); None is off.
    softcap: float | None = flax.struct.field(pytree_node=False, default=None)
    # How the columns of queries are cut over devices; None where a device has all.
    cut: Cut | None = flax.struct.field(pytree_node=False, default=None)
    share: Array | None = None  # i32[], the device whose queries these are, with a cut

    @property
    def rows(self) -> int:
        """B, of hidden states; with a cut B·c."""
        return self.segments.shape[0] * (1 if self.cut is None else self.cut.count)

    @property
    def columns(self) -> int:
        """S, of a row."""
        return self.segments.shape[1]

    def query_columns(self, queries: int) -> Array:
        """i32[T], rising: the columns of the queries, the last T without a cut."""
        if self.cut is None or self.share is None:
            return jnp.arange(self.columns - queries, self.columns, dtype=jnp.int32)
        of_devices = balanced(self.columns, count=self.cut.count)
        return jnp.asarray(of_devices.reshape(-1, queries))[self.share]

    def query_segments(self, queries: int) -> Array:
        """i32[B, T], the segments of the queries."""
        if self.share is None:
            return self.segments[:, self.columns - queries :]
        return jnp.take(self.segments, self.query_columns(queries), axis=1)

    def query_prefixes(self, queries: int) -> Array:
        """i32[B, T], the prefixes of the queries, 0 without any."""
        if self.prefixes is None:
            return jnp.zeros_like(self.query_segments(queries))
        return self.prefixes[:, self.columns - queries :]

    def first_columns(self, count: int) -> AttentionMask:
        """The record of the first `count` columns alone."""
        prefixes = None if self.prefixes is None else self.prefixes[:, :count]
        return dataclasses.replace(
            self, segments=self.segments[:, :count], prefixes=prefixes
        )


def with_static_window(
    mask: AttentionMask, attend: Callable[[AttentionMask], Array]
) -> Array:
    """attend(mask), whose window is an int or None; `jax.lax.switch` of a traced one.

    Args:
      mask: with `windows` where its window is traced.
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
    """The record of padded rows, or of rows into which texts are packed.

    Args:
      mask: bool[B, S], True at tokens.
      segments: i32[B, S], from 1 at tokens; None is one text per row.
      prefixes: i32[B, S], the segment that a token sees beside its own, or 0.
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
    """The record as an array, for an engine that takes no other form.

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
