"""Exchanges between devices: collectives, and the groups of devices that take part."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
    *("ragged-all-to-all", "collective-permute"),
)


class Collective(NamedTuple):
    """One exchange between devices; equal ones are counted together."""

    kind: str
    size: int  # bytes of the whole array on one device
    devices: int  # devices of a group that exchange with each other
    nodes: int = 1  # nodes of these devices, with equally many in each

    @property
    def sent(self) -> float:
        """The least bytes that a device must send, and receive."""
        if self.kind == "collective-permute":
            return float(self.size)
        return self._passes * self.size * (self.devices - 1) / self.devices

    @property
    def across(self) -> float:
        """The least bytes of `sent` that leave the device's node.

        A node receives what it lacks once, an equal share on each of its devices, and
        distributes it inside. A permutation is bound by devices that send to another
        node.
        """
        if self.nodes == 1:
            return 0.0
        if self.kind == "collective-permute":
            return float(self.size)
        alone = self.devices // self.nodes  # devices of a node
        parts = alone if "all-to-all" in self.kind else 1
        sent = self._passes * self.size * (self.nodes - 1) / self.devices
        return parts * sent

    @property
    def _passes(self) -> int:
        return 2 if self.kind == "all-reduce" else 1


def group(rest: str) -> tuple[int, ...]:
    """The devices of the first group of a collective; () without groups.

    Reads {{0,1},{2,3}}, [2,2]<=[4], [2,2]<=[2,2]T(1,0) and mesh['a'=2,'b'=2] {'b'}.
    """
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if listed is not None:
        return _integers(listed[1])
    counted = re.search(
        r"replica_groups=\[\d+,(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", rest
    )
    if counted is not None:
        return tuple(_iota(counted[2])[: int(counted[1])])
    meshed = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, ([^{]*))? *\{([^}]*)\}", rest
    )
    if meshed is None:
        return ()
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", meshed[1])}
    order = re.search(r"\[[\d,]+\](?:T\([\d,]+\))?", meshed[2] or "")
    ids = np.arange(math.prod(sizes.values())) if order is None else _iota(order[0])
    # 'a':(2)4 is a part of an axis: its major factor is 2, and the part has size 4.
    parts = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", meshed[3])
    }
    shape, first = [], []
    for name, size in sizes.items():
        before, taken = parts.get(name, (1, 1))
        shape += [before, taken, size // (before * taken)]
        first += [slice(1), slice(taken), slice(1)]
    return tuple(np.reshape(ids, shape)[tuple(first)].ravel().tolist())


def between_slices(rest: str) -> tuple[str, int, int] | None:
    """Kind, devices and slices of a `send` to other slices of TPUs; None if it is none.

    The compiler writes an exchange between slices as one with the runtime of their
    hosts: of equal devices, {1,2}x{0:3}, of pairs, or of listed devices, where 200003
    is device 3 of slice 2.
    """
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', rest)
    if kind is None:
        return None
    if kind[1] == "ONE_TO_ONE":
        return "collective-permute", 2, 2
    name = kind[1].lower().replace("_", "-")
    peers = re.search(r'_xla_megascale_target="\{([\d,]+)\}x', rest)
    if peers is not None:
        slices = len(_integers(peers[1]))
        return name, slices, slices
    listed = re.search(r"_xla_megascale_target=\{\{([\d,]*)\}", rest)
    devices = () if listed is None else _integers(listed[1])
    return name, len(devices), len({device // 100_000 for device in devices})


def pairs(rest: str) -> list[tuple[int, int]]:
    """The (from, to) pairs of a permutation; [] for any other exchange."""
    listed = re.search(r"source_target_pairs=\{([\d,{}]*)\}", rest)
    matches = [] if listed is None else re.findall(r"\{(\d+),(\d+)\}", listed[1])
    return [(int(source), int(target)) for source, target in matches]


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", text))


def _iota(text: str) -> list[int]:
    """The numbers of an iota [2,4]T(1,0): 0 to 7 in this shape, transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return (ids.transpose(_integers(order)) if order else ids).ravel().tolist()
