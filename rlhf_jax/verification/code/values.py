"""Values as they pass between generated code and what judges it: tagged JSON.

    true, 3, 0.5, "a", null                 as they are
    ["l", 1, 2]  ["t", 1]  ["d", k, v]      list, tuple, dict; and so on, see `encode`
    ["x", "collections.Counter", [...]]     values of the standard library

Reading never runs anything of the sender's: every value is built here, of one of these
types exactly, so that `==` between two of them is Python's own. What is none of them is
left to `own`: a number that stands for an object that stays where it is. Both sides
import this file; it loads little, for a process starts with every program.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Made before there is any code that may replace the functions of `json`.
WRITER, READER = json.JSONEncoder(separators=(",", ":")), json.JSONDecoder()
LARGEST = 2**24  # bytes of a message
DEPTH = 100  # of containers in containers
BIG = 2**53  # whole numbers from here on are written in base 16
PLAIN = frozenset({type(None), bool, str, float})
SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "fs"}
BUILT: dict[str, Callable[[list[Any]], Any]] = {
    "l": list,
    "t": tuple,
    "s": set,
    "fs": frozenset,
}

# Functions that tests may use by the names that the code imported them under.
LIBRARIES = (
    *("math", "cmath", "copy", "itertools", "functools", "collections", "statistics"),
    *("string", "re", "json", "heapq", "bisect", "fractions", "decimal", "datetime"),
    *("random", "typing"),
)
# Arithmetic, by its names in `operator`.
OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("lshift", "rshift", "and_", "or_", "xor", "neg", "pos", "abs", "invert"),
)

# Standard library types: to a plain value, and back.
LIBRARY: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "collections.Counter": (dict, lambda kind, plain: kind(plain)),
    "collections.OrderedDict": (
        lambda value: list(value.items()),
        lambda kind, plain: kind(plain),
    ),
    "collections.defaultdict": (
        lambda value: (_factory(value.default_factory), dict(value)),
        lambda kind, plain: kind(*plain),
    ),
    "collections.deque": (
        lambda value: (list(value), value.maxlen),
        lambda kind, plain: kind(*plain),
    ),
    "array.array": (
        lambda value: (value.typecode, value.tolist()),
        lambda kind, plain: kind(*plain),
    ),
    "fractions.Fraction": (
        lambda value: (value.numerator, value.denominator),
        lambda kind, plain: kind(*plain),
    ),
    "decimal.Decimal": (str, lambda kind, plain: kind(plain)),
    "datetime.datetime": (
        lambda value: value.isoformat(),
        lambda kind, plain: kind.fromisoformat(plain),
    ),
    "datetime.date": (
        lambda value: value.isoformat(),
        lambda kind, plain: kind.fromisoformat(plain),
    ),
    "datetime.time": (
        lambda value: value.isoformat(),
        lambda kind, plain: kind.fromisoformat(plain),
    ),
    "datetime.timedelta": (
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda kind, plain: kind(*plain),
    ),
}
# Types that pass by name. They run nothing but their own constructors.
TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set),
        *(frozenset, range, object, type(None)),
    )
}
ERRORS: dict[str, type[BaseException]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
TYPES |= ERRORS
NAMES = {kind: name for name, kind in TYPES.items()}


class Unreadable(Exception):
    """A message that is not one of these."""


def _factory(factory: Any) -> Any:
    return factory if factory in NAMES else None


def encode(value: Any, own: Callable[[Any], Any], depth: int = 0) -> Any:
    """The value as JSON can hold it.

    Args:
      own: what stands for an object that is none of these types.

    Raises:
      ValueError: containers within containers are more than `DEPTH`.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is int:
        return value if -BIG < value < BIG else ["i", hex(value)]
    if depth > DEPTH:
        raise ValueError(f"a value is nested more than {DEPTH} deep")
    if kind in SEQUENCES:
        return [
            SEQUENCES[kind],
            *[v if type(v) in PLAIN else encode(v, own, depth + 1) for v in value],
        ]
    if kind is dict:
        parts = [part for item in value.items() for part in item]
        return ["d", *[encode(part, own, depth + 1) for part in parts]]
    if kind is bytes or kind is bytearray:
        return ["b" if kind is bytes else "ba", value.hex()]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is range or kind is slice:
        ends = (value.start, value.stop, value.step)
        return ["r" if kind is range else "sl", *[encode(n, own, DEPTH) for n in ends]]
    if value is ...:
        return ["..."]
    if kind is type and value in NAMES:
        return ["n", NAMES[value]]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in LIBRARY and kind is _library(name):
        return ["x", name, encode(LIBRARY[name][0](value), own, depth + 1)]
    return own(value)


def decode(data: Any, known: Callable[[list[Any]], Any]) -> Any:
    """The value that `encode` wrote.

    Args:
      known: what a tag of `own` stands for.

    Raises:
      Unreadable: it is nothing that `encode` writes.
    """
    kind = type(data)
    if kind in PLAIN or kind is int:
        return data
    if kind is not list or not data or type(data[0]) is not str:
        raise Unreadable("not a value")
    tag, *payload = data
    try:
        if tag in BUILT:
            return BUILT[tag]([decode(one, known) for one in payload])
        if tag == "d":
            parts = [decode(one, known) for one in payload]
            return dict(zip(parts[::2], parts[1::2], strict=True))
        if tag == "i":
            return int(payload[0], 16)
        if tag == "b" or tag == "ba":
            read = bytes.fromhex(payload[0])
            return read if tag == "b" else bytearray(read)
        if tag == "c":
            return complex(*payload)
        if tag == "r" or tag == "sl":
            ends = [decode(one, known) for one in payload]
            return range(*ends) if tag == "r" else slice(*ends)
        if tag == "...":
            return ...
        if tag == "n":
            return TYPES[payload[0]]
        if tag == "x":
            back = LIBRARY[payload[0]][1]
            return back(_library(payload[0]), decode(payload[1], known))
    except Unreadable:
        raise
    except Exception as error:
        raise Unreadable(f"{tag}: {type(error).__name__}") from None
    return known(data)


def _library(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


def send(pipe: int, message: Any) -> None:
    """Writes a message, as far as there is one who reads.

    Raises:
      ValueError: it is longer than `LARGEST`.
    """
    text = WRITER.encode(message).encode()
    if len(text) > LARGEST:
        raise ValueError(f"values are larger than {LARGEST // 2**20} MiB")
    rest = memoryview(len(text).to_bytes(4, "big") + text)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def receive(pipe: int) -> Any:
    """Waits for a message; its JSON, as yet unread.

    Raises:
      EOFError: there will be none. Unreadable: it is none.
    """
    size = int.from_bytes(_exactly(pipe, 4), "big")
    if size > LARGEST:
        raise Unreadable("too long")
    text = _exactly(pipe, size)
    try:
        return READER.decode(text.decode())
    except (ValueError, RecursionError):
        raise Unreadable("no JSON") from None


def _exactly(pipe: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(pipe, min(size, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
