"""What the compiler says of a program that never runs, for a device not there too.

device = compiled.target("v5e:2x2")
compiled.memory(function, shapes, device=device).temp_size_in_bytes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import leaves

PyTree = Any


def target(topology: str | None) -> Any:
    """The device to compile for: this machine's first, or a TPU's that is not there.

    Raises:
      InputError: libtpu is not installed or does not know the topology.
    """
    if topology is None:
        return jax.devices()[0]
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # what the plugin raises is its own affair
        raise InputError(
            f"topology: expected a TPU that libtpu knows, as v5e:2x2, got {topology!r} "
            f"({error}); install the extra 'plan', or leave it out"
        ) from error
    return found.devices[0]


def memory(
    function: Callable[..., Any],
    *args: PyTree,
    device: Any,
    donate: tuple[int, ...] = (),
) -> Any:
    """The compiler's account of a program, in bytes; it is compiled and never run.

    Args:
      function: of pytrees of arrays, un-jitted.
      args: its arguments, arrays or shapes, stored in any way.
      device: to compile for, from `target`.
      donate: which of the arguments are donated.

    Returns:
      jax's CompiledMemoryStats: `argument_size_in_bytes`, `temp_size_in_bytes`,
      `host_argument_size_in_bytes` and others.

    Raises:
      InputError: the compiler knows already that the device has too little memory.
    """
    program = jax.jit(function, donate_argnums=donate).lower(*placed(args, device))
    try:
        return program.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InputError(
            f"expected a program that {device.device_kind} can hold, got: "
            f"{str(error).splitlines()[0]} Lower the batch, the micro-batch or what is "
            f"stored, or take a larger device"
        ) from error


def placed(tree: PyTree, device: Any) -> PyTree:
    """Shapes of the tree on a device, `OnHost` leaves in the host's memory."""

    def of(leaf: Any) -> Any:
        kind = "pinned_host" if isinstance(leaf, leaves.OnHost) else None
        where = SingleDeviceSharding(device, memory_kind=kind)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), leaf
        )

    return jax.tree.map(of, tree, is_leaf=leaves.is_stored)
