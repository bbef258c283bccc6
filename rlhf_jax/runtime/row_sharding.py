"""Rows of a batch: which process reads them, on which devices they lie, and back.

    share = row_sharding.row_share(mesh)            each process reads rows of its own
    batch = row_sharding.put_rows(batch, mesh=mesh)     one array over all processes
    rollout = sample(policy, prompts=batch, ...)
    mine = row_sharding.local_rows(rollout)         NumPy's, this process's again
    scores = row_sharding.put_rows(reward(mine), mesh=mesh)

On one process `put_rows` and `local_rows` are of the whole batch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import axes
from rlhf_jax.runtime import sharding

Array = jax.Array
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Share:
    """Which rows of every batch are a process's: part `index` of `count` equal ones."""

    index: int
    count: int


WHOLE = Share(0, 1)


def row_share(mesh: Mesh) -> Share:
    """The rows that the devices of this process hold.

    Processes whose devices differ along `tensor` alone hold the same rows.

    Raises:
      InputError: a process holds more than one part of the rows, or parts overlap.
    """
    count = math.prod(dict(mesh.shape).get(axis, 1) for axis in axes.ROW_AXES)
    where = NamedSharding(mesh, PartitionSpec(axes.ROW_AXES))
    held: dict[int, set[int]] = {}
    for device, (rows,) in where.devices_indices_map((count,)).items():
        held.setdefault(device.process_index, set()).add(rows.start or 0)
    parts = sorted(set(map(frozenset, held.values())), key=min)
    size = count // len(parts)
    if [sorted(part) for part in parts] != [
        list(range(i, i + size)) for i in range(0, count, size)
    ]:
        raise InputError(
            f"mesh: expected {' and '.join(axes.ROW_AXES)} to give every process one "
            f"part of the rows, got {[sorted(part) for part in parts]} of {count}; "
            f"make the size of data x fsdp a multiple of the processes, or divide them"
        )
    mine = held.get(jax.process_index(), parts[0])
    return Share(index=parts.index(frozenset(mine)), count=len(parts))


def row_shardings(batch: Tree, *, mesh: Mesh | None = None) -> Tree:
    """Where a batch is to lie: its rows over the row axes of the mesh.

    Args:
      batch: arrays or shapes [B, ...], all rows of the global batch.
      mesh: None is the one that is set.

    Returns:
      A tree of `NamedSharding`s.

    Raises:
      InputError: the row axes do not divide the rows.
    """
    mesh = sharding.mesh_or_set(mesh)
    return jax.tree.map(lambda leaf: _divided(mesh, rows=leaf.shape[0]), batch)


def put_rows(batch: Tree, *, mesh: Mesh | None = None) -> Tree:
    """A batch with its rows over the row axes of the mesh.

    Args:
      batch: arrays [b, ...] of NumPy's, this process's rows of the global batch
        (`row_share`); or of JAX, all of its rows.
      mesh: None is the one that is set.

    Raises:
      InputError: the row axes do not divide the rows.
    """
    mesh = sharding.mesh_or_set(mesh)
    parts = row_share(mesh).count

    def put(leaf: Any) -> Array:
        if not np.ndim(leaf):
            raise InputError(
                f"batch: expected arrays [b, ...], got the scalar {leaf}; put it there "
                f"by itself"
            )
        rows = leaf.shape[0] * (1 if isinstance(leaf, Array) else parts)
        where = _divided(mesh, rows=rows)
        if isinstance(leaf, Array):
            return jax.device_put(leaf, where)
        shape = (rows, *leaf.shape[1:])
        return jax.make_array_from_process_local_data(where, np.asarray(leaf), shape)

    return jax.tree.map(put, batch)


def local_rows(batch: Any) -> Any:
    """This process's rows of a batch, as NumPy arrays; waits for them.

    Args:
      batch: arrays [B, ...]; with several processes on one mesh, where every one of
        them calls this.

    Returns:
      Arrays [b, ...], all of the rows on one process.
    """

    def read(leaf: Any) -> Any:
        if not isinstance(leaf, Array) or leaf.is_fully_addressable:
            return leaf
        where = _over_rows(_mesh_of(leaf), rows=leaf.shape[0])
        leaf = jax.device_put(leaf, where)
        parts = {shard.index[0].start or 0: shard for shard in leaf.addressable_shards}
        return np.concatenate([np.asarray(parts[at].data) for at in sorted(parts)])

    return jax.device_get(jax.tree.map(read, batch))


def _mesh_of(leaf: Array) -> Mesh:
    held: Any = leaf.sharding  # of several processes: it has a mesh
    return held.mesh


def _divided(mesh: Mesh, *, rows: int) -> NamedSharding:
    sizes = dict(mesh.shape)
    count = math.prod(sizes.get(axis, 1) for axis in axes.ROW_AXES)
    if rows % count:
        raise InputError(
            f"batch: expected rows that the {count} devices of axes "
            f"{' and '.join(axes.ROW_AXES)} divide, got {rows}; change the batch size "
            f"or the mesh"
        )
    return _over_rows(mesh, rows=rows)


def _over_rows(mesh: Mesh, *, rows: int) -> NamedSharding:
    spec = PartitionSpec(axes.row_axes(dict(mesh.shape), rows=rows))
    return NamedSharding(mesh, spec)
