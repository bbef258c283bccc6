"""Plain values, which are copied between generated code and its tests.

Values of built-in and a few library types are copied exactly. A value of a subclass is
read once, by the methods of the built-in type. `wire` writes and reads the messages.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import chain

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

# How the values of a type are read, whatever methods a subclass overrides. A subclass
# of several types is read as the first of them.
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
MUTABLE = tuple(READ)[:8]
PAIRS = MUTABLE[:4]
CONTAINERS = {kind.__name__: kind for kind in MUTABLE}
VIEWS = tuple(type(view) for view in ({}.keys(), {}.values(), {}.items()))
# Types that are written by name; those of `LIBRARY` are, too, but imported when needed.
NAMED: dict[str, type] = {
    f"builtins.{name}": kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and (kind in READ or issubclass(kind, BaseException))
}
NAMED |= {f"builtins.{kind.__name__}": kind for kind in (bool, range, slice, object)}
NAMED |= {f"collections.{kind.__name__}": kind for kind in (*PAIRS[:3], deque)}
NAMES = {kind: name for name, kind in NAMED.items()}
LIBRARY = ("decimal.Decimal", "fractions.Fraction", "datetime.timedelta")
LIBRARY += ("datetime.datetime", "datetime.date", "datetime.time", "datetime.timezone")
LIBRARY += ("array.array",)


def name_of(kind: Any) -> str:
    """Returns the name by which a class is written, "" if it is not."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if name in LIBRARY else NAMES.get(kind, "")


def named(name: str) -> Any:
    """Returns the class that is written by a name; KeyError if there is none."""
    if name not in LIBRARY:
        return NAMED[name]
    module, _, last = name.partition(".")
    return vars(importlib.import_module(module))[last]


def arguments(value: Any) -> tuple[Any, ...]:
    """Returns the arguments with which its class, found by name, remakes the value.

    Raises:
      ValueError: the value has a time zone that cannot be copied, such as `ZoneInfo`.
    """
    kind = type(value)
    if kind.__name__ == "array":
        return value.typecode, value.tolist()
    zone = getattr(value, "tzinfo", None) if kind.__module__ == "datetime" else None
    if zone is not None and not name_of(type(zone)):
        other = type(zone).__name__
        raise ValueError(f"a {kind.__name__} with a {other} cannot be copied")
    # Protocol 4 keeps the `fold` of a time.
    return () if kind is object else value.__reduce_ex__(4)[1]


def base_of(kind: type) -> Any:
    """Returns the built-in type as which a class is read; None if there is none."""
    return next((base for base in READ if issubclass(kind, base)), None)


def plain(value: Any, base: Any) -> Any:
    """Copies a value of a subclass into its built-in type."""
    if base in MUTABLE:
        made = base()
        refill(made, content(value, base))
        return made
    made = READ[base](value)
    return base(made) if base in (tuple, frozenset, bytes) else made


def is_plain(value: Any) -> bool:
    """Whether `wire.Writer` copies the value without help of its `side`."""
    kind = type(value)
    known = name_of(kind) or kind in VIEWS or value is ... or is_array(value)
    return bool(known) or base_of(kind) is not None


def is_mutable(value: Any, side: Any) -> bool:
    """Whether the value is mutable: a container, an array, a copied object."""
    kind = type(value)
    if kind is list or kind in MUTABLE or kind in side.classes.values():
        return True
    return is_array(value) and kind is importlib.import_module("numpy").ndarray


def content(value: Any, kind: Any = None) -> list[Any]:
    """Returns the content of a value as a flat list; keys and values alternate.

    Args:
      kind: the type that it is read as; None is its own.
    """
    kind = kind or type(value)
    if kind is list:  # the most frequent type
        return list.copy(value)
    if kind is dict:
        return list(chain.from_iterable(dict.items(value)))
    if kind is complex:
        return [value.real, value.imag]
    if kind is bytearray:
        return [bytes(bytearray.__iter__(value))]
    if is_array(value):
        return array_parts(value)
    if kind in MUTABLE and kind not in PAIRS:
        return list(READ[kind](value))
    pairs = READ[kind](value) if kind in PAIRS else vars(value).items()
    own = [value.default_factory] if kind is defaultdict else []
    return [*own, *chain.from_iterable(pairs)]


def refill(value: Any, items: Sequence[Any]) -> None:
    """Replaces the content of a value by a list that `content` returned."""
    kind = type(value)
    if kind is list:  # the most frequent type
        value[:] = items
    elif kind is dict:
        value.clear()
        value.update(zip(items[::2], items[1::2], strict=True))
    elif kind is set:
        value.clear()
        value.update(items)
    elif kind in MUTABLE and kind not in PAIRS:
        value.clear()
        value.extend(items[0] if kind is bytearray else items)
    elif kind not in MUTABLE and is_array(value):
        made = array(*items)
        if (made.shape, made.dtype) == (value.shape, value.dtype):
            value[...] = made
    else:
        into = value if kind in MUTABLE else vars(value)
        into.clear()
        if kind is defaultdict:
            factory, *items = items
            # The constructor rejects what is not callable.
            value.default_factory = defaultdict(factory).default_factory
        put = OrderedDict.update if kind is OrderedDict else dict.update
        put(into, zip(items[::2], items[1::2], strict=True))


def copies(values: list[Any], side: Any) -> list[Any]:
    """Copies the mutable values; references among them point to the copies."""
    made = {}
    for value in values:
        if is_mutable(value, side):
            own = type(value) in side.classes.values()
            # `copy` keeps the maximum length of a deque and the default of a dict.
            made[id(value)] = object.__new__(type(value)) if own else value.copy()
    for value in values:
        if id(value) in made:
            parts = [made.get(id(part), part) for part in content(value)]
            refill(made[id(value)], parts)
    return [made.get(id(value), value) for value in values]


def is_array(value: Any) -> bool:
    """Whether the value is a NumPy array or number; False if NumPy is not loaded."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def array_parts(value: Any) -> list[Any]:
    """Returns an array's type, its shape (None for a number) and its items."""
    numpy = importlib.import_module("numpy")
    plain = numpy.ndarray.view(numpy.asarray(value), numpy.ndarray)
    items = plain.ravel().tolist() if plain.dtype.hasobject else plain.tobytes()
    shape = None if isinstance(value, numpy.generic) else plain.shape
    return [_dtype(plain.dtype.str).str, shape, items]


def array(name: str, shape: Any, items: Any) -> Any:
    """Makes the array that `array_parts` described."""
    numpy = importlib.import_module("numpy")
    if type(items) is bytes:
        made = numpy.frombuffer(items, _dtype(name)).copy()
    else:
        made = numpy.empty(len(items), "O")
        made[:] = items
    return made[0] if shape is None else made.reshape(shape)


def zeros(name: str, shape: Any) -> Any:
    """Makes an array of zeros for `refill`."""
    return importlib.import_module("numpy").zeros(tuple(shape), _dtype(name))


def _dtype(name: str) -> Any:
    if name[1:2] not in tuple("biufcSUmMO"):
        raise ValueError(f"an array of {name} cannot be copied")
    return importlib.import_module("numpy").dtype(name)
