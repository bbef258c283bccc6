"""Moves arrays between meshes whose devices belong to several processes.

    moved = moving.move(array, NamedSharding(mesh, spec))     every process calls it

`jax.device_put` moves such an array only to the same devices, or (on some platforms) to
as many devices with the same shards. Here a program on all devices of both meshes moves
it:

    device     0     1     2     3          0 and 1 have halves, 2 and 3 need the whole
    has        a     b
    writes     a.    .b    ..    ..         its shard into zeros
    sums       ab    ab    ab    ab         bits, as integers: exact
    takes                  ab    ab         its shard of the sum

While it runs, a device holds the whole array, or one layer of a stack at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.devices import processes

Array = jax.Array
AXIS = "device"
BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}  # by bytes


def move(leaf: Any, where: Any) -> Any:
    """`jax.device_put` to a sharding on devices of all processes; asynchronous.

    All processes must call this in the same order, also those without devices of either
    mesh. An array without a mesh must be equal in all of them.
    """
    if isinstance(leaf, core.Tracer) or jax.process_count() == 1:
        return jax.device_put(leaf, where)
    source: Any = getattr(leaf, "sharding", None)
    if not isinstance(source, NamedSharding):  # of the host: every process has it
        return processes.in_turn(jax.device_put(leaf, where))
    here = jax.process_index()
    everywhere = source.device_set | where.device_set
    if all(device.process_index == here for device in everywhere):
        return jax.device_put(leaf, where)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        # Typed keys have no bits of their own: moves their words and wraps them again.
        words = move(jax.random.key_data(leaf), where)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    if source.device_set == where.device_set:
        return processes.in_turn(jax.device_put(leaf, where))
    on_device = NamedSharding(where.mesh, where.spec)  # host memory comes last
    program = _program(leaf.shape, leaf.dtype, source, on_device)
    moved = program(leaf)
    if where.memory_kind == moved.sharding.memory_kind:
        return moved
    return jax.device_put(moved, where)


def spread(leaf: Any) -> Any:
    """Returns a sharding of an array by which every process has a part of it.

    Orbax reads and writes an array in all processes. If all have a part, this is its
    own sharding; otherwise it is spread over all devices, along its first dimension
    that they divide.
    """
    where = leaf.sharding
    if jax.process_count() == 1 or not isinstance(where, NamedSharding):
        return where
    if len(processes.owners(where)) == jax.process_count():
        return where
    count = jax.device_count()
    divided = [axis for axis, size in enumerate(leaf.shape) if size % count == 0]
    spec = PartitionSpec(*(None,) * divided[0], AXIS) if divided else PartitionSpec()
    return NamedSharding(Mesh(np.array(jax.devices()), (AXIS,)), spec)


@functools.cache
def _program(
    shape: tuple[int, ...], dtype: Any, source: NamedSharding, where: NamedSharding
) -> Any:
    """The program that moves arrays of a shape, compiled once."""
    old, new = (_mesh_of(place) for place in (source, where))
    devices = list(dict.fromkeys((*old.devices.flat, *new.devices.flat)))
    mesh = Mesh(np.array(devices), (AXIS,))
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    starts, writes = _table(source, shape, devices)
    ends, _ = _table(where, shape, devices)
    part, taken = source.shard_shape(shape), where.shard_shape(shape)

    def through(x: Array, start: Array, end: Array, write: Array, shape: Any) -> Array:
        """The new shard of a device, from its old shard."""
        zeros = jnp.zeros(shape, x.dtype)
        own = jax.lax.dynamic_update_slice(zeros, x, list(start))
        whole = jax.lax.psum(jnp.where(write, own, zeros), AXIS)
        sizes = taken[len(taken) - len(shape) :]
        return jax.lax.dynamic_slice(whole, list(end), sizes)

    def of_device(x: Array) -> Array:
        at = jax.lax.axis_index(AXIS)
        start, end, write = (jnp.asarray(of)[at] for of in (starts, ends, writes))
        bits = _to_bits(x[0])
        if len(shape) > 2 and part[0] == shape[0] == taken[0]:
            moved = jax.lax.map(
                lambda layer: through(layer, start[1:], end[1:], write, shape[1:]), bits
            )
        else:
            moved = through(bits, start, end, write, shape)
        return _from_bits(moved, dtype)[None]

    spec = PartitionSpec(AXIS)
    run = jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=spec))
    local = processes.local_devices(mesh)

    def program(leaf: Array) -> Array:
        parts = {shard.device: shard.data for shard in leaf.addressable_shards}
        shards_in = [
            parts[device][None]
            if device in parts
            else jax.device_put(np.zeros((1, *part), dtype), device)
            for device in local
        ]
        # A process without devices of either mesh has no shards to tell the dtype.
        shards = functools.partial(
            jax.make_array_from_single_device_arrays, dtype=dtype
        )
        # Waits here: of the result this process may have no shard to wait for.
        stacked = processes.in_turn(run(shards((len(devices), *part), rows, shards_in)))
        moved = {shard.device: shard.data[0] for shard in stacked.addressable_shards}
        wanted = processes.local_devices(new)
        return shards(shape, where, [moved[device] for device in wanted])

    return program


def _mesh_of(place: NamedSharding) -> Mesh:
    mesh: Any = place.mesh  # a mesh of devices, as arrays are on it
    return mesh


def _table(
    place: NamedSharding, shape: tuple[int, ...], devices: list[Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """i32[N, ndim], start of each device's shard, and bool[N], one True per shard."""
    index = place.devices_indices_map(shape)
    starts = np.zeros((len(devices), len(shape)), np.int32)
    first = np.zeros(len(devices), bool)
    parts = set()
    for at, device in enumerate(devices):
        if device in index:
            start = tuple(one.start or 0 for one in index[device])
            starts[at], first[at] = start, start not in parts
            parts.add(start)
    return starts, first


def _to_bits(x: Array) -> Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, BITS[x.dtype.itemsize])


def _from_bits(bits: Array, dtype: Any) -> Array:
    if dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    return jax.lax.bitcast_convert_type(bits, dtype)
