"""Chips: what they hold and how fast they are at most, from their makers' tables.

A roofline needs the rates of products, of the device's memory and of the links to other
chips; for GPUs those are two, NVLink inside a node and the network between nodes. They
are peaks, so that what is computed from them is a lower bound.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlhf_jax.functional.checks import InputError

GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts them."""

    kind: str  # begins the `device_kind` that JAX gives it
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
CHIPS: dict[str, Chip] = {
    "v5e": Chip(
        kind="TPU v5 lite",
        memory=int(15.75 * GIB),
        reserved=TPU,
        flops=197e12,
        bandwidth=819 * GB,
        links=200 * GB,  # 1600 Gbit/s
        source=CLOUD + "v5e",
    ),
    "v5p": Chip(
        kind="TPU v5",
        memory=int(95.73 * GIB),
        reserved=TPU,
        flops=459e12,
        bandwidth=2765 * GB,
        links=600 * GB,  # 4800 Gbit/s
        source=CLOUD + "v5p",
    ),
    "v6e": Chip(
        kind="TPU v6 lite",
        memory=int(31.24 * GIB),
        reserved=TPU,
        flops=918e12,
        bandwidth=1600 * GB,
        links=400 * GB,  # 3200 Gbit/s
        source=CLOUD + "v6e",
    ),
    "a100": Chip(
        kind="NVIDIA A100-SXM4-80GB",
        memory=int(0.75 * 80 * GIB),
        reserved=GPU,
        flops=312e12,
        bandwidth=2039 * GB,
        links=300 * GB,  # NVLink 3, half of 600 GB/s both ways
        source="NVIDIA A100 80 GB SXM and DGX A100 data sheets",
        network=25 * GB,  # 200 Gbit/s
    ),
    "h100": Chip(
        kind="NVIDIA H100",
        memory=int(0.75 * 80 * GIB),
        reserved=GPU,
        flops=989e12,
        bandwidth=3350 * GB,
        links=450 * GB,  # NVLink 4, half of 900 GB/s both ways
        source="NVIDIA H100 SXM and DGX H100 data sheets",
        network=50 * GB,  # 400 Gbit/s
    ),
    "h200": Chip(
        kind="NVIDIA H200",
        memory=int(0.75 * 141 * GB),
        reserved=GPU,
        flops=989e12,
        bandwidth=4800 * GB,
        links=450 * GB,
        source="NVIDIA H200 and DGX H200 data sheets",
        network=50 * GB,
    ),
    "b200": Chip(
        kind="NVIDIA B200",
        memory=int(0.75 * 180 * GB),
        reserved=GPU,
        flops=2250e12,
        bandwidth=8000 * GB,
        links=900 * GB,  # NVLink 5, half of 1800 GB/s both ways
        source="NVIDIA DGX B200 data sheet, an eighth of it",
        network=50 * GB,
    ),
}
"""By the name that a topology begins with, or that --chip takes."""


def named(name: str) -> Chip:
    """The chip of that name.

    Raises:
      InputError: there is none; lists what there is.
    """
    if name not in CHIPS:
        raise InputError(
            f"chip: expected one of {', '.join(CHIPS)}, got {name!r}; name one of "
            f"them, or add a line to planning/chips.py"
        )
    return CHIPS[name]


def of_device(device: Any) -> Chip | None:
    """The chip that a JAX device is; None where the table has none, as of a CPU."""
    return of_kind(device.device_kind)


def of_kind(kind: str) -> Chip | None:
    """The chip that JAX calls by this `device_kind`; None where the table has none."""
    matching = [chip for chip in CHIPS.values() if kind.startswith(chip.kind)]
    return max(matching, key=lambda chip: len(chip.kind), default=None)
