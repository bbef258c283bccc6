"""The text of an optimised program as computations of instructions.

    %fusion.3 = bf16[8,128]{1,0:T(8,128)S(1)} fusion(%p.1, %p.2), kind=kLoop, calls=%f
    name        result                        opcode operands     rest

Only the parts that `cost.py` needs are read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")


class Array(NamedTuple):
    """An array of a result."""

    shape: tuple[int, ...]
    size: int  # bytes
    on_chip: bool  # in a small memory of the chip, not in the device's HBM


@dataclasses.dataclass(frozen=True)
class Line:
    """One instruction."""

    name: str
    opcode: str
    result: tuple[Array, ...]
    operands: tuple[str, ...]
    rest: str  # text after the operands
    text: str  # text of the operands
    root: bool  # whether it is the computation's result

    @property
    def written(self) -> int:
        """Bytes of the result in the device's large memory."""
        return sum(leaf.size for leaf in self.result if not leaf.on_chip)

    @property
    def whole(self) -> int:
        """Bytes of the result in any memory of the device."""
        return sum(leaf.size for leaf in self.result)

    @property
    def index(self) -> int:
        """The element that a get-tuple-element takes."""
        match = re.search(r"index=(\d+)", self.rest)
        assert match is not None, self
        return int(match[1])

    @property
    def constant(self) -> int | None:
        """The value of an integer constant; None for other lines."""
        integer = self.opcode == "constant" and re.fullmatch(r"-?\d+", self.text)
        return int(self.text) if integer else None

    def called(self, what: str) -> str:
        """The computation that the line calls as `what`, such as its "body"."""
        match = re.search(rf"{what}=%?([\w.\-]+)", self.rest)
        assert match is not None, self
        return match[1]

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional, which runs one of them."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        if listed is not None:
            return re.findall(r"%([\w.\-]+)", listed[1])
        return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.rest)


Computation = dict[str, Line]


def root(lines: Computation) -> Line:
    """The line whose result is that of the computation."""
    return next(line for line in lines.values() if line.root)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Parses a program into its computations by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry, lines = "", {}
    # A kernel's description may have line breaks; its rows begin with a quote or brace.
    for row in re.sub(r"\n(?=[\"}]{2}|\")", "", text).splitlines():
        header = _HEADER.match(row)
        if header is not None:
            lines = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
            continue
        line = _line(row)
        if line is not None:
            lines[line.name] = line
    return computations, entry


def _line(row: str) -> Line | None:
    named = _NAME.match(row)
    if named is None:
        return None
    end = _closed(row, named.end()) if row[named.end()] == "(" else named.end()
    end = row.index(" ", end)
    result, start = row[named.end() : end], row.index("(", end)
    close = _closed(row, start)
    operands = row[start + 1 : close - 1]
    return Line(
        name=named[2],
        opcode=row[end + 1 : start],
        result=tuple(_arrays(result)),
        operands=tuple(_OPERAND.findall(operands)),
        rest=row[close:],
        text=operands,
        root=named[1] is not None,
    )


def _closed(row: str, start: int) -> int:
    """Index after the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(row)):
        depth += (row[at] == "(") - (row[at] == ")")
        if not depth:
            return at + 1
    return len(row)


def _arrays(result: str) -> Iterator[Array]:
    for kind, dims, layout in _ARRAY.findall(result):
        shape = tuple(int(size.strip("<= ")) for size in dims.split(",") if size)
        digits = re.search(r"\d+", kind)
        bits = BITS.get(kind, int(digits[0]) if digits else 0)
        on_chip = re.search(r"S\([1-46-9]\)", layout) is not None  # 5 is the host's
        yield Array(shape, math.prod(shape) * bits // 8, on_chip)
