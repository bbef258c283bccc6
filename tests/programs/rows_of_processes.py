"""Puts rows on a mesh whose processes do not hold neighbouring ones, and reads them.

A program by itself, two of which test_processes.py starts: processes join only once.
"""

import sys

import jax
import numpy as np

from rlhf_jax.devices import row_sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.processes import Group


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
        # What each computes for itself: the first of those that hold a row counts.
        scores = mine[:, 0] + 100.0 * jax.process_index()
        agreed = row_sharding.put_computed(scores, mesh=mesh)
        both = shape.tensor > 1
        expected = mine[:, 0] + (0 if both else 100.0 * jax.process_index())
        np.testing.assert_array_equal(row_sharding.local_rows(agreed), expected)
        print(shape, share.blocks, "of", share.count)


if __name__ == "__main__":
    main(*sys.argv[1:])
