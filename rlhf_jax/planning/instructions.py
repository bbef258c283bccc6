"""What one line of an optimised program says: sizes, constants, products, groups."""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import numpy as np

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
    nodes: int = 1  # that those devices are in, as many in each

    @property
    def sent(self) -> float:
        """Bytes that a device must send, at the least, and receive."""
        if self.kind == "collective-permute":
            return float(self.size)
        return self._passes * self.size * (self.devices - 1) / self.devices

    @property
    def across(self) -> float:
        """Bytes of `sent` that leave the device's node, at the least.

        A node takes what it lacks once, each of its devices an equal share, and shares
        it out inside. A permutation is bound by those that send to another node.
        """
        if self.nodes == 1:
            return 0.0
        if self.kind == "collective-permute":
            return float(self.size)
        alone = self.devices // self.nodes  # whose data differ within a node
        parts = alone if "all-to-all" in self.kind else 1
        sent = self._passes * self.size * (self.nodes - 1) / self.devices
        return parts * sent

    @property
    def _passes(self) -> int:
        return 2 if self.kind == "all-reduce" else 1


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


def group(rest: str) -> tuple[int, ...]:
    """The devices of the first group; of the forms that an exchange is written in.

    {{0,1},{2,3}}, [2,2]<=[4], [2,2]<=[2,2]T(1,0) or mesh['a'=2,'b'=2] {'b'}. Without
    groups it is no device at all.
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
    # A part of an axis, 'a':(2)4, is 4 of it behind the first 2.
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


def pairs(rest: str) -> list[tuple[int, int]]:
    """(from, to) of a permutation; none of any other exchange."""
    listed = re.search(r"source_target_pairs=\{([\d,{}]*)\}", rest)
    found = [] if listed is None else re.findall(r"\{(\d+),(\d+)\}", listed[1])
    return [(int(source), int(target)) for source, target in found]


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", text))


def _iota(text: str) -> list[int]:
    """The numbers of [2,4]T(1,0): those from 0 on, transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return (ids.transpose(_integers(order)) if order else ids).ravel().tolist()


def attention_flops(line: Line, lines: Computation) -> float:
    """2 · products of cuDNN's attention, of which a causal mask leaves half.

    Two products forward; backward the first of them again, and the gradients of query,
    key, value and shares.
    """
    dims = re.search(
        r'"intermediate_tensor_shape":\s*\{[^}]*?"dimensions":\s*\[([^\]]*)\]',
        line.rest,
    )
    assert dims is not None, line
    products = 5 if "Backward" in line.rest.partition("backend_config")[0] else 2
    head_dim = shape(line, lines, 0)[-1]
    half = 0.5 if re.search(r'"mask_type":\s*"\w*CAUSAL"', line.rest) else 1.0
    return half * products * 2.0 * math.prod(_integers(dims[1])) * head_dim


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
