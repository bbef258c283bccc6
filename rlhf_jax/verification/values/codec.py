"""Plain values as they pass between generated code and its tests: by copy.

Messages are pickles of values of built-in and a few library types, exactly. A subclass
of one is read once, by the methods of that type; aliases and cycles keep their shape.
What is no value is referred to, by numbers that the two sides understand. `strict`
reads what a hostile process wrote.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import os
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LARGEST = 2**24  # bytes of a message
# Made before there is any code that may replace the functions of `json`.
WRITER, READER = json.JSONEncoder(), json.JSONDecoder()
# How values of a type are read, whatever a subclass has put in place of its methods.
# What is first, a subclass of both is read as.
READ: dict[type, Callable[[Any], Any]] = {
    OrderedDict: OrderedDict.items,
    **dict.fromkeys((Counter, defaultdict, dict), dict.items),
    **{kind: kind.__iter__ for kind in (list, deque, set, bytearray)},
    **{kind: kind.__iter__ for kind in (tuple, frozenset, bytes)},
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
}
CHANGE = tuple(READ)[:8]  # types whose values a call may change
PAIRS = CHANGE[:4]
PLAIN = (type(None), bool, int, float, str)
VIEWS = tuple(type(view) for view in ({}.keys(), {}.values(), {}.items()))
# Types that pass by name, and whose constructors a message may call.
NAMED: dict[str, type] = {
    f"builtins.{name}": kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and (kind in READ or issubclass(kind, BaseException))
}
NAMED |= {f"builtins.{kind.__name__}": kind for kind in (bool, range, slice, object)}
NAMED |= {f"collections.{kind.__name__}": kind for kind in (*PAIRS[:3], deque)}
NAMES = {kind: name for name, kind in NAMED.items()}
LIBRARY = ("decimal.Decimal", "fractions.Fraction", "datetime.timedelta")
LIBRARY += (
    "array.array",
    "datetime.datetime",
    "datetime.date",
    "datetime.time",
)  # which load late


class Unreadable(Exception):
    """A message that is none."""


class Writer(pickle.Pickler):
    """Writes a message."""

    def __init__(self, side: Any, kept: list[Any] | None = None) -> None:
        """The message begins empty.

        Args:
          side: `reference(value)`, the parts by which a value is referred to, or None;
            `classes`, of objects that are read as their fields, by name.
          kept: values that the reader has from the message before, by their places.
        """
        self.buffer, self.side = io.BytesIO(), side
        super().__init__(self.buffer, 5)
        if kept:
            self.memo = {id(value): (place, value) for place, value in enumerate(kept)}

    def kept(self) -> list[Any]:
        """What of it may change, at the places where a reader has it."""
        return places(dict(self.memo.copy().values()), self.side)

    def reducer_override(self, obj: Any) -> Any:
        """What makes it, and what is put into it then.

        Raises:
          ValueError: it is no value.
        """
        kind, base, view = type(obj), base_of(type(obj)), obj
        if obj is make or obj is fill or (isinstance(obj, type) and by_name(obj)):
            return NotImplemented
        if (parts := self.side.reference(obj)) is not None:
            return make, ("refer", *parts)
        if kind.__name__ == "array" and by_name(kind):
            return kind, (obj.typecode, obj.tolist())
        if obj is ... or by_name(kind):
            return NotImplemented  # as pickle does
        if kind in VIEWS:
            return list, (list(view),)
        numpy = sys.modules.get("numpy")
        if numpy and isinstance(obj, (numpy.ndarray, numpy.generic)):
            array = numpy.ndarray.view(numpy.asarray(obj), numpy.ndarray)
            values = (
                array.ravel().tolist() if array.dtype.hasobject else array.tobytes()
            )
            shape = None if isinstance(obj, numpy.generic) else array.shape
            return make, ("array", _dtype(array.dtype.str).str, shape, values)
        if base is None:
            return make, ("object", kind.__name__), vars(obj), None, None, fill
        read = READ[base](obj)
        if base is tuple and (fields := vars(kind).get("_fields")):
            return make, ("tuple", kind.__name__, tuple(fields), list(read))
        if base in PAIRS:
            return base, (), None, None, iter(read)
        if base is list or base is deque:
            return base, (), None, iter(read)
        if base is complex:
            return base, (read.real, read.imag)
        return base, (
            list(read) if base in (*CHANGE, tuple, frozenset, bytes) else read,
        )


def make(name: str, *parts: Any, side: Any = None) -> Any:
    """A value that `Writer` has read."""
    if name == "refer":
        return side.known(*parts)
    if name == "object":
        return side.shell(*parts)
    if name == "tuple":
        kind, fields, items = parts
        if (kind, fields) not in side.tuples:
            side.tuples[kind, fields] = namedtuple(kind, fields)
        return side.tuples[kind, fields](*items)
    numpy, (kind, shape, values) = importlib.import_module("numpy"), parts
    if type(values) is not bytes:
        array = numpy.empty(len(values), "O")
        array[:] = values
    else:
        array = numpy.frombuffer(values, _dtype(kind)).copy()
    return array[0] if shape is None else array.reshape(shape)


def fill(value: Any, fields: dict[str, Any]) -> None:
    """Puts fields into what `make` made of an object's class."""
    vars(value).update(fields)


def by_name(kind: Any) -> bool:
    """Whether a class passes by its name, and its values as `pickle` has them."""
    if kind in NAMES:
        return True
    return f"{kind.__module__}.{kind.__qualname__}" in LIBRARY


def base_of(kind: type) -> Any:
    """The built-in type as which values of a class are read; None if of none."""
    return next((base for base in READ if issubclass(kind, base)), None)


def passes(value: Any) -> bool:
    """Whether `Writer` reads it by itself."""
    kind, numpy = type(value), sys.modules.get("numpy")
    arrays = () if numpy is None else (numpy.ndarray, numpy.generic)
    plain = by_name(kind) or kind in VIEWS or value is ... or isinstance(value, arrays)
    return plain or base_of(kind) is not None


def changes(value: Any, side: Any) -> bool:
    """Whether a call may change it: a container, an array, an object read by fields."""
    kind, numpy = type(value), sys.modules.get("numpy")
    array = numpy is not None and kind is numpy.ndarray
    return kind in CHANGE or array or kind in side.classes.values()


def places(memory: dict[int, Any], side: Any) -> list[Any]:
    """What may change of what a message left in the memory of its reader or writer."""
    values = (memory.get(place) for place in range(len(memory)))
    return [value if changes(value, side) else object() for value in values]


def content(value: Any) -> list[Any]:
    """What it holds, in a list."""
    kind, pairs = type(value), vars(value) if hasattr(value, "__dict__") else {}
    if kind in CHANGE and kind not in PAIRS:
        return [bytes(value)] if kind is bytearray else list(value)
    if kind in PAIRS or pairs:
        items = READ[kind](value) if kind in PAIRS else pairs.items()
        return [part for item in items for part in item]
    return [] if hasattr(value, "__dict__") else [value.copy()]  # an array


def refill(value: Any, items: list[Any]) -> None:
    """Makes it hold what `content` said."""
    kind, put = type(value), value
    if kind not in CHANGE:
        if not hasattr(value, "__dict__"):
            if (items[0].shape, items[0].dtype) == (value.shape, value.dtype):
                value[...] = items[0]
            return
        put = vars(value)
    put.clear()
    if kind in PAIRS or kind not in CHANGE:
        for key, one in zip(items[::2], items[1::2], strict=True):
            put[key] = one
    elif kind is set:
        put.update(items)
    else:
        put.extend(items[0] if kind is bytearray else items)


def empty(value: Any, side: Any) -> Any:
    """A container to fill with what another holds."""
    if not changes(value, side):
        return value
    if type(value) in CHANGE:
        return type(value)()
    own = type(value) in side.classes.values()
    return object.__new__(type(value)) if own else value.copy()


def change(
    values: list[Any], changed: dict[int, list[Any]], *, before: list[Any], side: Any
) -> None:
    """Refills `values` by their places; those that did not change as they were."""
    places = {n: content(v) for n, v in enumerate(before) if changes(v, side)}
    for place, items in (places | changed).items():
        if changes(values[place], side):
            refill(values[place], items)


def body(side: Any, kept: list[Any], value: Any, changed: dict[int, Any]) -> io.BytesIO:
    """A result and what changed, to send: the commonest results as JSON."""
    small = type(value) is not int or -(2**53) < value < 2**53
    if type(value) in PLAIN and small and not changed:
        return io.BytesIO(WRITER.encode([value, {}]).encode())
    writer = Writer(side, kept)
    writer.dump((value, changed))
    return writer.buffer


def plain_body(file: io.BytesIO) -> list[Any] | None:
    """Such a result; None where it is none.

    Raises:
      Unreadable: it is JSON, and no such result.
    """
    if file.getbuffer()[file.tell() : file.tell() + 1] != b"[":
        return None
    read = head(file)
    pair = type(read) is list and len(read) == 2
    if pair and type(read[0]) in PLAIN and read[1] == {}:
        return read
    raise Unreadable("no result")


def send(pipe: int, head: Any, body: io.BytesIO | None) -> None:
    """Writes a message, a line of JSON and values, as far as there is one who reads.

    Raises:
      ValueError: it is longer than `LARGEST`.
    """
    text = WRITER.encode(head).encode() + b"\n"
    text += b"" if body is None else body.getvalue()
    if len(text) > LARGEST:
        raise ValueError(f"values are larger than {LARGEST // 2**20} MiB")
    rest = memoryview(len(text).to_bytes(4, "big") + text)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def receive(pipe: int) -> io.BytesIO:
    """Waits for a message, as yet unread.

    Raises:
      EOFError: there will be none. Unreadable: it is none.
    """
    read = b""
    while len(read) < 4:
        read += _some(pipe, 4 - len(read))
    size, parts = int.from_bytes(read, "big"), []
    if size > LARGEST:
        raise Unreadable("too long")
    while size:
        parts.append(_some(pipe, size))
        size -= len(parts[-1])
    return io.BytesIO(b"".join(parts))


def head(file: io.BytesIO) -> Any:
    """The line of a message, before its values.

    Raises:
      Unreadable: it is no JSON.
    """
    try:
        return READER.decode(file.readline().decode())
    except (ValueError, RecursionError):
        raise Unreadable("no JSON") from None


def _some(pipe: int, most: int) -> bytes:
    if not (part := os.read(pipe, min(most, 2**20))):
        raise EOFError
    return part


def _dtype(name: str) -> Any:
    if name[1:2] not in tuple("biufcSUmMO"):
        raise ValueError(f"an array of {name} is no plain value")
    return importlib.import_module("numpy").dtype(name)
