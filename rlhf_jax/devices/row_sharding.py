"""Rows of a batch: which process reads them, and on which devices they are.

    share = row_sharding.row_share(mesh)            each process reads its own rows
    batch = row_sharding.put_rows(batch, mesh=mesh)     one array over all processes
    rollout = sample(policy, prompts=batch, ...)
    mine = row_sharding.local_rows(rollout)         this process's rows, in NumPy
    mine = row_sharding.unshared(mine, mesh=mesh)       each row in one process
    scores = row_sharding.put_computed(lambda: reward(mine), mesh=mesh)

With one process `put_rows` and `local_rows` handle the whole batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.devices import moving, processes, sharding
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import axes

Array = jax.Array
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of a process in every batch: some of `count` equal blocks of rows."""

    blocks: tuple[int, ...]  # ascending, from 0
    count: int

    def of(self, rows: int) -> list[int]:
        """The numbers of these rows in a batch of `rows` rows.

        Raises:
          InputError: the blocks do not divide the rows.
        """
        _check_divided(rows, count=self.count)
        size = rows // self.count
        return [block * size + i for block in self.blocks for i in range(size)]


def _check_divided(rows: int, *, count: int) -> None:
    if rows < 1 or rows % count:
        raise InputError(
            f"expected a batch size that the {count} devices of the axes dcn, data, "
            f"fsdp and expert divide, got {rows}; change it, or the mesh"
        )


WHOLE = Share((0,), 1)


def row_share(mesh: Mesh) -> Share:
    """The share of rows on the devices of this process.

    On a TPU slice its blocks need not be neighbours. Processes whose devices differ
    only along `tensor` have the same rows. A process without devices of the mesh has
    the rows of the first process with some.
    """
    return Share(_own(_blocks(mesh)), _num_blocks(mesh))


def _own(owned: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    return owned.get(jax.process_index(), owned[min(owned)])


def _num_blocks(mesh: Mesh) -> int:
    return math.prod(dict(mesh.shape).get(axis, 1) for axis in axes.ROW_AXES)


def _blocks(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """{process: blocks of rows on its devices}."""
    present = tuple(axis for axis in axes.ROW_AXES if axis in mesh.shape)
    return _starts(NamedSharding(mesh, PartitionSpec(present)), _num_blocks(mesh))


def _starts(where: NamedSharding, rows: int) -> dict[int, tuple[int, ...]]:
    """{process: first row of each shard on its devices}, of an array of one axis."""
    owned: dict[int, set[int]] = {}
    # JAX says it: on a TPU slice the order of devices follows the torus.
    for device, (shard,) in where.devices_indices_map((rows,)).items():
        owned.setdefault(device.process_index, set()).add(shard.start or 0)
    return {process: tuple(sorted(starts)) for process, starts in owned.items()}


def row_shardings(batch: Tree, *, mesh: Mesh | None = None) -> Tree:
    """Shardings of a batch, with its rows over the row axes of the mesh.

    Returns:
      A tree of `NamedSharding`s.

    Raises:
      InputError: the row axes do not divide the rows.
    """
    mesh = sharding.mesh_or_set(mesh)
    return jax.tree.map(lambda leaf: _divided(mesh, rows=leaf.shape[0]), batch)


def put_rows(batch: Tree, *, mesh: Mesh | None = None) -> Tree:
    """Puts a batch on the mesh, with its rows over the row axes.

    Args:
      batch: NumPy arrays [b, ...] with this process's rows of the global batch
        (`row_share`), or JAX arrays with all rows.

    Raises:
      InputError: the row axes do not divide the rows.
    """
    mesh = sharding.mesh_or_set(mesh)
    share = WHOLE
    if jax.process_count() > 1:
        share = row_share(mesh)

    def put(leaf: Any) -> Array:
        if not np.ndim(leaf):
            raise InputError(
                f"batch: expected arrays [b, ...], got the scalar {leaf}; put it there "
                f"by itself"
            )
        if isinstance(leaf, Array):
            # JAX arrays have all rows of the batch, NumPy arrays those of this process.
            where = _divided(mesh, rows=leaf.shape[0])
            return moving.move(leaf, where)
        rows = leaf.shape[0] * share.count // len(share.blocks)
        where, array = _divided(mesh, rows=rows), np.asarray(leaf)
        place = {row: at for at, row in enumerate(share.of(rows))}

        def part(index: Any) -> Any:
            start, stop, _ = index[0].indices(rows)
            return array[place[start] :][: stop - start]

        # Each process provides the rows of its own devices: no host needs all rows.
        shape = (rows, *array.shape[1:])
        return jax.make_array_from_callback(shape, where, part, dtype=array.dtype)

    return jax.tree.map(put, batch)


def own_rows(batch: Tree, *, mesh: Mesh) -> Tree:
    """This process's rows of NumPy arrays [B, ...] with all rows, for `put_rows`.

    Raises:
      InputError: the row axes do not divide the rows.
    """
    if jax.process_count() == 1:
        return batch
    share = row_share(mesh)
    return jax.tree.map(lambda leaf: leaf[share.of(len(leaf))], batch)


def unshared(batch: Tree, *, mesh: Mesh) -> Tree:
    """This process's rows that no earlier process has too, perhaps none.

    So every row is in one process: a reward that costs money is asked once, and need
    not return the same number twice.

    Args:
      batch: NumPy arrays [b, ...], of this process's rows (`local_rows`).
    """
    owned = _blocks(mesh)
    own, mine = _own(owned), _unshared(owned).get(jax.process_index(), [])
    if len(mine) == len(own):
        return batch

    def part(leaf: Any) -> Any:
        blocks = np.split(leaf, len(own))
        return np.concatenate([leaf[:0], *(blocks[own.index(one)] for one in mine)])

    return jax.tree.map(part, batch)


def _unshared(owned: dict[int, tuple[int, ...]]) -> dict[int, list[int]]:
    """{process: blocks of rows that no earlier process has}."""
    left: dict[int, list[int]] = {}
    seen: set[int] = set()
    for process, blocks in sorted(owned.items()):
        left[process] = [block for block in blocks if block not in seen]
        seen |= {*blocks}
    return left


def put_computed(compute: Callable[[], Any], *, mesh: Mesh) -> Any:
    """`put_rows` of arrays that processes compute for `unshared` rows, such as scores.

    Every process calls this.

    Args:
      compute: returns NumPy or JAX arrays [b, ...]. If processes share rows, or one has
        none, its errors are raised in all processes.

    Raises:
      InputError: the row axes do not divide the rows.
    """
    batch: Any = None

    def run() -> None:
        nonlocal batch
        # NumPy arrays, as `put_rows` reads JAX arrays as all rows.
        batch = jax.tree.map(np.asarray, compute())

    owned = _blocks(mesh)
    all_own = len(owned) == jax.process_count()
    if all_own and sum(map(len, owned.values())) == _num_blocks(mesh):
        run()  # for all of its rows: nothing is sent
        return put_rows(batch, mesh=mesh)
    processes.on_each(run)
    computed = _unshared(owned)
    rows = sum(processes.gathered(len(jax.tree.leaves(batch)[0])))
    size = rows // _num_blocks(mesh)
    most = max(map(len, computed.values()))
    places = {
        block: (process, at)
        for process, blocks in computed.items()
        for at, block in enumerate(blocks)
    }

    def of_own(leaf: Any) -> Any:
        padded = np.zeros((most * size, *leaf.shape[1:]), leaf.dtype)
        padded[: len(leaf)] = leaf
        blocks = np.reshape(padded, (most, size, *leaf.shape[1:]))
        of_all = np.asarray(multihost_utils.process_allgather(blocks))
        return np.concatenate([of_all[places[block]] for block in _own(owned)])

    return put_rows(jax.tree.map(of_own, batch), mesh=mesh)


def local_rows(batch: Any) -> Any:
    """This process's rows of a batch, as NumPy arrays; waits for them.

    Args:
      batch: arrays [B, ...]; with several processes on one mesh, every process calls
        this.

    Returns:
      Arrays [b, ...]; with one process all rows.
    """

    def read(leaf: Any) -> Any:
        # One process has all rows, and NumPy arrays are this process's already.
        layout: Any = getattr(leaf, "sharding", None)
        if jax.process_count() == 1 or not isinstance(layout, NamedSharding):
            return leaf
        mesh: Any = layout.mesh  # of devices, as arrays are on it
        where = _over_rows(mesh, rows=leaf.shape[0])
        leaf = jax.device_put(leaf, where)
        # Replicas along `tensor` have equal rows: reads one of them.
        parts = {shard.index[0].start or 0: shard for shard in leaf.addressable_shards}
        mine = None
        if parts:
            mine = np.concatenate([np.asarray(parts[at].data) for at in sorted(parts)])
        owned = _starts(where, leaf.shape[0])
        rows = len(owned[min(owned)]) * where.shard_shape(leaf.shape)[0]
        return processes.Owned(
            mine, processes.owners(mesh), (rows, *leaf.shape[1:]), leaf.dtype
        )

    return jax.device_get(processes.from_owners(jax.tree.map(read, batch)))


def _divided(mesh: Mesh, *, rows: int) -> NamedSharding:
    _check_divided(rows, count=_num_blocks(mesh))
    return _over_rows(mesh, rows=rows)


def _over_rows(mesh: Mesh, *, rows: int) -> NamedSharding:
    spec = PartitionSpec(axes.row_axes(dict(mesh.shape), rows=rows))
    return NamedSharding(mesh, spec)
