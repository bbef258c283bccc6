"""Compares the least memory that a run needs with the available memory.

    held throughout        + the largest of     what one program makes for itself:
    parameters, moments,                        the KV cache while sampling,
    reference, reward model                     the gradients while learning

The check runs first and uses only shapes: nothing is compiled or allocated. Activations
and batches are left out, so that a run that fits is never rejected. `memory` has the
full account.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlhf_jax.devices import processes, sharding
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import workload
from rlhf_jax.roles.reference import storage

PyTree = Any
HOST = "the host"
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
MEMINFO = Path("/proc/meminfo")


class Part(NamedTuple):
    """Arrays that stay in memory throughout a run."""

    name: str
    shapes: PyTree
    mesh: Mesh | None  # None is the host's memory


class Passing(NamedTuple):
    """Arrays that a program makes for itself; no two exist at once on a device."""

    name: str
    size: int  # bytes on all devices
    mesh: Mesh
    beside: tuple[Part, ...] = ()  # arrays that exist only during this program
    others: tuple[tuple[str, int], ...] = ()  # (name, bytes) that exist with it


def gradients(name: str, trained: PyTree, *, model: ModelConfig, mesh: Mesh) -> Passing:
    """Gradients of all trained parameters, which exist together before any is applied.

    Each counts in the compute dtype: the compiler may keep gradients in it and convert
    them where they are read.
    """
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    return Passing(name, count * jnp.dtype(model.dtype).itemsize, mesh)


def cache(
    model: ModelConfig,
    *,
    rows: int,
    max_new_tokens: int,
    mesh: Mesh,
    beside: tuple[Part, ...] = (),
) -> Passing:
    """The KV cache of a rollout, without the columns of prompts."""
    columns = min(max_new_tokens, model.max_positions)
    size = workload.cache_bytes(model, rows=rows, columns=columns)
    return Passing("KV cache", size, mesh, beside)


def check(
    resident: Sequence[Part], passing: Callable[[], Sequence[Passing]], *, change: str
) -> None:
    """Rejects a run whose arrays cannot fit on a device or on the host.

    The least bytes that a run needs are compared with the memory of each device and of
    the host. On the CPU all devices share the host's memory. Nothing is compared for a
    host with several processes, or for a device that does not report its memory.

    Args:
      passing: called only if `resident` fits.
      change: what the user can change, a phrase that names options.

    Raises:
      InputError: the run cannot fit on a device of some process, in all of them. The
        message has one line per part.
    """

    def check_own() -> None:
        _compare(_account(resident), change=change)
        for one in passing():
            least = _account([*resident, *one.beside])
            for device in processes.local_devices(one.mesh):
                for name, size in ((one.name, one.size), *one.others):
                    least[_place(device)][name] += size // one.mesh.size
            _compare(least, change=change)

    # Hosts with other roles have other sums.
    processes.on_each(check_own)


def _account(resident: Sequence[Part]) -> dict[Any, Counter[str]]:
    """{device or host: {name: bytes}}."""
    account: dict[Any, Counter[str]] = defaultdict(Counter)
    for name, shapes, mesh in resident:
        if mesh is None:
            account[HOST][name] += storage.nbytes(shapes)
            continue
        size = bytes_per_device(shapes, mesh=mesh)
        for device in processes.local_devices(mesh):
            account[_place(device)][name] += size
    return account


def bytes_per_device(shapes: PyTree, *, mesh: Mesh) -> int:
    """Bytes on each device of a mesh; replicated arrays count in full."""
    placed = jax.tree.leaves(sharding.shardings(shapes, mesh=mesh))
    return sum(
        math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, place in zip(jax.tree.leaves(shapes), placed, strict=True)
    )


def _place(device: Any) -> Any:
    return HOST if device.platform == "cpu" else device


def _compare(least: dict[Any, Counter[str]], *, change: str) -> None:
    for place, parts in least.items():
        available, needed = limit(place), sum(parts.values())
        if available is None or needed <= available:
            continue
        lines = "".join(
            f"\n  {name}: {_mib(size)}" for name, size in parts.items() if size
        )
        raise InputError(
            f"memory of {place}: expected a run that fits into {_mib(available)}, "
            f"got one that takes at least {_mib(needed)}, before activations:{lines}\n"
            f"{change}; `rlhf-jax plan COMMAND` shows the full account, and "
            f"--no-check-memory starts the run anyway"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def least_limit() -> int | None:
    """The least memory of a device of any process, the same in all of them.

    Returns:
      Bytes, in whole MiB; None if a device does not report its memory.
    """
    limits = [limit(device) or 0 for device in jax.local_devices()]
    return 2**20 * min(processes.gathered(min(limits) // 2**20)) or None


def limit(place: Any) -> int | None:
    """Memory of a device or of the host (`HOST`).

    The host's memory is what the kernel reports as available, or the limit of the
    process's control group if that is less, plus free swap space.

    Returns:
      Bytes; None if no limit is known.
    """
    if place != HOST:
        return (place.memory_stats() or {}).get("bytes_limit")
    if jax.process_count() > 1 or not MEMINFO.exists():
        return None
    meminfo = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in MEMINFO.read_text().splitlines()
        if line.startswith(("MemAvailable:", "SwapFree:"))
    }
    if "MemAvailable" not in meminfo:
        return None
    limits = [meminfo["MemAvailable"]]
    for path in CGROUP_LIMITS:
        text = path.read_text().strip() if path.exists() else "max"
        limits += [int(text)] if text.isdecimal() else []
    return min(limits) + meminfo.get("SwapFree", 0)
