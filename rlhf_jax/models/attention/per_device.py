"""Runs an engine on each device of a mesh, for the device's rows, heads and queries.

A loop over blocks, or a kernel, is opaque to the compiler's partitioner, which would
gather its inputs. Attention needs nothing of other rows or heads. If devices share the
columns of a row, each gathers keys and values, which grouped heads make small, and
their gradients are summed over these devices (an all-reduce). If the mask says `passed`
a device keeps its own keys, and the engine passes them round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from rlhf_jax.models import axes
from rlhf_jax.models.caches import KeyValue
from rlhf_jax.models.positions import AttentionMask

Array = jax.Array
# (query, keys_values, *, mask, and sinks if the model has some) -> [B, H, T, head_dim]
Engine = Callable[..., Array]
HEAD_AXIS = "tensor"  # mesh axis that shares the heads


def attend_per_device(
    query: Array,
    keys_values: KeyValue,
    *,
    mask: AttentionMask,
    engine: Engine,
    sinks: Array | None = None,
) -> Array:
    """Calls engine(query, keys_values, mask=mask) on every device of the mesh.

    Rows are sharded over the row axes that divide them, and heads over `tensor` where
    it divides the query heads; if there are fewer key heads, they are repeated. Without
    a mesh, or within a `jax.shard_map` over all axes, this is the plain call. Within
    one over some of the axes, the other axes share the work.
    """
    mesh, sizes = jax.sharding.get_abstract_mesh(), axes.own_axes()
    # One device, or already inside a `shard_map`: nothing to share.
    own_sinks = {} if sinks is None else {"sinks": sinks}
    if math.prod(sizes.values()) == 1:
        return engine(query, keys_values, mask=mask, **own_sinks)
    heads, kv_heads = query.shape[1], keys_values[0].shape[1]
    devices = sizes.get(HEAD_AXIS, 1)
    shared = axes.shares_heads(heads, kv_heads, devices=devices)
    if shared and kv_heads % devices:
        # Fewer key heads than devices: each device gets the one its queries read.
        key, value = (jnp.repeat(x, devices // kv_heads, axis=1) for x in keys_values)
        keys_values = key, value
    rows = axes.row_axes(sizes, rows=query.shape[0], among=axes.ACTIVATION_AXES)
    by_row, by_part = PartitionSpec(rows or None), PartitionSpec(rows or None)
    if mask.cut is not None:
        by_row, by_part = mask.cut.by_row, mask.cut.by_part
    by_head = PartitionSpec(*by_part, HEAD_AXIS if shared and devices > 1 else None)
    static = mask.window if isinstance(mask.window, int) else None
    # A traced window must be an argument of `shard_map`; an int must not, as kernels
    # need it static.
    traced = () if static is mask.window else (mask.window,)

    def local(
        query: Array,
        keys_values: KeyValue,
        texts: tuple[Array, Array | None],
        window: tuple[Array, ...],
        sinks: dict[str, Array],
    ) -> Array:
        segments, prefixes = texts
        own = dataclasses.replace(
            mask,
            segments=segments,
            prefixes=prefixes,
            window=window[0] if window else static,
        )
        if mask.cut is not None:
            own = dataclasses.replace(own, share=jax.lax.axis_index(axes.CONTEXT_AXIS))
            # Only keys and values are gathered; queries and outputs stay sharded.
            if not mask.passed:
                key, value = (_whole(x, count=mask.cut.count) for x in keys_values)
                keys_values = key, value
        return engine(query, keys_values, mask=own, **sinks)

    arguments: Any = (
        *(query, keys_values, (mask.segments, mask.prefixes), traced),
        own_sinks,
    )
    of_heads = PartitionSpec(HEAD_AXIS if shared and devices > 1 else None)
    specs = by_head, by_head, by_row, PartitionSpec(), of_heads
    if AxisType.Explicit in mesh.axis_types:
        arguments = tuple(map(_resharded, arguments, specs))
    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs,
        out_specs=by_head,
        axis_names=set(sizes),
        check_vma=False,
    )
    return split(*arguments)


def _whole(x: Array, *, count: int) -> Array:
    """[B, K, S/c, d] of this device -> [B, K, S, d], columns in order."""
    x = jax.lax.all_gather(x, axes.CONTEXT_AXIS, axis=2, tiled=True)
    return axes.in_order(x, count=count)


def _resharded(tree: Any, spec: PartitionSpec) -> Any:
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, spec), tree)
