"""Chips: their memory and peak rates, from their makers' tables.

A roofline needs the rates of products, of the device's memory, of the links inside a
GPU's node (NVLink) or a TPU's slice, and of the network between nodes or slices. All of
them are peaks, so that times computed from them are lower bounds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax

from rlhf_jax.devices import processes
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError

GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts them: half a chip of TPU7x, a whole chip otherwise."""

    kind: str  # JAX's `device_kind`; its beginning for a TPU
    memory: int  # bytes that programs may take
    reserved: str  # how `memory` follows from the maker's figure
    flops: float  # per second, dense products of bfloat16 accumulated in float32
    bandwidth: float  # of its memory, bytes per second
    links: float  # to the chips of its node or slice, one way, bytes per second
    source: str
    latency: float  # least seconds of an exchange of a few bytes
    # Its share of its host's network, one way, bytes per second; None if no data sheet
    # has it.
    network: float | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether the chip is an NVIDIA GPU."""
        return not self.kind.startswith("TPU")


TPU = "what the compiler of libtpu names as available HBM when it refuses"
GPU = "0.75 of the memory, which JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION is set"
CLOUD = "https://cloud.google.com/tpu/docs/"
# One hop, of which an exchange has several: jax-ml.github.io/scaling-book/sharding.
HOP = 1e-6
# A host's network, bytes per second, and devices: jax-ml.github.io/scaling-book/tpus.
DCN = 25 * GB
HOSTED = {"TPU v5 lite": 8, "TPU v6 lite": 8, "TPU7x": 8}  # else 4
# NCCL's own model of a ring (`baseLatencies` of LL, NCCL 2.28), without hops.
NCCL = 6.6e-6


def _tpu(
    kind: str, gib: float, tflops: float, memory: int, links: int, page: str
) -> Chip:
    """A TPU by its available GiB, TFLOP/s, and GB/s of its memory and its links."""
    rates = (tflops * 1e12, memory * GB, links * GB)
    return Chip(
        kind,
        int(gib * GIB),
        TPU,
        *rates,
        source=CLOUD + page,
        latency=HOP,
        network=DCN / HOSTED.get(kind, 4),
    )


def _gpu(
    kind: str,
    size: int,
    tflops: int,
    memory: int,
    links: int,
    net: int | None,
    source: str,
) -> Chip:
    """A GPU by its bytes, TFLOP/s, and GB/s of its memory, links and network."""
    return Chip(
        kind,
        int(0.75 * size),
        GPU,
        *(tflops * 1e12, memory * GB, links * GB),
        source=f"NVIDIA's data sheets of {source}",
        latency=NCCL,
        network=None if net is None else net * GB,
    )


# TPU links: 1600, 4800 and 3200 Gbit/s for v5e, v5p and v6e; half of the 1200 GB/s both
# ways of TPU7x; six of 50 GB/s for v4. GPU links: half of both ways of NVLink 3, 4, 4
# and 5, or PCIe of 16 lanes on cards, ignoring bridges between two of them. The network
# is 200 Gbit/s for an A100, 800 for a B300 and 400 for the others.
CHIPS: dict[str, Chip] = {
    "v4": _tpu("TPU v4", 30.75, 275, 1200, 300, "v4; links: arXiv:2304.01433, table 4"),
    "v5e": _tpu("TPU v5 lite", 15.75, 197, 819, 200, "v5e"),
    "v5p": _tpu("TPU v5", 95.73, 459, 2765, 600, "v5p"),
    "v6e": _tpu("TPU v6 lite", 31.24, 918, 1600, 400, "v6e"),
    # Each of a chip's two cores is a device, with half of its rates.
    "tpu7x": _tpu("TPU7x", 94.75, 2307 / 2, 7380 // 2, 300, "tpu7x"),
    "a100": _gpu(
        *("NVIDIA A100-SXM4-80GB", 80 * GIB, 312, 2039, 300, 25),
        "A100 80 GB SXM and DGX A100",
    ),
    "a100-40": _gpu(
        *("NVIDIA A100-SXM4-40GB", 42_331_013_120, 312, 1555, 300, 25),
        "A100 40 GB SXM and DGX A100; memory: XLA's a100_sxm_40",
    ),
    "l40s": _gpu(
        *("NVIDIA L40S", 45_589 * 2**20, 362, 864, 32, None),
        "L40S, PCIe 4.0; memory: as CUDA reports it",
    ),
    "h100": _gpu(
        *("NVIDIA H100 80GB HBM3", 80 * GIB, 989, 3350, 450, 50),
        "H100 SXM and DGX H100",
    ),
    "h100-pcie": _gpu(
        *("NVIDIA H100 PCIe", 84_942_979_072, 756, 2000, 64, None),
        "H100 PCIe, PCIe 5.0; memory: XLA's h100_pcie",
    ),
    "h100-nvl": _gpu(
        *("NVIDIA H100 NVL", 94 * GB, 835, 3900, 64, None),
        "H100 NVL, PCIe 5.0",
    ),
    "h200": _gpu(*("NVIDIA H200", 141 * GB, 989, 4800, 450, 50), "H200 and DGX H200"),
    "gh200": _gpu(
        *("NVIDIA GH200 480GB", 96 * GB, 989, 4000, 450, None),
        "GH200 with 96 GB of HBM3",
    ),
    "b200": _gpu(
        *("NVIDIA B200", 180 * GB, 2250, 8000, 900, 50), "DGX B200, an eighth of it"
    ),
    "b300": _gpu(
        *("NVIDIA B300 SXM6 AC", 275_040 * 2**20, 2250, 8000, 900, 100),
        "DGX B300, an eighth of it; memory: as the driver reports it",
    ),
    "gb200": _gpu(
        *("NVIDIA GB200", 186 * GB, 2500, 8000, 900, None),
        "GB200 NVL72, a 72nd of it",
    ),
}
"""Chips by the name that a topology begins with, or that --chip takes."""

NO_COMPILER = {
    "mi300x": "neither libtpu nor NVIDIA's plug-in compiles for it, and JAX's plug-in "
    "for ROCm is none of the compilers that this package is tested with",
}
"""Chips that users ask for and that cannot be planned, with the reason."""


def named(name: str) -> Chip:
    """The chip with a name.

    Raises:
      InputError: the name is unknown (lists all names), or nothing compiles for it.
    """
    if name in NO_COMPILER:
        raise InputError(
            f"chip: expected one that a compiler here describes, got {name!r}: "
            f"{NO_COMPILER[name]}; choose another"
        )
    checks.one_of(chip=name, among=tuple(CHIPS))
    return CHIPS[name]


def of_device(device: Any) -> Chip | None:
    """The chip of a JAX device; None if the table lacks it, as for a CPU."""
    return of_kind(device.device_kind)


def of_kind(kind: str) -> Chip | None:
    """The chip with a `device_kind` of JAX; None if the table lacks it.

    The name of a GPU must be equal: H200 NVL has other rates than the SXM module H200.
    """
    matching = [
        chip
        for chip in CHIPS.values()
        if kind == chip.kind or (not chip.is_gpu and kind.startswith(chip.kind))
    ]
    return max(matching, key=lambda chip: len(chip.kind), default=None)


def per_node(chip: Chip | None) -> int | None:
    """GPUs of a node, or TPUs of a slice, of this run; None: one holds all of them."""
    if chip is None:
        return None
    if chip.is_gpu:
        # A machine may have a process for each of its GPUs.
        machines = processes.machines()
        gpus = Counter(machines[device.process_index] for device in jax.devices())
        return min(gpus.values()) if len(gpus) > 1 else None
    slices = len({getattr(device, "slice_index", 0) for device in jax.devices()})
    return jax.device_count() // slices if slices > 1 else None
