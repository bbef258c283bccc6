"""Plain values as they pass between generated code and its tests: by copy.

Messages are pickles that name no class. What they build, `make` makes: values of
built-in and a few library types exactly. A subclass of one is read once, by the methods
of that type; aliases and cycles keep their shape. What is no value is referred to, by
numbers that `runner` and `link` understand.

The judge reads what a hostile process has written by `Strict`, which knows no other
instruction than those of such values, and calls nothing but `make` and `fill`.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

LARGEST = 2**24  # bytes of a message
# Arithmetic, by its names in `operator`.
OPERATORS = "add sub mul matmul truediv floordiv mod pow and_ or_ xor neg pos abs invert"
# How values of a type are read, whatever a subclass has put in place of its methods.
# What is first, a subclass of both is read as.
READ: dict[type, Callable[[Any], Any]] = {
    OrderedDict: OrderedDict.items,
    **dict.fromkeys((Counter, defaultdict, dict), dict.items),
    **{kind: kind.__iter__ for kind in (list, deque, set, bytearray)},
    **{kind: kind.__iter__ for kind in (tuple, frozenset, bytes)},
    **{str: str.__str__, int: int.__int__, float: float.__float__},
    complex: complex.__complex__,
}
CHANGE = tuple(READ)[:8]  # types whose values a call may change
PAIRS = CHANGE[:4]
VIEWS = tuple(type(view) for view in ({}.keys(), {}.values(), {}.items()))
# Types that pass by name, and the text or the parts that library types are read as.
TYPES: dict[str, type] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and (kind in READ or issubclass(kind, BaseException))
} | {kind.__name__: kind for kind in (*CHANGE, bool, range, slice, object, type(None))}
NAMES = {kind: name for name, kind in TYPES.items()}
LIBRARY: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "array.array": lambda value: (value.typecode, value.tolist()),
    "datetime.timedelta": lambda v: (v.days, v.seconds, v.microseconds),
    "datetime.datetime": lambda value: (value.isoformat(),),
    "datetime.date": lambda value: (value.isoformat(),),
    "datetime.time": lambda value: (value.isoformat(),),
}


class Unreadable(Exception):
    """A message that is none."""


class Writer(pickle.Pickler):
    """Writes a message."""

    def __init__(self, side: Any, kept: list[Any] | None = None) -> None:
        """The message begins empty.

        Args:
          side: `reference(value)`, the parts by which a value is referred to, or None.
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
        """How `make` makes it, and what is put into it then.

        Raises:
          ValueError: it is no value.
        """
        if obj is make or obj is fill:
            return NotImplemented  # by their names, the only ones there are
        kind = type(obj)
        if kind is type and obj in NAMES:
            return make, ("type", NAMES[obj])
        if (parts := self.side.reference(obj)) is not None:
            return make, ("ref", *parts)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind in VIEWS:
            return make, ("list", list(obj))
        if kind is range or kind is slice:
            return make, (kind.__name__, obj.start, obj.stop, obj.step)
        if obj is ...:
            return make, ("...",)
        if name in LIBRARY and kind is library(name):
            return make, (name, *LIBRARY[name](obj))
        if (numpy := sys.modules.get("numpy")) and isinstance(obj, numpy.ndarray):
            array = numpy.ndarray.view(obj, numpy.ndarray)
            if array.dtype.hasobject:
                return make, ("objects", array.shape, array.ravel().tolist())
            return make, ("array", _dtype(array.dtype.str).str, array.shape, array.tobytes())
        if numpy and isinstance(obj, numpy.generic) and kind.__module__ == "numpy":
            return make, ("scalar", _dtype(obj.dtype.str).str, obj.tobytes())
        base = base_of(kind)
        if base is None:
            return make, ("T", kind.__name__), vars(obj), None, None, fill
        if base is tuple and (fields := self.side.fields_of_tuple(kind)):
            return make, ("fields", kind.__name__, fields, list(tuple.__iter__(obj)))
        read = READ[base](obj)
        if base in PAIRS:
            first = [obj.default_factory] if base is defaultdict else []
            first = first if not first or first[0] in NAMES else []
            return make, (base.__name__, *first), None, None, iter(read)
        if base is list or base is deque:
            first = [[], obj.maxlen] if base is deque else []
            return make, (base.__name__, *first), None, iter(read)
        plain = list(read) if base in (set, frozenset, tuple) else read
        parts = (plain.real, plain.imag) if base is complex else (plain,)
        return make, (base.__name__, *(parts if base not in (bytes, bytearray) else [list(plain)]))


def make(name: str, *parts: Any, side: Any = None) -> Any:
    """A value that `Writer` has read."""
    if name == "ref":
        return side.known(*parts)
    if name == "type":
        return TYPES[parts[0]]
    if name == "T":
        return side.shell(*parts)
    if name == "...":
        return ...
    if name == "fields":
        kind, fields, items = parts
        return _named(kind, tuple(fields), side)(*items)
    if name in LIBRARY:
        kind = library(name)
        iso = name.startswith("datetime.") and name != "datetime.timedelta"
        return kind.fromisoformat(*parts) if iso else kind(*parts)
    if name in ("array", "scalar"):
        numpy, read = library("numpy.frombuffer"), bytes(parts[-1])
        array = numpy(read, _dtype(parts[0])).copy()
        return array.reshape(parts[1]) if name == "array" else array[0]
    if name == "objects":
        array = library("numpy.empty")(len(parts[1]), "O")
        array[:] = parts[1]
        return array.reshape(parts[0])
    return TYPES[name](*parts)


def passes(value: Any) -> bool:
    """Whether `Writer` reads it by itself."""
    kind = type(value)
    name, numpy = f"{kind.__module__}.{kind.__qualname__}", sys.modules.get("numpy")
    arrays = () if numpy is None else (numpy.ndarray, numpy.generic)
    plain = kind in (range, slice) or kind in VIEWS or value is ... or name in LIBRARY
    return plain or base_of(kind) is not None or isinstance(value, arrays)


def fill(value: Any, fields: dict[str, Any]) -> None:
    """Puts fields into what `make` made of a class of the tests."""
    vars(value).update(fields)


def _named(kind: str, fields: tuple[str, ...], side: Any) -> Any:
    if (kind, fields) not in side.tuples:
        side.tuples[kind, fields] = namedtuple(kind, fields)
    return side.tuples[kind, fields]


def base_of(kind: type) -> Any:
    """The built-in type as which values of a class are read; None if of none."""
    return next((base for base in READ if issubclass(kind, base)), None)


def changes(value: Any, side: Any) -> bool:
    """Whether a call may change it: a container, an array, an object of the tests."""
    kind = type(value)
    numpy = sys.modules.get("numpy")
    array = numpy is not None and kind is numpy.ndarray
    return kind in CHANGE or array or kind in side.classes.values()


def places(memory: dict[int, Any], side: Any) -> list[Any]:
    """What may change of what a message left in the memory of its reader or writer."""
    values = (memory.get(place) for place in range(len(memory)))
    return [value if changes(value, side) else object() for value in values]


def content(value: Any) -> list[Any]:
    """What it holds, in a list."""
    kind = type(value)
    if kind in PAIRS:
        return [part for item in READ[kind](value) for part in item]
    if kind is bytearray:
        return [bytes(value)]
    if kind in CHANGE:
        return list(value)
    if hasattr(value, "__dict__"):
        return [part for item in vars(value).items() for part in item]
    return [value.copy()]  # an array


def refill(value: Any, items: list[Any]) -> None:
    """Makes it hold what `content` said."""
    kind, put = type(value), value
    if kind not in CHANGE and not hasattr(value, "__dict__"):
        if items[0].shape == value.shape and items[0].dtype == value.dtype:
            value[...] = items[0]
        return
    if kind not in CHANGE:
        put = vars(value)
    put.clear()
    if kind in PAIRS or kind not in CHANGE:
        for key, one in zip(items[::2], items[1::2], strict=True):
            put[key] = one
    elif kind is set:
        put.update(items)
    else:
        put.extend(items[0] if kind is bytearray else items)


def send(pipe: int, head: Any, body: io.BytesIO | None) -> None:
    """Writes a message, as far as there is one who reads.

    Raises:
      ValueError: it is longer than `LARGEST`.
    """
    text = pickle.dumps(head, 5) + (body.getvalue() if body is not None else b"")
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
    size = int.from_bytes(_exactly(pipe, 4), "big")
    if size > LARGEST:
        raise Unreadable("too long")
    return io.BytesIO(_exactly(pipe, size))


def _exactly(pipe: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(pipe, min(size, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def library(name: str) -> Any:
    """What a module of the library has under a name."""
    module, _, kind = name.rpartition(".")
    return vars(importlib.import_module(module))[kind]


def _dtype(name: str) -> Any:
    if name[1:2] not in tuple("biufcSUmM"):
        raise ValueError(f"an array of {name} is no plain value")
    return library("numpy.dtype")(name)
