"""What the compiler says of a program that never runs, for devices not there too.

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
    """The compiler knows already that a device has too little memory."""


def ask_compilers_alone() -> None:
    """Keeps JAX from looking for a TPU or GPU here; before it is first used.

    What compiles for chips that are not there needs none, and a plug-in that finds no
    GPU would be gone for good.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    jax.config.update("jax_platforms", "cpu")


def target(topology: str | None) -> Any:
    """The device to compile for: this machine's first, or one that is not there.

    Raises:
      InputError: as `slice_of`.
    """
    return jax.devices()[0] if topology is None else slice_of(topology)[0]


def slice_of(topology: str, *, slices: int = 1) -> list[Any]:
    """The devices of slices of TPUs, or of nodes of GPUs, that are not there.

    libtpu lets one process at a time use a TPU, by a lock. Here none is used, so that
    any number of processes may compile at once.

    Args:
      topology: v5e:8x8, as libtpu names it, or h100:8x8, 8 nodes of 8 GPUs.
      slices: of that topology each, joined by a datacenter's network; TPUs alone.

    Raises:
      InputError: no chip is named, the compiler for it is not installed, or it does not
        know the topology.
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
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # read as it is loaded
    try:
        description = topologies.get_topology_desc(
            platform="tpu",
            topology_name=topology,
            num_slices=slices,
            **_of_whole_chips(topology),
        )
    except Exception as error:  # what the plugin raises is its own affair
        raise InputError(
            f"topology: expected a TPU that libtpu knows, as v5e:2x2, got {topology!r} "
            f"({str(error).strip():.300}); choose another, or leave it out"
        ) from error
    return list(description.devices)


def _of_whole_chips(topology: str) -> dict[str, str]:
    """What makes one device of both cores of a v4, as on the machine itself."""
    return {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}


def memory(
    function: Callable[..., Any],
    *args: PyTree,
    device: Any,
    donate: tuple[int, ...] = (),
) -> Any:
    """The compiler's account of a program on one device, in bytes; it never runs.

    Args are those of `program`, stored in any way and not `placed` yet.

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
      donate: which of the arguments are donated.
      keep_unused: arguments that the program does not read count all the same.

    Raises:
      RefusedError: the compiler knows already that the device has too little memory.
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
    """Shapes of the tree with their shardings, `OnHost` leaves in the host's memory."""

    def of(leaf: Any, where: Any) -> Any:
        def put(x: Any, place: Any) -> Any:
            if isinstance(leaf, leaves.OnHost):
                place = place.with_memory_kind("pinned_host")
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return jax.tree.map(put, leaf, where)

    return jax.tree.map(of, tree, shardings, is_leaf=leaves.is_stored)
