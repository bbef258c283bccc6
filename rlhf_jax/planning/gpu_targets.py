"""Descriptions of GPUs for XLA's compiler, which needs no GPU (extra `plan-cuda`).

    devices("h100:8x8")        8 nodes of 8 GPUs, which NVLink joins inside a node

XLA compiles for a description of a GPU as for one in the machine, including calls of
cuDNN's attention. It then measures no kernels, so that autotuning on the GPU itself may
choose others.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any, NamedTuple

from jax.experimental import topologies

from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import chips

PLUGINS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")
INSTALL = "pip install -c .ci/constraints.txt -e '.[plan-cuda]'"


class _Description(NamedTuple):
    """A GPU's figures, from NVIDIA's data sheets and CUDA's occupancy tables."""

    memory: int  # bytes
    bandwidth: int  # bytes per second
    capability: str
    cores: int  # streaming multiprocessors
    units: int  # float32 units of a multiprocessor
    clock: float  # GHz
    shared: int  # bytes of shared memory of a multiprocessor; a block has 1 KiB less
    cache: int  # bytes of the second-level cache
    threads: int = 2048  # most threads of a multiprocessor


_AMPERE = ("8.0", 108, 64, 1.41, 167936, 41943040)
_HOPPER = ("9.0", 132, 128, 1.98, 233472, 52428800)
_BLACKWELL = ("10.0", 148, 128, 1.965, 233472, 132644864)
# The figures of XLA's own descriptions (`xla/backends/gpu/target_config/specs`); those
# of L40S, H100 NVL and GH200, which it lacks, are from their data sheets.
_DESCRIPTIONS = {  # by the names of `chips.CHIPS`
    "a100": _Description(85100068864, 2039040000000, *_AMPERE),
    "a100-40": _Description(42331013120, 1555200000000, *_AMPERE),
    "l40s": _Description(  # 96 MiB of the cache of its die, AD102, are enabled
        *(47803531264, 864000000000, "8.9"),
        *(142, 128, 2.52, 102400, 100663296, 1536),
    ),
    "h100": _Description(84942979072, 3352320000000, *_HOPPER),
    "h100-pcie": _Description(
        *(84942979072, 2039040000000, "9.0", 114, 128, 1.755, 233472, 52428800),
    ),
    "h100-nvl": _Description(
        *(94000000000, 3900000000000, "9.0", 132, 128, 1.785, 233472, 52428800),
    ),
    "h200": _Description(151397597184, 4800000000000, *_HOPPER),
    "gh200": _Description(96000000000, 4000000000000, *_HOPPER),
    "b200": _Description(191514411008, 7672320000000, *_BLACKWELL),
    "b300": _Description(
        *(297021865984, 7936000000000, "10.3", 158, 128, 1.965, 233472, 135528448),
    ),
    "gb200": _Description(
        *(197897748480, 7928064000000, "10.0", 152, 128, 2.062, 233472, 135528448),
    ),
}


def is_gpu(topology: str) -> bool:
    """Whether a topology, such as h100:8x8, is of GPUs."""
    return topology.partition(":")[0] in _DESCRIPTIONS


def per_node(topology: str) -> int:
    """GPUs of a node: the second number of h100:8x8."""
    return _shape(topology)[1]


def cache(topology: str) -> int:
    """Bytes of the second-level cache of the topology's GPUs."""
    return _DESCRIPTIONS[topology.partition(":")[0]].cache


def compiler() -> str | None:
    """Package and version of the plug-in that compiles for GPUs; None without one."""
    for name in PLUGINS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def devices(topology: str) -> list[Any]:
    """The GPUs of chip:NODESxGPUS, node after node.

    Raises:
      InputError: the topology has another form, or the plug-in that compiles for GPUs
        is missing.
    """
    nodes, gpus = _shape(topology)
    if compiler() is None:
        raise InputError(
            f"topology: expected JAX's plug-in for GPUs, which compiles for "
            f"{topology!r}, got no such package; install the extra 'plan-cuda' "
            f"({INSTALL}); no GPU is needed"
        )
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            target_config=_config(topology.partition(":")[0]),
            topology=f"{nodes}x1x{gpus}",
        )
    except NotImplementedError:  # the plug-in looked for a GPU when JAX started
        raise InputError(
            f"topology: expected a process that compiles for {topology!r}, got one in "
            f"which JAX's plug-in for GPUs has failed for want of a GPU; start it with "
            f"JAX_PLATFORMS=cpu"
        ) from None
    return list(description.devices)


def _shape(topology: str) -> tuple[int, int]:
    shape = re.fullmatch(r"[\w-]+:([1-9]\d*)x([1-9]\d*)", topology)
    if shape is None:
        raise InputError(
            f"topology: expected nodes x GPUs of a node, as h100:8x8 or --chip h100 "
            f"--topology 8x8, got {topology!r}; name both numbers"
        )
    return int(shape[1]), int(shape[2])


def _config(name: str) -> str:
    """The description in the text form of XLA's GpuTargetConfigProto."""
    gpu = _DESCRIPTIONS[name]
    major, minor = gpu.capability.split(".")
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_core_limit: {gpu.threads}
  threads_per_warp: 32
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared - 1024}
  shared_memory_per_core: {gpu.shared} registers_per_core_limit: 65536
  registers_per_block_limit: 65536 core_count: {gpu.cores} fpus_per_core: {gpu.units}
  clock_rate_ghz: {gpu.clock} l2_cache_size: {gpu.cache}
  memory_bandwidth: {gpu.bandwidth} device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{chips.CHIPS[name].kind}"
"""
