"""Replicas of a model that run independently, each with its own rows.

    data=2,tensor=2      device 0   half of the weights      rows 0 to 3
                         device 1   the other half
                         device 2   half of the weights      rows 4 to 7
                         device 3   the other half

The devices along `tensor` together hold all weights of a replica. Every process runs
its own replicas, independently of other processes.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from rlhf_jax.devices import processes, sharding
from rlhf_jax.devices.mesh_shape import AXES
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import axes

Array = jax.Array
AXIS, TENSOR = "data", axes.VOCABULARY_AXIS  # of the meshes here


class Replicas(NamedTuple):
    """Meshes with the replicas on `data` and the devices of each on `tensor`."""

    everyone: Mesh  # the replicas of all processes
    own: Mesh  # the replicas of this process, in the same order

    @property
    def size(self) -> int:
        """Number of devices of a replica."""
        return self.own.shape[TENSOR]

    @property
    def num_own(self) -> int:
        """Number of replicas of this process."""
        return self.own.shape[AXIS]

    @property
    def num_of_all(self) -> int:
        """Number of replicas of all processes."""
        return self.everyone.shape[AXIS]


def of_mesh(mesh: Mesh) -> Replicas:
    """Replicas of as many devices as the mesh has along `tensor`.

    With one process these are the devices along this axis. With several, each divides
    its own devices, in their order: on a TPU slice axes follow the torus, not hosts.

    Raises:
      InputError: the replicas do not divide the devices of a process.
    """
    size = dict(mesh.shape).get(TENSOR, 1)
    of_process: dict[int, list[Any]] = {}
    for device in mesh.devices.flat:
        of_process.setdefault(device.process_index, []).append(device)
    for number, devices in of_process.items():
        if len(devices) % size:
            raise InputError(
                f"expected {TENSOR} to divide the {len(devices)} devices of process "
                f"{number}, as each process draws rows of its own, got {size}; make it "
                f"smaller, in --placement.policy or --placement.sampler"
            )

    def made(devices: list[Any]) -> Mesh:
        # Other axes have size 1: a replica shards its weights only along `tensor`.
        shape = {AXIS: -1, TENSOR: size}
        array = np.reshape(np.array(devices), [shape.get(axis, 1) for axis in AXES])
        return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    everyone = [device for _, own in sorted(of_process.items()) for device in own]
    return Replicas(made(everyone), made(processes.local_devices(mesh)))


def place(tree: Any, *, replicas: Replicas) -> Any:
    """Puts parameters into every replica; returns those of this process's replicas.

    A leaf that no rule shards over `tensor`, such as half of every adapter, is on every
    device of a replica, however large it is.

    Args:
      tree: arrays of this process, equal in all processes; or arrays on a mesh of all
        processes. Every process calls this.

    Raises:
      InputError: `tensor` does not divide a dimension sharded over it; names the leaf.
    """
    placed = sharding.place(tree, mesh=replicas.everyone, small=sys.maxsize)
    if replicas.own.size == replicas.everyone.size:
        return placed

    # The same buffers as arrays on this process's mesh: nothing is copied, and programs
    # wait for no other process.
    def of_own(leaf: Array) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = of_own(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        layout: Any = leaf.sharding  # the same in each replica
        parts = {shard.device: shard.data for shard in leaf.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            leaf.shape,
            NamedSharding(replicas.own, layout.spec, memory_kind=layout.memory_kind),
            [parts[device] for device in replicas.own.devices.flat],
        )

    return jax.tree.map(of_own, placed)
