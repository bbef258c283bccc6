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
from typing import Any, NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet


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
    for plane in _messages(space, 1):
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


def _of_module(proto: bytes) -> dict[str, str]:
    return {
        _text(instruction, 1): name
        for module in _messages(proto, 1)
        for computation in _messages(module, 3)
        for instruction in _messages(computation, 2)
        for metadata in _messages(instruction, 7)
        if (name := _text(metadata, 2))
    }


def _messages(message: bytes, number: int) -> list[bytes]:
    return [value for value in _values(message, number) if isinstance(value, bytes)]


def _text(message: bytes, number: int) -> str:
    return next(iter(_messages(message, number)), b"").decode(errors="replace")


def _number(message: bytes, number: int) -> int:
    return next(iter(_values(message, number)), 0)


def _values(message: bytes, number: int) -> list[Any]:
    """The values of a field: integers, or the bytes of texts and messages.

    Raises:
      ValueError: the message is truncated, or is not a protocol buffer.
    """
    try:  # a message without fields of its own keeps all as unknown ones
        fields = UnknownFieldSet(Empty.FromString(message))
    except DecodeError as error:
        raise ValueError(f"expected a whole protocol buffer: {error}") from error
    return [field.data for field in fields if field.field_number == number]
