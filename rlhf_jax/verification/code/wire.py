"""Plain values as they pass between generated code and its tests: by copy.

A message is a line of JSON. What JSON has as it is stands for itself; any other value
is a node of a table, `[number]`, so that aliases and cycles keep their shape:

    a = [1, a], {2}      [0] of  0: tuple [1] [2]    1: list 1 [1]    2: set 2

A subclass of a built-in type is read once, by the methods of that type. What is no
value is referred to, by numbers that the two sides understand. A reader makes nothing
but what stands here, whoever wrote the message.
"""

from __future__ import annotations

import functools
import gc
import json
from collections import defaultdict, deque, namedtuple

from rlhf_jax.verification.code import values
from rlhf_jax.verification.code.values import CHANGE, CONTAINERS

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

LARGEST = 2**24  # bytes of a message
# Made before there is any code that may replace the functions of `json`.
WRITE = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
READ_LINE = json.JSONDecoder().decode
PLAIN = {type(None), bool, int, float, str}  # what JSON has
LARGE = 2**63  # from here on integers are written in base 16
OWN = ("deque", "defaultdict", "object")  # whose first part is there when it is made
EMPTY = {name: kind for name, kind in CONTAINERS.items() if name not in OWN}
UNMADE = object()


class Unreadable(Exception):
    """A message that is none."""


def uncollected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs it without the garbage collector, which would go through all that it makes.

    Half of the time of a large message, and nothing of one becomes garbage.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args)
        finally:
            if enabled:
                gc.enable()

    return run


class Writer:
    """Writes values as nodes of one table."""

    def __init__(self, side: Any, known: Sequence[Any] = ()) -> None:
        """The table begins behind what the reader knows from the message before.

        Args:
          side: `reference(value)`, the parts by which a value is referred to, or None;
            `classes`, of objects that pass by their fields, by name.
          known: values by their numbers.
        """
        self.side, self.values, self.first = side, [*known], len(known)
        self.numbers = {
            id(value): number
            for number, value in enumerate(known)
            if values.changes(value, side)
        }
        self.nodes: list[Any] = []

    @uncollected
    def write(self, written: Iterable[Any]) -> list[Any]:
        """What stands for each value, with all that it holds in the table.

        Raises:
          ValueError: one is no value.
        """
        parts = self.parts(written)
        while len(self.nodes) < len(self.values) - self.first:
            self.nodes.append(self.node(self.values[self.first + len(self.nodes)]))
        return parts

    def parts(self, written: Iterable[Any]) -> list[Any]:
        """What stands for each value, which is in the table or is yet to come."""
        parts, numbers = [], self.numbers
        for value in written:
            kind = type(value)
            if kind in PLAIN and (kind is not int or -LARGE < value < LARGE):
                parts.append(value)
                continue
            number = numbers.setdefault(id(value), len(self.values))
            if number == len(self.values):
                self.values.append(value)  # which keeps its id
            parts.append([number])
        return parts

    def node(self, value: Any) -> list[Any]:
        """A line of the table: how it is made, and of which parts."""
        kind: Any = type(value)
        if kind in (list, tuple, frozenset):
            return [kind.__name__, *self.parts(value)]
        if kind in CHANGE:
            own = [value.maxlen] if kind is deque else []
            own = [value.default_factory] if kind is defaultdict else own
            return [kind.__name__, *self.parts([*own, *values.content(value)])]
        if kind is bytes:
            return ["bytes", value.decode("latin-1")]
        if kind in values.VIEWS:
            return ["is", *self.parts([list(value)])]
        if (parts := self.side.reference(value)) is not None:
            return ["refer", *self.parts(parts)]
        if isinstance(value, type) and (name := values.name_of(value)):
            return ["class", name]
        if value is ...:
            return ["ellipsis"]
        if name := values.name_of(kind):
            return ["call", name, *self.parts(values.arguments(value))]
        if values.is_array(value):
            return ["array", *self.parts(values.array_parts(value))]
        base = values.base_of(kind)
        if base is tuple and (fields := vars(kind).get("_fields")):
            items = values.plain(value, tuple)
            return ["named", kind.__name__, *self.parts([tuple(fields), *items])]
        if base is not None:
            return ["is", *self.parts([values.plain(value, base)])]
        return ["object", kind.__name__, *self.parts(values.content(value))]


class Reader:
    """Reads a table, whoever wrote it: the values are made here."""

    @uncollected
    def __init__(self, side: Any, nodes: Any, known: Sequence[Any] = ()) -> None:
        """Makes every value of the table.

        Args:
          side: `known(*parts)`, what a reference stands for; `shell(name)`, an object
            of one of its `classes`; `tuples`, named tuples so far.
          nodes: the table, from the number of `known` on.
          known: values by their numbers, which only `change` changes.

        Raises:
          Exception: it is none that `Writer` writes.
        """
        self.side, self.nodes, self.first = side, nodes, len(known)
        self.values = [*known, *[UNMADE] * len(nodes)]
        self.hollow: dict[int, list[Any]] = {}  # parts of containers, by number
        for number, (name, *parts) in enumerate(nodes, self.first):
            if name in EMPTY:
                self.values[number], self.hollow[number] = EMPTY[name](), parts
        # From the last on, as values hold later ones: few are made within another.
        for number in reversed(range(self.first, len(self.values))):
            if self.values[number] is UNMADE:
                self.make(number)
            if number in self.hollow:
                values.refill(self.values[number], self.read(self.hollow[number]))

    def read(self, parts: Any) -> list[Any]:
        """The values that parts stand for."""
        return [p if type(p) in PLAIN else self.value(p) for p in parts]

    def change(self, changed: Any) -> None:
        """Refills what was known before, by [number, *parts] each."""
        for number, *parts in changed:
            value = self.values[number]
            if number < self.first and values.changes(value, self.side):
                values.refill(value, self.read(parts))

    def value(self, part: Any) -> Any:
        """One value."""
        (number,) = part
        if not 0 <= number < len(self.values):
            raise Unreadable("a wrong place")
        if self.values[number] is UNMADE:
            self.make(number)
        return self.values[number]

    def make(self, number: int) -> None:
        """Makes the value of a number, if it is not empty at first."""
        name, *parts = self.nodes[number - self.first]
        if name in OWN:
            (own,) = self.read(parts[:1])
            self.values[number], self.hollow[number] = self.empty(name, own), parts[1:]
        elif name == "tuple":  # as are most
            self.values[number] = tuple(self.read(parts))
        else:
            self.values[number] = self.made(name, self.read(parts))

    def empty(self, name: str, own: Any) -> Any:
        """What is to be filled, when all that it holds is there."""
        if name == "object":
            return self.side.shell(own)
        return deque(maxlen=own) if name == "deque" else defaultdict(own)

    def made(self, name: str, parts: list[Any]) -> Any:
        """A value that does not change."""
        match name, parts:
            case "is", [value]:
                return value
            case "refer", _:
                return self.side.known(*parts)
            case "frozenset", _:
                return frozenset(parts)
            case "bytes", [text]:
                return text.encode("latin-1")
            case "ellipsis", []:
                return ...
            case "class", [name]:
                return values.named(name)
            case "call", [name, *args]:
                return values.named(name)(*args)
            case "array", [kind, shape, items]:
                return values.array(kind, shape, items)
            case "named", [name, fields, *items]:
                if (name, fields) not in self.side.tuples:
                    self.side.tuples[name, fields] = namedtuple(name, fields)
                return self.side.tuples[name, fields](*items)
        raise Unreadable(f"no {name!r:.20} of {len(parts)} parts")


def send(pipe: Any, message: list[Any]) -> None:
    """Writes a message, as far as there is one who reads.

    Raises:
      ValueError: it is longer than `LARGEST`.
    """
    line = WRITE(message).encode("utf-8", "surrogatepass") + b"\n"
    if len(line) > LARGEST:
        raise ValueError(f"values are larger than {LARGEST // 2**20} MiB")
    pipe.write(line)
    pipe.flush()


@uncollected
def receive(pipe: Any) -> list[Any]:
    """Waits for a message, with its values as yet unread.

    Raises:
      EOFError: there will be none. Unreadable: it is none.
    """
    line = pipe.readline(LARGEST)
    if not line:
        raise EOFError
    try:
        message = READ_LINE(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError, MemoryError):
        raise Unreadable("no JSON") from None
    if type(message) is not list:
        raise Unreadable("no message")
    return message
