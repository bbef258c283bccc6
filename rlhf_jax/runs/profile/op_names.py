"""The names that programs give to their operations, from a trace's protocol buffers.

`jax.profiler.ProfileData` has the events of a trace, but neither the programs in it nor
the metadata of events. This module reads both by the numbers of their fields in
`xplane.proto` and `hlo.proto`, which never change:

    XSpace.planes 1 ─ XPlane.name 2, .event_metadata 4, .stat_metadata 5
    XEventMetadata.name 2, .stats 5 ─ XStat.metadata_id 1, .str 5, .bytes 6, .ref 7
    HloProto.module 1 ─ .computations 3 ─ .instructions 2 ─ .name 1,
        .metadata.op_name 7.2

The event metadata that holds a program has its name and id: "jit_learn(144)".
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

Value = int | memoryview


class OpNames(NamedTuple):
    """Names that JAX gave to operations: "jit(learn)/jit(main)/loss/dot_general"."""

    of_programs: dict[int, dict[str, str]]  # by program id and operation
    of_modules: dict[str, list[dict[str, str]]]  # by module: its programs
    of_events: dict[str, str]  # by name of the event, for events with such metadata

    def names(
        self,
        *,
        event: str,
        program: int | None = None,
        module: str | None = None,
        operation: str | None = None,
    ) -> set[str]:
        """Returns the names that an event's operation may have, if any is known.

        A program from the compilation cache runs under another id than the one in the
        trace. Then all programs of its module are candidates. Program, module and
        operation are the event's stats `program_id`, `hlo_module` and `hlo_op`.
        """
        programs = self.of_modules.get(module or "", [])
        if program in self.of_programs:
            programs = [self.of_programs[program]]
        known = {program[operation] for program in programs if operation in program}
        if not known and event in self.of_events:
            return {self.of_events[event]}
        return known


def op_names(space: bytes) -> OpNames:
    """Reads the names in a serialised XSpace.

    Raises:
      ValueError: it is truncated.
    """
    of_programs: dict[int, dict[str, str]] = {}
    of_modules: dict[str, list[dict[str, str]]] = defaultdict(list)
    of_events: dict[str, str] = {}
    for plane in _messages(memoryview(space), 1):
        stat_names = {
            _number(entry, 1): _text(metadata, 2)
            for entry in _messages(plane, 5)
            for metadata in _messages(entry, 2)
        }
        for entry in _messages(plane, 4):
            for metadata in _messages(entry, 2):
                for stat in _messages(metadata, 5):
                    kind = stat_names.get(_number(stat, 1), "")
                    program = re.fullmatch(r"(.*)\((\d+)\)", _text(metadata, 2))
                    if kind in ("hlo_proto", "Hlo Proto") and program is not None:
                        for proto in _messages(stat, 6):
                            names = _of_module(proto)
                            of_programs[int(program[2])] = names
                            of_modules[program[1]].append(names)
                    elif kind == "tf_op":
                        text = _text(stat, 5) or stat_names.get(_number(stat, 7), "")
                        of_events[_text(metadata, 2)] = text
    return OpNames(of_programs, dict(of_modules), of_events)


def _of_module(proto: memoryview) -> dict[str, str]:
    names: dict[str, str] = {}
    for module in _messages(proto, 1):
        for computation in _messages(module, 3):
            for instruction in _messages(computation, 2):
                for metadata in _messages(instruction, 7):
                    if name := _text(metadata, 2):
                        names[_text(instruction, 1)] = name
    return names


def _messages(message: memoryview, number: int) -> Iterator[memoryview]:
    for field, value in _fields(message):
        if field == number and not isinstance(value, int):
            yield value


def _text(message: memoryview, number: int) -> str:
    for value in _messages(message, number):
        return bytes(value).decode(errors="replace")
    return ""


def _number(message: memoryview, number: int) -> int:
    for field, value in _fields(message):
        if field == number and isinstance(value, int):
            return value
    return 0


def _fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """(number, value) of every field; fixed-width ones are bytes.

    Raises:
      ValueError: the message is truncated, or is not a protocol buffer.
    """
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                value, at = _varint(message, at)
                yield tag >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(message, at)
            case 5:
                size = 4
            case kind:
                raise ValueError(f"expected a protocol buffer, got wire type {kind}")
        if at + size > end:
            raise ValueError(f"expected {size} bytes at {at}, got {end - at}")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError(f"expected a number at {at}, got the end")
