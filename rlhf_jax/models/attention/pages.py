"""Attention of a new token to keys and values in pages of a pool.

A pool has N pages of C columns. Token i of a row is in column i mod C of page i div C
of its row; all columns of a page belong to one row:

    C = 4      page      0     1     2     3     4        N = 5
               owner     1     0     -     0     1
               tokens   4567   45          0123  0123     row 0 has 6, row 1 has 8
    table      row 0: 3 1      row 1: 4 0

No page is copied: the query of its owner attends to it in place, and the results of a
row's pages are summed. One step reads the pool once, however long the longest row is.

    m = max_jc l_jc,   z = Σ_j Σ_c exp(l_jc - m),   y = Σ_j Σ_c exp(l_jc - m) / z · v_jc

Source: pages, Kwon et al. 2023 (PagedAttention), arXiv:2309.06180, section 4.1; sums
over parts of a row, Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.models.caches import (
    Cached,
    Columns,
    KeyValue,
    as_cached,
    logits_of,
    plain,
)

Array = jax.Array


@flax.struct.dataclass
class Pages:
    """Which pages hold the tokens of B rows, and where their new tokens are written."""

    table: Array  # i32[B, J], pages of a row in the order of its tokens; N is none
    owner: Array  # i32[N], row of a page; any row if `seen` is False throughout
    seen: Array  # bool[N, C], columns that the owner's new token sees, itself included
    page: Array  # i32[B], page of the new token; N if it is not written
    column: Array  # i32[B], column of the new token in its page

    @property
    def rows(self) -> int:
        """B, the number of rows."""
        return self.table.shape[0]


def ring(position: Array, *, size: int, going: Array) -> Pages:
    """One page per row with its last `size` tokens; token i is in column i mod size.

    Args:
      position: i32[B], tokens before the new one.
      size: columns of a page: the window of a local layer.
      going: bool[B], rows whose new token is written.

    Returns:
      B pages, one for each of B rows.
    """
    rows = position.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    # The last token written to each column; below 0, none yet.
    column = jnp.arange(size, dtype=jnp.int32)[None]
    token = position[:, None] - (position[:, None] - column) % size
    return Pages(
        table=row[:, None],
        owner=row,
        seen=token >= 0,
        page=jnp.where(going, row, rows),
        column=position % size,
    )


def append_to_pages(cache: Cached, new: KeyValue, *, pages: Pages) -> Cached:
    """Writes the keys and values of one new token of every row into the pool.

    Args:
      cache: [N, K, C, head_dim] each.
      new: [B, K, 1, head_dim] each.
    """

    def write(old: Columns, fresh: Array) -> Columns:
        return jax.tree.map(
            lambda pool, one: pool.at[pages.page, :, pages.column].set(
                one[:, :, 0], mode="drop"
            ),
            old,
            as_cached(fresh, cache=old),
        )

    key, value = map(write, cache, new)
    return key, value


def attend_to_pages(
    query: Array,
    keys_values: Cached,
    *,
    pages: Pages,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """softmax(scale · q·kᵀ)·v of one token per row, over the columns of its pages.

    Args:
      query: [B, H, 1, head_dim].
      keys_values: [N, K, C, head_dim] each, possibly in int8.
      sinks: f32[H], as in `engines.attend_to`.

    Returns:
      [B, H, 1, head_dim], in query's dtype; 0 for a row without pages. Logits and
      softmax are float32.
    """
    (key, key_scales), (value, value_scales) = (
        plain(columns, dtype=query.dtype) for columns in keys_values
    )
    kv_heads, head_dim = key.shape[1], key.shape[3]
    grouped = query.reshape(query.shape[0], kv_heads, -1, head_dim)
    logits = jnp.einsum(
        "nkgd,nkcd->nkgc",
        grouped[pages.owner],
        key,
        preferred_element_type=jnp.float32,
    )
    logits = logits_of(
        logits, key_scales=key_scales, head_dim=head_dim, scale=scale, softcap=softcap
    )
    visible = pages.seen[:, None, None]
    lowest = -0.7 * jnp.finfo(jnp.float32).max
    logits = jnp.where(visible, logits, lowest)

    def of_rows(x: Array, absent: Any) -> Array:
        """[B, J, ...], the values of every page of a row, or `absent`."""
        return x.at[pages.table].get(mode="fill", fill_value=absent)

    highest = of_rows(logits.max(axis=-1), lowest).max(axis=1)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, -1)
        highest = jnp.maximum(highest, sinks)
    weights = jnp.where(visible, jnp.exp(logits - highest[pages.owner][..., None]), 0.0)
    total = of_rows(weights.sum(axis=-1), 0.0).sum(axis=1)
    if sinks is not None:
        total = total + jnp.exp(sinks - highest)
    total = jnp.where(total > 0, total, 1.0)  # 0 for a row without pages
    share = weights / total[pages.owner][..., None]
    if value_scales is not None:
        share = share * value_scales[:, :, None]
    parts = jnp.matmul(
        share.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    y = of_rows(parts, 0.0).sum(axis=1)
    return y.reshape(query.shape).astype(query.dtype)
