"""The cost of an optimised program on one device, from its text.

    while 32 x                       FLOPs of products, bytes of the device's memory and
      fusion: product, add           collectives, each times the trips of all loops
      all-gather 180 MB              around it

The compiler's own `cost_analysis` visits the body of a loop once, and has no sizes of
collectives. FLOPs are those of matrix products (2·m·n·k; a TPU writes them as
convolutions). Bytes are what is read and written outside of fusions: only the part of a
slice or an update of a larger array, nothing in a TPU's on-chip memory, and on a GPU no
result that its second-level cache may keep for the next kernel (`near`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from rlhf_jax.models.experts import grouped
from rlhf_jax.planning.hlo import exchanges, parsing, products
from rlhf_jax.planning.hlo.exchanges import Collective
from rlhf_jax.planning.hlo.parsing import Computation, Line

# Operations that move no bytes, or are counted in the computations that they call.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "while", "conditional", "call", "opt-barrier"),
    *("async-start", "async-update", "add-dependency"),
}
FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AsyncCollectiveDone", "Sharding")
SLICES = ("slice", "dynamic-slice", "gather")
UPDATES = ("dynamic-update-slice", "scatter")


@dataclasses.dataclass
class Cost:
    """The cost of one run of a program on one device."""

    flops: float = 0.0
    bytes: float = 0.0  # read from and written to the device's memory
    collectives: Counter[Collective] = dataclasses.field(default_factory=Counter)
    unknown_loops: int = 0  # loops whose trips the text does not say

    @property
    def sent(self) -> float:
        """Bytes that a device sends to others."""
        return sum(one.sent * times for one, times in self.collectives.items())

    @property
    def across(self) -> float:
        """Bytes of `sent` that leave the device's node."""
        return sum(one.across * times for one, times in self.collectives.items())

    @property
    def exchanges(self) -> int:
        """Number of waits for other devices."""
        return sum(self.collectives.values())

    def add(self, other: Cost, *, times: float = 1) -> None:
        """Adds the cost of a part of the program, `times` times."""
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        for one, count in other.collectives.items():
            self.collectives[one] += int(times * count)
        self.unknown_loops += other.unknown_loops


def cost(
    text: str,
    *,
    trips: tuple[int, ...] = (1,),
    named: Mapping[str, float] = MappingProxyType({}),
    per_node: int | None = None,
    near: int = 0,
) -> Cost:
    """The cost of a program.

    Args:
      text: `compiled.as_text()`.
      trips: trips of the loops that do not say how often they run, such as those that
        end when every row has stopped, in their order. If their number differs from
        that of `trips`, each takes the sum of these.
      named: {scope (`jax.named_scope`): mean trips} of further such loops.
      per_node: devices of a node; other links join nodes. None is one node of all
        devices.
      near: bytes of a cache. A result that fits is read from there, so that the bytes
        are a lower bound; arguments and what a loop carries are read from memory.
    """
    computations, entry = parsing.parse(text)
    walker = functools.partial(
        _Walker, computations, named=named, per_node=per_node, near=near
    )
    total = walker(trips=trips).of(entry)
    if total.unknown_loops not in (0, len(trips)):
        trips_per_loop = (sum(trips),) * total.unknown_loops
        total = walker(trips=trips_per_loop).of(entry)
    return total


class _Walker:
    def __init__(
        self,
        computations: dict[str, Computation],
        *,
        trips: tuple[int, ...],
        named: Mapping[str, float],
        per_node: int | None,
        near: int,
    ) -> None:
        self._computations = computations
        self._near = near
        self._named = named
        self._trips = iter(trips)
        self._per_node = per_node
        self._known: dict[str, Cost] = {}

    def of(self, name: str) -> Cost:
        """The cost of a computation that is not a fusion, with all that it calls."""
        if name not in self._known:
            self._known[name] = self._sum(self._computations[name])
        return self._known[name]

    def _called(self, line: Line) -> Computation:
        """The computation of a fusion."""
        return self._computations[line.called("calls")]

    def _sum(self, lines: Computation) -> Cost:
        total, channels = Cost(), set()
        for line in lines.values():
            if line.opcode == "while":
                body, condition = (line.called(what) for what in ("body", "condition"))
                times = self._times(line, lines, body=body, condition=condition)
                if times is None:
                    times = self._of_name(line)
                if times is None:
                    total.unknown_loops += 1
                    times = next(self._trips, 1)
                total.add(self.of(body), times=times)
                total.add(self.of(condition), times=times)
            elif line.opcode == "conditional":
                parts = [self.of(name) for name in line.branches]
                total.add(max(parts, key=lambda part: (part.flops, part.bytes)))
            elif line.opcode in ("call", "async-start"):
                total.add(self.of(line.called("(?:calls|to_apply)")))
            else:
                total.flops += products.flops(line, lines, self._computations)
                total.bytes += self._bytes(line, lines)
                self._exchange(line, lines, total, channels)
        return total

    def _times(
        self, loop: Line, lines: Computation, *, body: str, condition: str
    ) -> int | None:
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
        if known is not None:
            return int(known[1])
        tests = self._computations[condition]
        test = parsing.root(tests)
        while test.opcode == "fusion":  # a fusion of only the comparison
            inner = self._called(test)
            names = [line.name for line in inner.values() if line.opcode == "parameter"]
            outer = dict(zip(names, test.operands, strict=True))
            test = parsing.root(inner)
            swapped = tuple(outer.get(name, name) for name in test.operands)
            test = dataclasses.replace(test, operands=swapped)
            tests = tests | inner
        if test.opcode != "compare" or "direction=LT" not in test.rest:
            return None
        counter, limit = (tests[name] for name in test.operands)
        end = limit.constant
        if end is None or counter.opcode != "get-tuple-element":
            return None
        at = counter.index
        start = lines[lines[loop.operands[0]].operands[at]].constant or 0
        return -(-(end - start) // self._stride(body, at))

    def _of_name(self, loop: Line) -> float | None:
        name = re.search(r'op_name="([^"]*)"', loop.rest)
        own = re.findall(rf"{grouped.TURNS}(\d+)", "" if name is None else name[1])
        if own:  # the innermost: such a loop may contain others
            return float(own[-1])
        scopes = () if name is None else name[1].split("/")
        return next((self._named[part] for part in scopes if part in self._named), None)

    def _stride(self, body: str, at: int) -> int:
        """The step of a loop's counter, more than 1 if the loop was unrolled."""
        lines = self._computations[body]
        root = parsing.root(lines)
        moved = lines[root.operands[at]]
        if moved.opcode == "fusion":
            lines = self._called(moved)
            moved = parsing.root(lines)
        if moved.opcode != "add":
            return 1
        return max(lines[name].constant or 0 for name in moved.operands) or 1

    def _exchange(
        self,
        line: Line,
        lines: Computation,
        total: Cost,
        channels: set[str],
        *,
        piece: bool = False,
    ) -> None:
        """Counts a collective once, even if fusions cut it into pieces."""
        if line.opcode == "fusion":
            inner = self._called(line)
            for part in inner.values():
                self._exchange(part, inner, total, channels, piece=True)
            return
        kind = line.opcode.removesuffix("-start")
        far = exchanges.between_slices(line.rest) if kind == "send" else None
        if far is None and kind not in exchanges.COLLECTIVES:
            return
        channel = re.search(r"channel_id=(\d+)", line.rest)
        if channel is not None:
            # Whole ones count each: all that `shard_map` wrote have one channel.
            if piece and f"{kind} {channel[1]}" in channels:
                return
            channels.add(f"{kind} {channel[1]}")
        operand_bytes = sum(
            leaf.size for name in line.operands for leaf in lines[name].result
        )
        if far is not None:
            kind, devices, nodes = far
        else:
            devices, nodes = self._group(line)
        if kind == "ragged-all-to-all":
            # The operands are the rows to send and the room for received ones. The
            # smaller is an even share (`experts/dispatch.py`).
            operand_bytes = min(lines[x].result[0].size for x in line.operands[:2])
        size = operand_bytes * devices if kind == "all-gather" else operand_bytes
        if devices > 1:
            total.collectives[Collective(kind, size, devices, nodes)] += 1

    def _group(self, line: Line) -> tuple[int, int]:
        """Number of devices of a group, and of the nodes that they belong to."""
        groups = exchanges.pairs(line.rest) or [exchanges.group(line.rest)]
        nodes = 1
        if (size := self._per_node) is not None:
            nodes = max(len({device // size for device in group}) for group in groups)
        return len(groups[0]), max(nodes, 1)

    def _bytes(self, line: Line, lines: Computation) -> float:
        opcode = line.opcode
        if opcode in FREE or opcode.endswith("-done"):
            return 0
        if opcode == "custom-call" and any(name in line.rest for name in FREE_CALLS):
            return 0
        if (load := products.load_of(line)) is not None:
            return products.grouped_bytes(line, lines, load)
        if opcode in ("copy-start", "slice-start"):
            # (to, from, context) of a copy, (from, to, context) of a slice.
            target = line.result[0 if opcode == "copy-start" else 1]
            places = (lines[line.operands[0]].result[0], target)
            return sum(target.size for place in places if not place.on_chip)
        if opcode in SLICES:
            return line.written + self._far(line, lines)
        if opcode in UPDATES:
            update = lines[line.operands[1 if opcode != "scatter" else -1]]
            return 2 * update.written
        if opcode == "fusion":
            return self._fusion_bytes(line, lines)
        read = sum(self._far(lines[name], lines) for name in set(line.operands))
        return read + self._far(line, lines)

    def _far(self, line: Line, lines: Computation) -> int:
        """Bytes of a result in the device's memory; 0 if a cache has it."""
        return 0 if self._is_near(line, lines) else line.written

    def _is_near(self, line: Line, lines: Computation) -> bool:
        if line.written > self._near:
            return False
        if line.opcode in ("bitcast", "get-tuple-element"):
            return self._is_near(lines[line.operands[0]], lines)
        if line.opcode == "fusion":
            inner = self._called(line)
            return not any(part.opcode in UPDATES for part in inner.values())
        return line.opcode not in (*UPDATES, "parameter", "constant", "while", "call")

    def _fusion_bytes(self, line: Line, lines: Computation) -> int:
        inner = self._called(line)
        total = 0
        for part in inner.values():
            if part.opcode == "parameter":
                operand = lines[line.operands[int(part.text)]]
                if far := self._far(operand, lines):
                    total += min(self._read(part, inner), far)
        root = parsing.root(inner)
        parts = [root]
        if root.opcode == "tuple":
            parts = [inner[name] for name in root.operands]
        for part, leaf in zip(parts, line.result, strict=False):
            if not leaf.on_chip and not self._is_near(line, lines):
                total += self._written(part, inner)
        return total

    def _read(self, parameter: Line, inner: Computation) -> int:
        """Bytes of a fusion's argument that it reads."""
        total = 0
        for user in inner.values():
            if parameter.name not in user.operands:
                continue
            if user.opcode == "bitcast":
                total += self._read(user, inner)
            elif user.opcode in SLICES and parameter.name == user.operands[0]:
                total += sum(leaf.size for leaf in user.result)
            elif user.opcode == "dynamic-update-slice":
                if parameter.name != user.operands[0]:
                    total += parameter.whole
            elif user.opcode == "fusion":
                called = self._called(user)
                at = [
                    i for i, name in enumerate(user.operands) if name == parameter.name
                ]
                total += sum(
                    self._read(part, called)
                    for part in called.values()
                    if part.opcode == "parameter" and int(part.text) in at
                )
                if self._origin(user, inner) == self._origin(parameter, inner):
                    total += self._read(user, inner)
            elif not (user.root and user.opcode == "tuple") and (
                user.opcode not in exchanges.COLLECTIVES
            ):  # a fusion does not read what it passes on or sends
                total += parameter.whole
        return min(total, parameter.whole)

    def _origin(self, line: Line, lines: Computation) -> Line:
        """The line that this one is a view of, through bitcasts and fusions of them.

        A TPU's products read their operands through such fusions.
        """
        if line.opcode == "bitcast":
            return self._origin(lines[line.operands[0]], lines)
        if line.opcode == "fusion":
            called = self._called(line)
            root = parsing.root(called)
            origin = self._origin(root, called)
            if origin.opcode == "parameter":
                operand = line.operands[int(origin.text)]
                return self._origin(lines[operand], lines)
        return line

    def _written(self, part: Line, inner: Computation) -> int:
        part = self._origin(part, inner)
        if part.opcode == "parameter" or part.opcode in exchanges.COLLECTIVES:
            return 0
        if part.opcode == "dynamic-update-slice":
            return inner[part.operands[1]].whole
        if part.opcode == "fusion":
            called = self._called(part)
            root = parsing.root(called)
            if root.opcode != "tuple":
                return self._written(root, called)
        return part.whole
