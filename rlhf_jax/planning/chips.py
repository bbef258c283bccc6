"""Chips: what they hold and how fast they are at most, from their makers' tables.

A roofline needs the rates of products, of the device's memory and of the links to other
chips; for GPUs those are two, NVLink inside a node and the network between nodes. They
are peaks, so that what is computed from them is a lower bound.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlhf_jax.functional import checks

GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts them."""

    kind: str  # the `device_kind` that JAX gives it; of a TPU the beginning
    memory: int  # bytes that programs may take
    reserved: str  # what the rest of the maker's figure is, and who says so
    flops: float  # a second, dense products of bfloat16 accumulated in float32
    bandwidth: float  # of its memory, bytes a second
    links: float  # to all other chips (of a GPU: of its node), one way, bytes a second
    source: str
    # A GPU's share of its node's network, one way, bytes a second; None where the links
    # reach every chip.
    network: float | None = None


TPU = "what the compiler of libtpu 0.0.52 names as available HBM when it refuses"
GPU = "0.75 of the memory, which JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION is set"
CLOUD = "https://cloud.google.com/tpu/docs/"


def _tpu(
    kind: str, gib: float, tflops: int, memory: int, links: int, page: str
) -> Chip:
    """A TPU by its available GiB, TFLOP/s, and GB/s of its memory and its links."""
    rates = (tflops * 1e12, memory * GB, links * GB)
    return Chip(kind, int(gib * GIB), TPU, *rates, source=CLOUD + page)


def _gpu(
    kind: str, size: int, tflops: int, memory: int, links: int, net: int, source: str
) -> Chip:
    """A GPU by its bytes, TFLOP/s, and GB/s of its memory, NVLink and network."""
    rates = (tflops * 1e12, memory * GB, links * GB)
    return Chip(kind, int(0.75 * size), GPU, *rates, source=source, network=net * GB)


# Links of a TPU are 1600, 4800 and 3200 Gbit/s. NVLink is 3, 4, 4 and 5, half of what
# it does both ways; the network is 200 Gbit/s of an A100, and 400 of the others.
A100 = "NVIDIA A100 80 GB SXM and DGX A100 data sheets"
H100 = "NVIDIA H100 SXM and DGX H100 data sheets"
H200 = "NVIDIA H200 and DGX H200 data sheets"
B200 = "NVIDIA DGX B200 data sheet, an eighth of it"
CHIPS: dict[str, Chip] = {
    "v5e": _tpu("TPU v5 lite", 15.75, 197, 819, 200, "v5e"),
    "v5p": _tpu("TPU v5", 95.73, 459, 2765, 600, "v5p"),
    "v6e": _tpu("TPU v6 lite", 31.24, 918, 1600, 400, "v6e"),
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 80 * GIB, 312, 2039, 300, 25, A100),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 989, 3350, 450, 50, H100),
    "h200": _gpu("NVIDIA H200", 141 * GB, 989, 4800, 450, 50, H200),
    "b200": _gpu("NVIDIA B200", 180 * GB, 2250, 8000, 900, 50, B200),
}
"""By the name that a topology begins with, or that --chip takes."""


def named(name: str) -> Chip:
    """The chip of that name.

    Raises:
      InputError: there is none; lists what there is.
    """
    checks.one_of(chip=name, among=tuple(CHIPS))
    return CHIPS[name]


def of_device(device: Any) -> Chip | None:
    """The chip that a JAX device is; None where the table has none, as of a CPU."""
    return of_kind(device.device_kind)


def of_kind(kind: str) -> Chip | None:
    """The chip that JAX calls by this `device_kind`; None where the table has none.

    A GPU's name is compared whole: H100 PCIe and H200 NVL have other rates than the SXM
    modules of these names.
    """
    matching = [
        chip
        for chip in CHIPS.values()
        if kind == chip.kind or (chip.network is None and kind.startswith(chip.kind))
    ]
    return max(matching, key=lambda chip: len(chip.kind), default=None)
