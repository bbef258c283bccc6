"""Attention by cuDNN, on NVIDIA GPUs."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from rlhf_jax.models.caches import KeyValue
from rlhf_jax.models.positions import AttentionMask, allowed, with_static_window

Array = jax.Array

BLOCK = 4096  # queries of a packed row that are attended from at a time


def attend_cudnn(
    query: Array,
    keys_values: KeyValue,
    *,
    mask: AttentionMask,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """Flash attention by cuDNN, which materialises no logits and has no soft cap.

    The kernel takes causality, a window and row lengths, with all tokens at the start
    of a row; a row of one text is rolled there and back. Packed rows need the mask as
    an array, which the kernel reads as a bias. It is made for one block of queries at a
    time, and again in the backward pass, so that it takes [B, BLOCK, S].

    Args:
      query: [B, H, T, head_dim], of the last T columns, in bfloat16.
      mask: of S columns, without a soft cap; for rows that are not packed a traced
        window needs `windows`.
      implementation: "xla" computes the same without the kernel, for tests.

    Returns:
      [B, H, T, head_dim], in query's dtype; 0 at padding of rows that are not packed.
    """
    if mask.packed:
        return _attend_packed(
            query, keys_values, mask=mask, implementation=implementation
        )
    size, queries = keys_values[0].shape[2], query.shape[2]
    token = mask.segments > 0
    # i32[B], the first token: rolls tokens to the start of a row.
    start = jnp.argmax(token, axis=1)
    # The kernel takes no row of length 0.
    lengths = jnp.maximum(token.sum(axis=1, dtype=jnp.int32), 1)
    # Causality compares places: queries go to the columns of their keys.
    whole = jnp.pad(query, ((0, 0), (0, 0), (size - queries, 0), (0, 0)))
    rolled = [
        _rolled(array, by=-start).swapaxes(1, 2) for array in (whole, *keys_values)
    ]

    def attend(mask: AttentionMask) -> Array:
        window = mask.window
        assert window is None or isinstance(window, int)  # by `with_static_window`
        return jax.nn.dot_product_attention(
            *rolled,
            scale=mask.scale,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            # A window of all columns would choose another kernel for the same result.
            local_window_size=(
                None if window is None or window >= size else (window - 1, 0)
            ),
            implementation=implementation,
        )

    y = _rolled(with_static_window(mask, attend).swapaxes(1, 2), by=start)
    return jnp.where(token[:, None, :, None], y, 0)[:, :, size - queries :]


def _attend_packed(
    query: Array,
    keys_values: KeyValue,
    *,
    mask: AttentionMask,
    implementation: Literal["cudnn", "xla"],
) -> Array:
    """`attend_cudnn` of packed rows, a block of queries at a time."""
    size, queries = keys_values[0].shape[2], query.shape[2]

    @jax.checkpoint  # keeps no bias for the backward pass
    def attend(block: Array, keys: Array, values: Array, mask: AttentionMask) -> Array:
        y = jax.nn.dot_product_attention(
            *(array.swapaxes(1, 2) for array in (block, keys, values)),
            mask=allowed(mask, queries=block.shape[2])[:, None],
            scale=mask.scale,
            implementation=implementation,
        )
        return y.swapaxes(1, 2)

    blocks = []
    # A Python loop, not a scan: later blocks read more keys.
    for start in range(0, queries, BLOCK):
        end = min(start + BLOCK, queries)
        up_to = size - queries + end
        blocks.append(
            attend(
                query[:, :, start:end],
                *(array[:, :, :up_to] for array in keys_values),
                # No query of a block sees keys after its last one: leaving them out
                # saves half of the work.
                mask=mask.first_columns(up_to),
            )
        )
    return jnp.concatenate(blocks, axis=2)


def _rolled(x: Array, *, by: Array) -> Array:
    """Rolls the columns of row b of [B, H, S, head_dim] right by `by[b]`."""
    return jax.vmap(lambda row, shift: jnp.roll(row, shift, axis=1))(x, by)
