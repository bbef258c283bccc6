"""An engine by itself on each device of a mesh: rows and heads of its own.

A loop over blocks, or a kernel, is opaque to the compiler's partitioner, which would
gather what goes in. Attention needs nothing of other rows or heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from rlhf_jax.models import axes
from rlhf_jax.models.attention.cache import KeyValue
from rlhf_jax.models.attention.record import AttentionMask

Array = jax.Array
Engine = Callable[..., Array]  # (query, keys_values, *, mask) -> [B, H, T, head_dim]
HEAD_AXIS = "tensor"  # of a mesh, that shares the heads


def attend_per_device(
    query: Array, keys_values: KeyValue, *, mask: AttentionMask, engine: Engine
) -> Array:
    """engine(query, keys_values, mask=mask), on every device of the mesh that is set.

    Rows are shared by the axes that hold rows as far as these divide them, heads by
    `tensor` where it divides the query heads; fewer key heads than that are repeated.
    Without a mesh, or within `jax.shard_map`, it is the plain call.

    Args:
      query: [B, H, T, head_dim].
      keys_values: [B, K, S, head_dim] each.
      mask: of S columns.
      engine: what each device computes of its rows and heads.

    Returns:
      [B, H, T, head_dim].
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return engine(query, keys_values, mask=mask)
    sizes = dict(mesh.shape)
    heads, kv_heads = query.shape[1], keys_values[0].shape[1]
    devices = sizes.get(HEAD_AXIS, 1)
    shared = heads % devices == 0 and (
        kv_heads % devices == 0 or devices % kv_heads == 0
    )
    if shared and kv_heads % devices:
        key, value = (jnp.repeat(x, devices // kv_heads, axis=1) for x in keys_values)
        keys_values = key, value
    rows = axes.row_axes(sizes, rows=query.shape[0]) or None
    by_head = PartitionSpec(rows, HEAD_AXIS if shared and devices > 1 else None)
    by_row = PartitionSpec(rows)
    static = mask.window if isinstance(mask.window, int) else None
    traced = () if static is mask.window else (mask.window,)

    def local(
        query: Array, keys_values: KeyValue, segments: Array, window: tuple[Array, ...]
    ) -> Array:
        own = dataclasses.replace(
            mask, segments=segments, window=window[0] if window else static
        )
        return engine(query, keys_values, mask=own)

    arguments: Any = query, keys_values, mask.segments, traced
    specs = by_head, by_head, by_row, PartitionSpec()
    if AxisType.Explicit in mesh.axis_types:
        arguments = tuple(map(_resharded, arguments, specs))
    split = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=by_head, check_vma=False
    )
    return split(*arguments)


def _resharded(tree: Any, spec: PartitionSpec) -> Any:
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, spec), tree)
