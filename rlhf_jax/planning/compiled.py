"""Compiles programs without running them, also for devices that this machine lacks.

device = compiled.target("v5e:2x2")     or "h100:1x8", a node of GPUs
compiled.memory(function, shapes, device=device).temp_size_in_bytes
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import leaves
from rlhf_jax.planning import gpu_targets

PyTree = Any


class RefusedError(InputError):
    """The compiler found that a device has too little memory for a program."""


def ask_compilers_alone() -> None:
    """Keeps JAX from looking for a TPU or GPU here; call it before JAX is first used.

    Compiling for absent chips needs none, and a plug-in that looks for a GPU and finds
    none cannot be used later.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    jax.config.update("jax_platforms", "cpu")


def target(topology: str | None) -> Any:
    """The device to compile for: the first of this machine, or of a topology.

    Raises:
      InputError: as `slice_of`.
    """
    return jax.devices()[0] if topology is None else slice_of(topology)[0]


def slice_of(topology: str, *, slices: int = 1) -> list[Any]:
    """Devices to compile for, of TPU slices or GPU nodes that this machine lacks.

    libtpu's lock lets only one process use a TPU. No TPU is used here, so the lock is
    switched off and any number of processes may compile at once.

    Args:
      topology: v5e:8x8, as libtpu names it, or h100:8x8, 8 nodes of 8 GPUs.
      slices: number of slices of this topology, joined by a data centre network; TPUs
        only.

    Raises:
      InputError: no chip is named, its compiler is not installed, or the compiler does
        not know the topology.
    """
    if ":" not in topology:
        raise InputError(
            f"topology: expected a chip and its shape, as v5e:8x8 or h100:8x8, got "
            f"{topology!r}; name the chip before it, or by --chip"
        )
    if gpu_targets.is_gpu(topology):
        return gpu_targets.devices(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"topology: expected libtpu, which compiles for {topology!r}, got no such "
            f"package; install the extra 'plan', or leave the topology out"
        )
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # read on loading
    # Both cores of a v4 are one device, as on a real v4.
    whole = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, num_slices=slices, **whole
        )
    except Exception as error:  # the plug-in may raise any exception
        raise InputError(
            f"topology: expected a TPU that libtpu knows, as v5e:2x2, got {topology!r} "
            f"({str(error).strip():.300}); choose another, or leave it out"
        ) from error
    return list(description.devices)


def memory(
    function: Callable[..., Any],
    *args: PyTree,
    device: Any,
    donate: tuple[int, ...] = (),
) -> Any:
    """The memory that the compiler plans for a program on one device, in bytes.

    Args are as for `program`, stored in any way and not `placed` yet.

    Returns:
      jax's CompiledMemoryStats: `argument_size_in_bytes`, `temp_size_in_bytes`,
      `host_argument_size_in_bytes` and others.
    """
    where = SingleDeviceSharding(device)
    args = placed(args, jax.tree.map(lambda leaf: where, args))
    return program(function, *args, device=device, donate=donate).memory_analysis()


def program(
    function: Callable[..., Any],
    *args: PyTree,
    device: Any,
    donate: tuple[int, ...] = (),
    keep_unused: bool = False,
) -> Any:
    """The compiled program, for shapes that are `placed` already.

    Args:
      function: of pytrees of arrays, un-jitted.
      device: any of the devices to compile for, from `target`.
      donate: numbers of the arguments that are donated.
      keep_unused: also counts arguments that the program does not read.

    Raises:
      RefusedError: the compiler finds that the device has too little memory.
    """
    jitted = jax.jit(function, donate_argnums=donate, keep_unused=keep_unused)
    try:
        return jitted.lower(*args).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RefusedError(
            f"expected a program that {device.device_kind} can hold, got: "
            f"{str(error).splitlines()[0]} Lower the batch, the micro-batch or what is "
            f"stored, or take a larger device"
        ) from error


def placed(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shapes of the tree with shardings; `OnHost` leaves are in the host's memory."""

    def of(leaf: Any, where: Any) -> Any:
        def put(x: Any, place: Any) -> Any:
            if isinstance(leaf, leaves.OnHost):
                place = place.with_memory_kind("pinned_host")
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return jax.tree.map(put, leaf, where)

    return jax.tree.map(of, tree, shardings, is_leaf=leaves.is_stored)
