"""What one line of an optimised program says: sizes, constants, what it calls."""

from __future__ import annotations

import re

from rlhf_jax.planning.hlo.parsing import Computation, Line


def called(line: Line, what: str) -> str:
    """The computation that a line calls as `what`, for instance its "body"."""
    match = re.search(rf"{what}=%?([\w.\-]+)", line.rest)
    assert match is not None, line
    return match[1]


def root(lines: Computation) -> Line:
    """The line whose result is the computation's."""
    return next(line for line in lines.values() if line.root)


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
