"""What one line of an optimised program says: sizes, constants, products, groups."""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

from rlhf_jax.planning.hlo import Computation, Line

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)


class Collective(NamedTuple):
    """One exchange between devices, as often as the program runs it alike."""

    kind: str
    size: int  # of the whole array on one device, bytes
    devices: int  # that take part in it together

    @property
    def sent(self) -> float:
        """Bytes that a device must send, at the least, and receive."""
        if self.kind == "collective-permute":
            return float(self.size)
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.size * (self.devices - 1) / self.devices


def called(line: Line, what: str) -> str:
    """The computation that a line calls as `what`, for instance its "body"."""
    match = re.search(rf"{what}=%?([\w.\-]+)", line.rest)
    assert match is not None, line
    return match[1]


def index(line: Line) -> int:
    """Which element of a tuple a get-tuple-element takes."""
    match = re.search(r"index=(\d+)", line.rest)
    assert match is not None, line
    return int(match[1])


def branches(line: Line) -> list[str]:
    """The computations of which a conditional runs one."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", line.rest)
    if listed is not None:
        return re.findall(r"%([\w.\-]+)", listed[1])
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line.rest)


def whole(line: Line) -> int:
    """Bytes of a line's result, wherever on the device it is."""
    return sum(leaf.size for leaf in line.result)


def constant(line: Line) -> int | None:
    """The integer that a line is; None if it is anything else."""
    integer = line.opcode == "constant" and re.fullmatch(r"-?\d+", line.text)
    return int(line.text) if integer else None


def shape(line: Line, lines: Computation, operand: int) -> tuple[int, ...]:
    """The shape of one of a line's operands."""
    return lines[line.operands[operand]].result[0].shape


def devices(rest: str) -> int:
    """How many take part: {{0,1},{2,3}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {'b'}."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if listed is not None:
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    if counted is not None:
        return int(counted[1])
    meshed = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, [^{]*)? *\{([^}]*)\}", rest
    )
    if meshed is not None:
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", meshed[1])}
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", meshed[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    pairs = re.search(r"source_target_pairs=", rest)
    return 2 if pairs is not None else 1


def convolution_flops(
    line: Line, *, left: tuple[int, ...], right: tuple[int, ...]
) -> float:
    """2 · products of a convolution; padding and the holes of an input cost none."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest)
    assert labels is not None, line
    ins, kernels, outs = labels[1], labels[2], labels[3]
    window = re.search(r"window=\{([^}]*)\}", line.rest)
    settings = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    groups = re.search(r"batch_group_count=(\d+)", line.rest)
    total = 2.0 * left[ins.index("b")] / (int(groups[1]) if groups else 1)
    total *= right[kernels.index("i")] * right[kernels.index("o")]
    spatial = sorted(label for label in outs if label.isdigit())
    for at, label in enumerate(spatial):

        def option(name: str, missing: str, at: int = at) -> list[int]:
            text = settings[name].split("x")[at] if name in settings else missing
            return [int(size) for size in text.split("_")]

        total *= _meetings(
            size_in=left[ins.index(label)],
            size_out=line.result[0].shape[outs.index(label)],
            window=right[kernels.index(label)],
            stride=option("stride", "1")[0],
            before=option("pad", "0_0")[0],
            hole=option("lhs_dilate", "1")[0],
            apart=option("rhs_dilate", "1")[0],
        )
    return total


@functools.cache
def _meetings(
    *,
    size_in: int,
    size_out: int,
    window: int,
    stride: int,
    before: int,
    hole: int,
    apart: int,
) -> int:
    """Pairs of an output and an element of the window that meet an input."""
    last = (size_in - 1) * hole
    places = (
        out * stride + element * apart - before
        for out in range(size_out)
        for element in range(window)
    )
    return sum(0 <= place <= last and place % hole == 0 for place in places)
