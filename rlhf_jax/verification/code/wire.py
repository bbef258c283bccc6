"""The messages between generated code and its tests, which copy plain values.

A message is a line of JSON with a table of columns, followed by packed numbers and
bytes. A column holds values in groups of one type. The contents of all containers of a
group are concatenated into one column further down:

    [(1, 2), (3,)]    0: a list of 2 (in 1)    1: tuples of 2 and 1 (in 2)    2: 1 2 3

Most of the work is done by functions that take whole columns. Mutable values are
numbered and written once, so that aliases and cycles survive.

A subclass of a built-in type is read once, by the methods of that type. Objects that
cannot be copied are written as references, by numbers that both sides know. A reader
makes only values of the types in this module, whoever wrote the message.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
from collections import deque, namedtuple
from itertools import chain, count, islice

from rlhf_jax.verification.code import values
from rlhf_jax.verification.code.values import CONTAINERS, MUTABLE

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

LARGEST = 2**24  # bytes of a message
LARGE = 10**4000  # integers of at least this size are written in base 16
# Bound before any generated code runs, which could replace the functions of `json`.
WRITE = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
READ_LINE = json.JSONDecoder().decode
PLAIN = {type(None), bool, int, str}  # types that JSON has
UNMADE = object()


class Unreadable(Exception):
    """The bytes received are not a message that `Writer` writes."""


class Parts(tuple):
    """A case of `Reader.made`, followed by the arguments that make the value."""

    __slots__ = ()


# The group of each type. Values of other types are arrays, objects or become `Parts`.
GROUPS = {kind: kind.__name__ for kind in (*MUTABLE, Parts, tuple, frozenset, complex)}
GROUPS |= {float: "float", bytes: "bytes", **dict.fromkeys(PLAIN, "plain")}
PACKED = {"int": "q", "float": "d"}  # the `struct` format of packed numbers
MAKE: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "frozenset": frozenset,
    "complex": lambda row: complex(*row),
}
ROWS = (list, tuple, frozenset, set, Parts)  # iterating over them gives their content


class Writer:
    """Writes the table of a message."""

    def __init__(self, side: Any, known: Sequence[Any] = ()) -> None:
        """Starts an empty table.

        Args:
          side: the `Link` or `Runner`. `side.reference(value)` returns the parts of a
            reference, or None for a value that is copied; `side.classes` maps names to
            the classes whose objects are copied field by field.
          known: the values of the previous message; a value's number is its index.
        """
        self.side, self.values = side, [*known]
        self.numbers = {
            id(value): number
            for number, value in enumerate(known)
            if values.is_mutable(value, side)
        }
        self.plain: dict[int, tuple[Any, Any]] = {}  # id: (value, its `simple` form)
        self.columns: list[list[Any]] = []
        self.packed = bytearray()  # numbers and bytes, sent after the table

    def table(self, items: list[Any]) -> list[Any]:
        """Returns the table whose first column is `items`.

        Raises:
          ValueError: a value cannot be copied.
        """
        self.columns.append(items)
        return [self.column(column) for column in self.columns]  # `group` appends more

    def column(self, items: list[Any]) -> list[Any]:
        """Returns `[order, *groups]`; order[i] is the group of value i, None if one."""
        kinds = set(map(type, items))
        if kinds == {int}:
            with contextlib.suppress(struct.error):  # an integer exceeds 64 bits
                self.packed += struct.pack(f"<{len(items)}q", *items)
                return [None, ["int", len(items)]]
        if not kinds <= GROUPS.keys() or (int in kinds and _long(items, kinds)):
            items = list(map(self.simple, items))
            kinds = set(map(type, items))
        names = {kind: GROUPS.get(kind, kind) for kind in kinds}
        # Objects first: sets and dict keys further on may need their hashes.
        ordered = sorted({*names.values()}, key=lambda name: isinstance(name, str))
        if len(ordered) < 2:
            return [None, *(self.group(name, items) for name in ordered)]
        groups: dict[Any, list[Any]] = {name: [] for name in ordered}
        places = {kind: ordered.index(name) for kind, name in names.items()}
        for one in items:
            groups[names[type(one)]].append(one)
        order = [places[type(one)] for one in items]
        return [order, *(self.group(*group) for group in groups.items())]

    def group(self, name: Any, items: list[Any]) -> list[Any]:
        """Returns `[name, values or sizes]`, or `[name, which, own, sizes, column]`.

        The latter is for containers: their numbers (None if all are new), maximum
        lengths, array types or class name, sizes, and the column of their contents.

        Args:
          name: a value of `GROUPS`, or a class.
        """
        if name == "plain":
            return [name, items]
        if name == "float":
            self.packed += struct.pack(f"<{len(items)}d", *items)
            return [name, len(items)]
        if name == "bytes":
            self.packed += b"".join(items)
            return [name, list(map(len, items))]
        # An immutable value is numbered within its own column only: it is made after
        # the columns further down, which therefore cannot refer to it.
        mutable = name in CONTAINERS or isinstance(name, type)
        numbers, which, own = self.numbers if mutable else {}, None, None
        fresh = dict(zip(map(id, items), items, strict=True))
        for known in numbers.keys() & fresh.keys():
            del fresh[known]
        numbers.update(zip(fresh, count(len(self.values))))
        if len(fresh) < len(items):
            which = [numbers[id(one)] for one in items]
            items = list(fresh.values())
        self.values += items
        rows: Any = items
        if name == "dict":  # `values.content` of all at once
            rows = [tuple(chain.from_iterable(one.items())) for one in items]
        elif items and type(items[0]) not in ROWS:
            rows = list(map(values.content, items))
        if name == "deque":
            own = [one.maxlen for one in items]
        elif isinstance(name, type):
            arrays = bool(items) and values.is_array(items[0])
            own = [row[:2] for row in rows] if arrays else name.__name__
            name = "array" if arrays else "object"
        self.columns.append(list(chain.from_iterable(rows)))
        return [name, which, own, list(map(len, rows)), len(self.columns) - 1]

    def simple(self, value: Any) -> Any:
        """Returns the value of a type in `GROUPS`, object or array that is written."""
        kind: Any = type(value)
        if kind in GROUPS:
            long = kind is int and _long([value], {int})
            return Parts(("call", "builtins.int", hex(value), 16)) if long else value
        if id(value) not in self.plain:
            self.plain[id(value)] = value, self.parts(value)
        return self.plain[id(value)][1]

    def parts(self, value: Any) -> Any:
        """Computes `simple` for a value whose type is not in `GROUPS`."""
        kind: Any = type(value)
        if kind in values.VIEWS:
            return list(value)
        if (parts := self.side.reference(value)) is not None:
            return Parts(("refer", *parts))
        if isinstance(value, type) and (name := values.name_of(value)):
            return Parts(("class", name))
        if value is ...:
            return Parts(("ellipsis",))
        if name := values.name_of(kind):
            return Parts(("call", name, *values.arguments(value)))
        if values.is_array(value):
            whole = values.is_mutable(value, self.side)
            return value if whole else Parts(("array", *values.array_parts(value)))
        base = values.base_of(kind)
        if base is tuple and (fields := vars(kind).get("_fields")):
            items = values.plain(value, tuple)
            return Parts(("named", kind.__name__, tuple(fields), *items))
        return value if base is None else self.simple(values.plain(value, base))


def _long(items: list[Any], kinds: set[type]) -> bool:
    numbers = items if len(kinds) == 1 else [one for one in items if type(one) is int]
    return max(numbers) >= LARGE or min(numbers) <= -LARGE


class Reader:
    """Makes the values of a table, which need not come from a `Writer`."""

    def __init__(
        self, side: Any, table: Any, packed: bytes, known: Sequence[Any] = ()
    ) -> None:
        """Makes every value of the table; `items` is its first column.

        Args:
          side: the `Link` or `Runner`. `side.known(*parts)` resolves a reference,
            `side.shell(name)` makes an empty object of a class of `side.classes`, and
            `side.tuples` holds the classes of named tuples made so far.
          table, packed: parts of the message.
          known: the values of the previous message; only `change` modifies them.

        Raises:
          Exception: no `Writer` writes such a table.
        """
        self.side, self.values, self.known = side, [*known], len(known)
        self.packed = io.BytesIO(packed)
        begun = [[self.begin(*group) for group in groups] for _, *groups in table]
        self.columns: list[Any] = [None] * len(table)
        self.later: list[Any] = []  # filled last, once their content can be hashed
        for place in reversed(range(len(table))):
            order, *groups = table[place]
            read = list(map(self.fill, begun[place], groups))
            if order is None:
                (items,) = read or [[]]
            else:
                rest = list(map(iter, read))
                items = list(map(next, map(rest.__getitem__, order)))
            self.columns[place] = items
        for value, row in self.later:
            values.refill(value, row)
        self.items = self.columns[0]

    def change(self, numbers: Any, contents: list[Any]) -> None:
        """Replaces the contents of known values by those that a call left."""
        for number, content in zip(numbers, contents, strict=True):
            value = self.values[number]
            if 0 <= number < self.known and values.is_mutable(value, self.side):
                values.refill(value, list(content))

    def begin(self, name: str, *parts: Any) -> Any:
        """Returns a group's values, or the slice of the containers still to fill."""
        if name == "plain":
            (items,) = parts
            if type(items) is list and set(map(type, items)) <= PLAIN:
                return items
            raise Unreadable("no plain values")
        if name in PACKED:
            (size,) = parts
            return struct.unpack(f"<{size:d}{PACKED[name]}", self.packed.read(8 * size))
        if name == "bytes":
            (sizes,) = parts
            return [self.packed.read(size) for size in sizes]
        _, own, sizes, _ = parts
        first = len(self.values)
        if name in MAKE or name == "Parts":
            self.values += [UNMADE] * len(sizes)
        elif name == "deque":
            self.values += [deque(maxlen=most) for most in own]
        elif name == "array":
            self.values += [values.zeros(*one) for one in own]
        elif name == "object":
            self.values += [self.side.shell(own) for _ in sizes]
        else:
            self.values += [CONTAINERS[name]() for _ in sizes]
        return slice(first, len(self.values))

    def fill(self, begun: Any, group: Any) -> Sequence[Any]:
        """Returns the values of a group after filling its containers."""
        if type(begun) is not slice:
            return begun
        name, which, _, sizes, place = group
        flat, self.columns[place] = iter(self.columns[place]), None  # read only once
        rows = [tuple(islice(flat, size)) for size in sizes]
        if make := self.made if name == "Parts" else MAKE.get(name):
            self.values[begun] = map(make, rows)
        elif name in ("list", "object", "array", "deque", "bytearray"):
            for value, row in zip(self.values[begun], rows, strict=True):
                values.refill(value, row)
        else:
            self.later += zip(self.values[begun], rows, strict=True)
        if which is None:
            return self.values[begun]
        chosen = [self.values[number] for number in which]
        if min(which, default=0) < 0 or any(one is UNMADE for one in chosen):
            raise Unreadable("a wrong place")
        return chosen

    def made(self, parts: Any) -> Any:
        """Makes the value of the parts that `Writer.parts` wrote."""
        match parts:
            case "refer", *rest:
                return self.side.known(*rest)
            case ("ellipsis",):
                return ...
            case "class", name:
                return values.named(name)
            case "call", name, *rest:
                return values.named(name)(*rest)
            case "array", kind, shape, items:
                return values.array(kind, shape, items)
            case "named", name, fields, *items:
                if (name, fields) not in self.side.tuples:
                    self.side.tuples[name, fields] = namedtuple(name, fields)
                return self.side.tuples[name, fields](*items)
        raise Unreadable("parts of nothing")


def send(pipe: Any, message: list[Any], packed: bytes | bytearray = b"") -> None:
    """Writes a message and its packed numbers and bytes.

    Raises:
      ValueError: the message exceeds `LARGEST` bytes. OSError: nobody reads the pipe.
    """
    line = WRITE([*message, len(packed)]).encode("utf-8", "surrogatepass") + b"\n"
    if len(line) + len(packed) > LARGEST:
        raise ValueError(f"values are larger than {LARGEST // 2**20} MiB")
    pipe.write(line)
    pipe.write(packed)
    pipe.flush()


def receive(pipe: Any) -> list[Any]:
    """Waits for a message; its last item is the packed bytes. Makes no values yet.

    Raises:
      EOFError: the pipe is closed. Unreadable: the line is not a message.
    """
    line = pipe.readline(LARGEST)
    if not line:
        raise EOFError
    try:
        *message, size = READ_LINE(line.decode("utf-8", "surrogatepass"))
        if type(size) is not int or not 0 <= size <= LARGEST:
            raise ValueError
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise Unreadable("no message") from None
    return [*message, pipe.read(size)]
