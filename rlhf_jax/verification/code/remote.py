"""The code's functions and objects as its tests see them, in the judge's process.

A `Remote` stands for an object that stays in the other process. Calls, attributes,
items and iteration go there by its link (`link`) and bring plain values back, or a
`Remote` again. What a comparison would hand to the code, or leave to it, is refused: an
object of the code's own class is equal to nothing.
"""

from __future__ import annotations

import operator
import types

from rlhf_jax.verification.code import values

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

# What an object of these holds is asked for once: by an `__int__` of its own it could
# be a small number where a test asks for one, and a large one where it asks again.
CONSTANT = (int, float, str, bytes, tuple, frozenset)


class Remote:
    """An object of the code's, or one of Python's that is no plain value."""

    __slots__ = (
        "__weakref__",
        "_code_link",
        "_code_name",
        "_code_number",
        "_code_plain",
        "_code_type",
    )

    def __init__(self, link: Any, number: int, kind: type | None, name: str) -> None:
        put = object.__setattr__
        put(self, "_code_link", link)
        put(self, "_code_number", number)
        put(self, "_code_type", kind)  # the built-in type it is compared as
        put(self, "_code_name", name)
        put(self, "_code_plain", None)  # what it holds, once that was asked

    def __del__(self) -> None:
        link = self._code_link
        known = link.remotes.get(self._code_number)
        if known is not None and known() is None:
            del link.remotes[self._code_number]
            link.released.append(self._code_number)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._code_type or type(self)

    def __getattr__(self, name: str) -> Any:
        return self._code_link.do("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._code_link.do("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._code_link.do("delete", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._code_link.do("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._code_link.do("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._code_link.do("delitem", self, key)

    def __len__(self) -> int:
        return self._code_link.do("len", self)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._code_link.do("iter", self)
        return iterator if isinstance(iterator, Remote) else iter(iterator)

    def __next__(self) -> Any:
        return self._code_link.do("next", self, quiet=True)

    def __contains__(self, value: Any) -> bool:
        return any(one is value or one == value for one in self)

    def __bool__(self) -> bool:
        return self._code_link.do("truth", self) is True

    def __str__(self) -> str:
        return self._code_link.do("str", self)

    def __repr__(self) -> str:
        return self._code_link.do("repr", self)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __hash__(self) -> int:
        return hash(_plain(self)) if self._code_type else self._code_number

    def __instancecheck__(self, instance: Any) -> bool:
        number = number_of(instance)
        return number is not None and self._code_link.do("instance", instance, self)

    def __subclasscheck__(self, kind: Any) -> bool:
        number = number_of(kind)
        return number is not None and self._code_link.do("subclass", kind, self)

    def __mro_entries__(self, bases: Any) -> Any:
        self._code_link.refuse("a test cannot derive a class from one of the code's")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._code_link.refuse(f"a test cannot copy a {self._code_name} of the code's")

    def __eq__(self, other: Any) -> bool:
        return False if other is None else operator.eq(_plain(self), _plain(other))

    def __ne__(self, other: Any) -> bool:
        return True if other is None else operator.ne(_plain(self), _plain(other))


class Function(Remote):
    """One that can be called: a function, a method, a class."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        return self._code_link.call(self, args, named)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class Coroutine(Remote):
    """One that is awaited at once, to its end."""

    __slots__ = ()

    def send(self, value: Any) -> Any:
        """Of `collections.abc.Coroutine`."""
        raise StopIteration(self._code_link.do("await", self))

    def __next__(self) -> Any:
        return self.send(None)

    def throw(self, *error: Any) -> Any:
        """Of `collections.abc.Coroutine`."""
        raise error[0]

    def close(self) -> None:
        """Of `collections.abc.Coroutine`."""

    def __await__(self) -> Iterator[Any]:
        yield from ()
        return self._code_link.do("await", self)


class CodesError:
    """What an error of the code's own class has beside the class above it."""

    code_link: Any
    code_number: int
    code_text = ""
    code_error = None

    def __str__(self) -> str:
        return self.code_text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.code_error is None:
            raise AttributeError(name)
        data = self.code_link.ask("get", ["p", self.code_error], name)[0]
        return self.code_link.decode(data)


def number_of(value: Any) -> int | None:
    """The number of what is the code's, in the other process."""
    if isinstance(value, Remote):
        return value._code_number
    if isinstance(value, type) and issubclass(value, BaseException):
        return vars(value).get("code_number")
    if isinstance(value, BaseException):
        return vars(value).get("code_error")
    return None


def _plain(value: Any) -> Any:
    """What a built-in type's subclass holds, to be compared here."""
    if not isinstance(value, Remote):
        return value
    if value._code_type is None:
        value._code_link.refuse(
            f"a {value._code_name} of the code's is compared with nothing; compare "
            f"plain values, as its attributes or what its methods return"
        )
    if value._code_type not in CONSTANT:
        return value._code_link.do("held", value)
    if value._code_plain is None:
        object.__setattr__(value, "_code_plain", value._code_link.do("held", value))
    return value._code_plain


def _ordering(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)
    return lambda self, other: compare(_plain(self), _plain(other))


def _arithmetic(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Among the code's objects it is the code's; with a plain value it is made here."""

    def apply(*operands: Any) -> Any:
        remotes = [one for one in operands if isinstance(one, Remote)]
        if len(remotes) == len(operands) and not all(r._code_type for r in remotes):
            return remotes[0]._code_link.do(name, *operands)
        return getattr(operator, name)(*map(_plain, operands))

    return apply, lambda self, other: apply(other, self)


for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _ordering(_name))
for _name in values.OPERATORS:
    _forward, _reflected = _arithmetic(_name)
    _bare = _name.rstrip("_")
    setattr(Remote, f"__{_bare}__", _forward)
    if _bare not in ("neg", "pos", "abs", "invert"):
        setattr(Remote, f"__r{_bare}__", _reflected)
