"""Places rows and weights on the devices of two processes, and reads them back.

Devices along the rows need not be neighbours of one process.

A program by itself, two of which test_processes.py starts: processes join only once.
"""

import sys

import jax
import numpy as np
import pytest

from rlhf_jax.devices import processes, replicas, row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.placement import PINNED, split
from rlhf_jax.devices.processes import Group
from rlhf_jax.functional.errors import StopError
from rlhf_jax.planning import memory_check


def main(coordinator, process_id):
    Group(coordinator, num_processes=2, process_id=int(process_id)).join()
    devices = jax.devices()
    batch = np.arange(8 * 3).reshape(8, 3)
    crossed = [devices[i] for i in (0, 2, 1, 3)]  # as a torus may lie
    shared = [devices[i] for i in (0, 2, 1, 3)]
    for shape, laid in (
        (MeshShape(data=4), crossed),
        (MeshShape(data=2, fsdp=2), crossed),
        (MeshShape(data=2, tensor=2), shared),
        (MeshShape(tensor=4), devices),
    ):
        mesh = jax.sharding.Mesh(
            np.reshape(laid, [shape.data, shape.fsdp, shape.tensor]),
            ("data", "fsdp", "tensor"),
        )
        share = row_sharding.row_share(mesh)
        mine = batch[share.of(len(batch))]
        placed = row_sharding.put_rows(mine, mesh=mesh)
        for shard in placed.addressable_shards:
            np.testing.assert_array_equal(shard.data, batch[shard.index])
        np.testing.assert_array_equal(row_sharding.local_rows(placed), mine)
        # The first of those that have a row computes for it.
        check_computed(mine, mesh=mesh, once=shape.tensor > 1)
        print(shape, share.blocks, "of", share.count)
        if shape.tensor <= 2:
            check_replicas(mesh)
    first = MeshShape(data=2).make(devices[:2])  # the second process has no rows
    check_computed(batch, mesh=first, once=True)
    check_errors(first)
    check_least()
    check_many_moves()
    check_other_devices()


def check_computed(mine, *, mesh, once):
    """Checks who computes for which rows; `once`: the first process for all of its."""
    own = row_sharding.unshared(mine, mesh=mesh)
    assert len(own) == (0 if once and jax.process_index() else len(mine))
    scores = own[:, 0] + 100.0 * jax.process_index()
    agreed = row_sharding.put_computed(lambda: scores, mesh=mesh)
    expected = mine[:, 0] + (0 if once else 100.0 * jax.process_index())
    np.testing.assert_array_equal(row_sharding.local_rows(agreed), expected)


def check_errors(mesh):
    """Checks that an error of the process that computes ends both."""

    def fails():
        assert not jax.process_index()
        raise StopError("no such score")

    compute = (lambda: np.zeros(0)) if jax.process_index() else fails
    with pytest.raises(StopError, match="no such score"):
        row_sharding.put_computed(compute, mesh=mesh)


def check_least():
    """Checks that --auto counts with the least memory of both, more than 2 GiB."""
    bytes_of = 2**30 * np.array([80, 40])
    memory_check.limit = lambda _: int(bytes_of[jax.process_index()])
    assert memory_check.least_limit() == 40 * 2**30
    memory_check.limit = lambda _: None if jax.process_index() else 2**40
    assert memory_check.least_limit() is None
    assert len(processes.machines()) == 2
    assert len({*processes.machines()}) == 1


def check_many_moves():
    """Checks that many concurrent moves between meshes do not deadlock."""
    meshes = [MeshShape(data=2, fsdp=2).make(), MeshShape(data=2, tensor=2).make()]
    rows = {number: np.ones((2, 8), np.float32) for number in range(8)}
    moved = row_sharding.put_rows(rows, mesh=meshes[0])
    for at in range(80):
        moved = row_sharding.put_rows(moved, mesh=meshes[(at + 1) % 2])
    np.testing.assert_array_equal(row_sharding.local_rows(moved[0])[0], np.ones(8))


def check_other_devices():
    """Moves an array to other devices of both processes, and back."""
    (home, there) = (
        MeshShape(data=2).make(devices) for devices in split(jax.devices(), last=2)
    )
    mine = np.arange(8.0, dtype=np.float32).reshape(4, 2) + 10 * jax.process_index()
    rows = row_sharding.put_rows(mine, mesh=home)
    moved = row_sharding.put_rows(rows, mesh=there)
    assert moved.sharding.device_set == set(there.devices.flat)
    np.testing.assert_array_equal(row_sharding.local_rows(moved), mine)
    back = row_sharding.put_rows(moved, mesh=home)
    np.testing.assert_array_equal(row_sharding.local_rows(back), mine)
    up = np.arange(2 * 8 * 16, dtype=np.float32).reshape(2, 8, 16)
    params = {"layers": {"mlp": {"up": {"kernel": jax.numpy.asarray(up)}}}}
    placed = sharding.place((params, jax.random.key(3)), mesh=home)
    fsdp = MeshShape(fsdp=2).make(there.devices.flat)
    params, key = sharding.place(placed, mesh=fsdp)
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 4, 16)
    np.testing.assert_array_equal(processes.whole(kernel), up)
    assert processes.whole(jax.random.key_data(key)).tolist() == [0, 3]


def check_replicas(mesh):
    """Checks that every replica of this process has all weights, from any placement."""
    up = np.arange(2 * 8 * 16, dtype=np.float32).reshape(2, 8, 16)
    params = {"layers": {"mlp": {"up": {"kernel": up}}}}
    home = sharding.place(jax.tree.map(jax.numpy.asarray, params), mesh=mesh)
    replicas_of_mesh = replicas.of_mesh(mesh)
    placed = replicas.place((home, jax.random.key(3)), replicas=replicas_of_mesh)
    kernel, key = placed[0]["layers"]["mlp"]["up"]["kernel"], placed[1]
    assert kernel.is_fully_addressable
    np.testing.assert_array_equal(np.asarray(kernel), up)
    assert kernel.addressable_shards[0].data.shape == (
        2,
        8,
        16 // replicas_of_mesh.size,
    )
    assert jax.random.key_data(key).tolist() == [0, 3]
    of_mesh = sharding.place(jax.random.key(3), mesh=mesh)  # as a run has its key
    key = replicas.place(of_mesh, replicas=replicas_of_mesh)
    assert jax.random.key_data(key).tolist() == [0, 3]
    on_host = jax.tree.map(  # as a base in host memory
        lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(PINNED)), home
    )
    [leaf] = jax.tree.leaves(replicas.place(on_host, replicas=replicas_of_mesh))
    assert leaf.sharding.memory_kind == PINNED
    np.testing.assert_array_equal(np.asarray(leaf), up)


if __name__ == "__main__":
    main(*sys.argv[1:])
