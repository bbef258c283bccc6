"""The code's functions and objects as its tests see them, in the judge's process.

A `Handle` stands for an object that stays in the other process: its methods are called
and its attributes read there. Operations that tests use on plain values (`==`, `<`,
`len`, items, truth) are refused with a reason. Exceptions are

    dataclasses, members of enumerations    compared here, by name and fields
    objects that the test itself made of a  `len`, items, iteration, truth and text,
      class with a capital initial            until a call returns the object
    arithmetic among objects                if the result is an object
"""

from __future__ import annotations

import types

from rlhf_jax.verification.code import values

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

# Arithmetic operators by their names in the module `operator`.
OPERATORS = (
    "add sub mul matmul truediv floordiv mod pow and_ or_ xor neg pos abs invert"
)
# Modules whose functions tests may use under the names that the code imported.
LIBRARIES = "math cmath copy itertools functools collections statistics string re json"
LIBRARIES += " heapq bisect fractions decimal datetime random typing builtins"


class Handle:
    """A reference to an object in the code's process."""

    __slots__ = ("__weakref__", "_base", "_fields", "_link", "_made", "_number")
    __slots__ += ("_ended", "_pinned", "_traits")

    def __init__(
        self, link: Any, number: int, traits: str, fields: list[str], base: str | None
    ) -> None:
        self._put("_link", link)
        self._put("_number", number)
        self._put("_traits", traits)  # see `runner.reference`
        self._put("_fields", fields)  # names, of a dataclass or an enumeration's member
        self._put("_base", base)  # the built-in type that its class derives from
        self._put("_made", False)  # the test made it; no call has returned it since
        self._put("_pinned", None)  # field values that the test wrote; see `__eq__`
        self._put("_ended", False)  # an iterator that raised StopIteration

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __del__(self) -> None:
        known = self._link.handles.get(self._number)
        if known is not None and known() is None:
            del self._link.handles[self._number]
            self._link.released.append(self._number)

    async def _awaited(self) -> Any:
        return self._link.ask("await", self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(f"'{type(self).__name__}' object has no {name!r}")
        read = self._link.attributes
        if (self._number, name) not in read:
            read[self._number, name] = self._link.ask("getattr", self, name)
        value = read[self._number, name]
        if isinstance(value, Class):
            value.made_if(name[:1].isupper())
        elif isinstance(value, Handle) and value._fields == ["_name_"]:
            if "k" in self._traits and value._content() != [name]:  # an alias
                value._refuse(f"a member under another name, {name}")
            value._put("_pinned", [name] if "k" in self._traits else None)
        elif name not in self._fields:
            self._put("_pinned", None)  # a method may change it
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("setattr", name, value)

    def _do(self, what: str, *args: Any) -> Any:
        self._put("_pinned", None)
        self._link.attributes.clear()
        return self._link.ask(what, self, *args)

    def _content(self) -> Any:
        """Returns its fields or its content as a built-in type, read once per call."""
        read, what = self._link.attributes, "content" if self._base else "fields"
        if self._pinned is not None:
            return self._pinned
        if (self._number, f"__{what}__") not in read:
            read[self._number, f"__{what}__"] = self._link.ask(what, self)
        return read[self._number, f"__{what}__"]

    def __eq__(self, other: Any) -> bool:
        """Compares identity, or the names and fields of dataclasses and members.

        Refused unless the test itself gave the fields of one side.
        """
        if other is self or other is None:
            return other is self
        if isinstance(other, Handle):
            if "q" not in self._traits + other._traits and not self._fields:
                return False
            pinned = self._pinned is not None or other._pinned is not None
            if self._fields and other._fields and pinned:
                named = type(self).__name__ == type(other).__name__
                return named and self._content() == other._content()
        elif self._base in values.CONTAINERS and self._made:
            return values.CONTAINERS[self._base](self._content()) == other
        self._link.suspicious |= "q" in self._traits and not isinstance(other, Handle)
        return self._refuse("compared")

    def __hash__(self) -> int:
        return self._number if "q" not in self._traits else self._refuse("hashed")

    def __bool__(self) -> bool:
        own = "b" in self._traits or "l" in self._traits
        return self._own("truth") is True if own else True

    def __len__(self) -> int:
        if "l" not in self._traits:
            raise TypeError(f"object of type '{type(self).__name__}' has no len()")
        return self._own("len")

    def __iter__(self) -> Iterator[Any]:
        return self if "n" in self._traits else iter(self._own("iter"))

    def __next__(self) -> Any:
        if self._ended:  # a generator returned for a list would look empty
            self._refuse("read again after its end")
        try:
            return self._do("next")
        except StopIteration:
            self._put("_ended", True)
            raise

    def __contains__(self, value: Any) -> bool:
        if "n" in self._traits:
            return any(one is value or one == value for one in self)
        return self._own("contains", value) is True

    def __enter__(self) -> Any:
        return self._do("enter")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        parts = (None, []) if error is None else self._link.parts_of(error)
        return self._do("exit", *parts) is True

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._refuse("copied")

    def _own(self, what: str, *args: Any) -> Any:
        if not self._made:
            self._refuse("used as a plain value")
        return self._do(what, *args)

    def _refuse(self, how: str) -> Any:
        return self._link.refuse(
            f"a {type(self).__name__} object of the code is {how}; a test may only "
            f"call its methods and compare plain values"
        )


class Function(Handle):
    """A callable of the code's: a function or a method."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        return self._called("call", args, named)

    def _called(self, what: str, args: Any, named: Any) -> Any:
        value = self._link.call(what, self, args, named)
        if isinstance(value, Handle):
            value._put("_made", False)
        return value

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class Class(Function):
    """A class of the code's."""

    __slots__ = ("_makes",)

    def made_if(self, named_as_class: bool) -> None:
        """Sets whether objects that a test makes of it allow `len`, items and so on."""
        self._put("_makes", named_as_class)
        self._put("_made", named_as_class)

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        if not getattr(self, "_makes", False):
            return super().__call__(*args, **named)
        value = self._called("make", args, named)
        if not isinstance(value, Handle):  # an immutable built-in value
            if (value if isinstance(value, tuple) else (value,))[: len(args)] != args:
                self._refuse("not equal to the arguments that made it")
        elif value._fields != ["_name_"]:
            value._put("_made", True)
            if value._fields:
                fields = dict(zip(value._fields, value._content(), strict=True))
                arguments = dict(zip(value._fields, args, strict=False)) | named
                if len(args) <= len(fields) and arguments.items() <= fields.items():
                    value._put("_pinned", [*fields.values()])
        return value

    def __instancecheck__(self, instance: Any) -> bool:
        ask = self._link.ask
        return isinstance(instance, Handle) and ask("isinstance", instance, self)

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, Handle) and self._link.ask("issubclass", kind, self)

    def __mro_entries__(self, bases: Any) -> Any:
        return self._refuse("derived from")


def _arithmetic(what: str, *, reflected: bool = False) -> Callable[..., Any]:
    """Runs an operator in the code's process; refused unless it returns an object."""

    def apply(self: Handle, *others: Any) -> Any:
        operands = (*others, self) if reflected else (self, *others)
        self._link.attributes.clear()
        made = self._link.ask(what, *operands)
        return made if isinstance(made, Handle) else self._refuse("used in arithmetic")

    return apply


for _what in ("str", "repr", "getitem", "setitem", "delitem"):
    setattr(Handle, f"__{_what}__", lambda self, *a, do=_what: self._own(do, *a))
for _what in ("lt", "le", "gt", "ge"):
    setattr(Handle, f"__{_what}__", lambda self, other: self._refuse("compared"))
for _what in OPERATORS.split():
    setattr(Handle, f"__{_what.rstrip('_')}__", _arithmetic(_what))
    setattr(Handle, f"__r{_what.rstrip('_')}__", _arithmetic(_what, reflected=True))
