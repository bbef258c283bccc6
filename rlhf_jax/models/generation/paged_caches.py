"""Keys and values of continuous batching in pages: made, filled from prompts, moved.

A layer that sees all columns of a row has pools of keys and of values,
[N, K, C, head_dim]; `page_table.py` says who owns a page, the same in all these layers.
A local layer whose window is shorter than the longest row keeps one ring per place, as
wide as the window, [B, K, window, head_dim]. Neither keeps the padding of prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional.errors import refuse
from rlhf_jax.models import axes
from rlhf_jax.models.attention import ring
from rlhf_jax.models.cached_decoder import Seen
from rlhf_jax.models.caches import Caches, Columns, Kept, as_cached, blank, width
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation import page_table
from rlhf_jax.models.generation.page_table import PageTable, pages_of

Array = jax.Array


def in_pages(model: ModelConfig, layer: int, *, longest: int) -> bool:
    """Whether a layer uses pages, for rows of up to `longest` tokens; else a ring."""
    window = model.sliding_window
    if model.is_recurrent(layer):
        return False
    return window is None or not model.is_local(layer) or window >= longest


def check(model: ModelConfig, *, longest: int) -> None:
    """Raises InputError if pages would save nothing, or the mesh rules them out."""
    refuse(_faults(model, longest=longest))


def _faults(model: ModelConfig, *, longest: int) -> Iterator[str]:
    if not any(in_pages(model, n, longest=longest) for n in range(model.num_layers)):
        yield (
            f"cache_pages: expected a layer that sees all of {longest} columns, got "
            f"windows of {model.sliding_window} in every layer, whose caches are no "
            f"wider than that; leave it out"
        )
    mesh = jax.sharding.get_abstract_mesh()
    sharing = {
        axis: mesh.shape[axis]
        for axis in axes.ACTIVATION_AXES
        if axis not in mesh.manual_axes and mesh.shape.get(axis, 1) > 1
    }
    if sharing:
        shown = ",".join(f"{axis}={size}" for axis, size in sharing.items())
        yield (
            f"cache_pages: expected a mesh whose rows are shared by data alone, with "
            f"Auto axes, got one with {shown}; leave it out, or sample on another mesh"
        )


def empty(model: ModelConfig, *, places: int, pages: int, longest: int) -> Caches:
    """Empty caches, for B places and N pages."""

    def of_layer(layer: int) -> Kept:
        if in_pages(model, layer, longest=longest):
            return blank(model, layer, rows=pages, columns=model.page_size)
        columns = width(model, layer, columns=longest)
        return blank(model, layer, rows=places, columns=columns)

    return tuple(map(of_layer, range(model.num_layers)))


def filled(
    caches: Caches,
    prompts: Sequence[Kept],
    *,
    model: ModelConfig,
    lengths: Array,
    longest: int,
    page: Array,
    place: Array,
) -> Caches:
    """Writes the keys and values of prompts that come in into the caches.

    Args:
      prompts: of every layer, [A, K, P, head_dim] each, left-padded.
      lengths: i32[A], tokens of each prompt.
      page: i32[A, J], their pages in the order of their tokens; N is none.
      place: i32[A], their places; B is none.
    """
    size = model.page_size
    columns = next(
        kept[0].shape[2] for kept in prompts if isinstance(kept, tuple) and kept
    )
    slots = pages_of(columns, size=size)
    pad = (columns - lengths)[:, None]
    # Skips left padding: token i of a row goes to column i of its pages.
    in_order = pad + jnp.arange(slots * size, dtype=jnp.int32)[None]

    def one(pool: Columns, prompt: Columns, layer: int) -> Columns:
        window, fresh = model.sliding_window, as_cached(prompt, cache=pool)
        if window is None or in_pages(model, layer, longest=longest):

            def put(all_: Array, new: Array) -> Array:
                new = _columns(new, in_order)
                new = new.reshape(*new.shape[:2], slots, size, *new.shape[3:])
                new = jnp.moveaxis(new, 2, 1)
                return all_.at[page[:, :slots]].set(new, mode="drop")
        else:
            last = lengths[:, None] - 1
            column = jnp.arange(window, dtype=jnp.int32)[None]
            # The newest token whose number is the ring's column, modulo the window.
            token = last - (last - column) % window

            def put(all_: Array, new: Array) -> Array:
                return all_.at[place].set(_columns(new, pad + token), mode="drop")

        return jax.tree.map(put, pool, fresh)

    def of_layer(pools: Kept, prompt: Kept, layer: int) -> Kept:
        if not pools or not prompt:
            return ()
        if isinstance(pools, tuple) and isinstance(prompt, tuple):
            return one(pools[0], prompt[0], layer), one(pools[1], prompt[1], layer)
        return jax.tree.map(
            lambda all_, new: all_.at[place].set(new, mode="drop"), pools, prompt
        )

    return tuple(
        of_layer(*kept, n) for n, kept in enumerate(zip(caches, prompts, strict=True))
    )


def seen(pages: PageTable, *, model: ModelConfig, longest: int, going: Array) -> Seen:
    """The columns that the next token of every row sees, and where it is written."""
    everything = page_table.view(pages, going=going)
    window, size = everything, model.sliding_window
    if size is not None and size < longest:
        window = ring(pages.tokens, size=size, going=going)
    if not model.recurrent_layers:
        return Seen(everything, window)
    # A row that waits for a page is not run: its state stays.
    return Seen(everything, window, tokens=going[:, None])


def moved(
    caches: Caches, *, model: ModelConfig, longest: int, page: Array, place: Array
) -> Caches:
    """Moves caches to other pages and places.

    Args:
      page: i32[N'], the old page of each; N for none.
      place: i32[B'], the old place of each.
    """
    layers = []
    for layer, cache in enumerate(caches):
        index = page if in_pages(model, layer, longest=longest) else place

        def take(leaf: Array, index: Array = index) -> Any:
            return leaf.at[index].get(mode="clip")

        layers.append(jax.tree.map(take, cache))
    return tuple(layers)


def _columns(array: Array, column: Array) -> Array:
    """Takes columns i32[A, W] of [A, K, P, ...], clipped to the nearest one."""
    column = jnp.clip(column, 0, array.shape[2] - 1)[:, None]
    if array.ndim == 4:
        column = column[..., None]
    return jnp.take_along_axis(array, column, axis=2)
