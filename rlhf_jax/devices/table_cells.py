"""Where the arrays of a role are, in words for the table at the start of a run."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

Params = Any


def cells(params: Params) -> tuple[str, str]:
    """Devices, with their memory, and mesh of arrays, for the table of a run.

    Args:
      params: Arrays of one role, all in one place. Shapes are in none.

    Returns:
      For example ("gpu 0-3", "data=2,fsdp=2") or ("gpu 0, pinned_host", "none").
    """
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    shardings = {array.sharding for array in arrays}
    devices = {device for sharding in shardings for device in sharding.device_set}
    memories = {
        sharding.memory_kind
        for sharding in shardings
        if sharding.memory_kind is not None
    }
    memories -= {"device", *(device.default_memory().kind for device in devices)}
    meshes = [
        sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)
    ]
    mesh = next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)
    shown = ", ".join([_devices_cell(devices), *sorted(memories)])
    return shown, "none" if mesh is None else _mesh_cell(mesh)


def mesh_cells(mesh: Mesh) -> tuple[str, str]:
    """The same for a role that runs on a mesh without parameters of its own."""
    return _devices_cell(set(mesh.devices.flat)), _mesh_cell(mesh)


def _mesh_cell(mesh: Mesh) -> str:
    """The axes of more than one device."""
    sizes = (f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    return ",".join(sizes) or "none"


def _devices_cell(devices: set[Any]) -> str:
    parts = []
    for platform in sorted({device.platform for device in devices}):
        ids = sorted(device.id for device in devices if device.platform == platform)
        whole = len(ids) > 1 and ids == list(range(ids[0], ids[-1] + 1))
        shown = f"{ids[0]}-{ids[-1]}" if whole else ",".join(map(str, ids))
        parts.append(f"{platform} {shown}")
    return ", ".join(parts) or "none"
