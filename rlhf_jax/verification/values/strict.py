"""Reads what a hostile process wrote: plain values, which are built here.

Of the instructions of pickles only those are known that build such values, and nothing
is called but the constructors of `codec.NAMED`, `codec.make` and `codec.fill`.
"""

from __future__ import annotations

import importlib
import pickle

from rlhf_jax.verification.values import codec
from rlhf_jax.verification.values.codec import Unreadable

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    import io
    from typing import Any

SAFE = "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2"
SAFE += " LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES"
SAFE += (
    " BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 FROZENSET"
)
SAFE += " EMPTY_LIST EMPTY_DICT EMPTY_SET MEMOIZE BINGET LONG_BINGET STACK_GLOBAL"
FILLING = "APPEND APPENDS SETITEM SETITEMS ADDITEMS"
BASE: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]


def _codes(names: str) -> list[bytes]:
    return [vars(pickle)[name] for name in names.split()]


def _guarded(how: Any) -> Any:
    return lambda self: self.filled(how)


class Strict(BASE):
    """Reads one message."""

    def __init__(self, file: io.BytesIO, side: Any, kept: list[Any]) -> None:
        """Begins with what was `kept` of the message before, which it cannot change.

        Args:
          side: `known(*parts)`, what a reference stands for; `shell(name)`, an object
            of one of its `classes`; `tuples`, named tuples so far.
        """
        super().__init__(file)
        self.side, self.kept = side, {id(one) for one in kept}
        self.memo = dict(enumerate(kept))

    def load(self) -> Any:
        """The value.

        Raises:
          Unreadable: it is none that `codec.Writer` writes.
        """
        try:
            return super().load()
        except Exception as error:
            raise Unreadable(f"{type(error).__name__}: {error}") from None

    def find_class(self, module_name: str, global_name: str) -> Any:
        """What a message names; no other module's."""
        name = f"{module_name}.{global_name}"
        if name == f"{codec.__name__}.make":
            return self._make
        if name == f"{codec.__name__}.fill":
            return self._fill
        if name in codec.LIBRARY:
            return vars(importlib.import_module(module_name))[global_name]
        return ... if name == "builtins.Ellipsis" else codec.NAMED[name]

    def _make(self, name: str, *parts: Any) -> Any:
        return codec.make(name, *parts, side=self.side)

    def _fill(self, value: Any, fields: Any) -> None:
        if id(value) in self.kept or type(value) not in self.side.classes.values():
            raise Unreadable("not to be filled")
        codec.fill(value, fields)

    def load_reduce(self) -> None:
        """Calls what makes a value."""
        args, function = self.stack.pop(), self.stack[-1]
        own = function in (self._make, self._fill)
        if not own and not (isinstance(function, type) and codec.by_name(function)):
            raise Unreadable("not to be called")
        self.stack[-1] = function(*args)

    def filled(self, how: Any) -> None:
        """Fills a container, which must be of this message."""
        name, stack = how.__name__, self.stack
        marked = self.metastack[-1] if name[-1:] == "s" else stack[:-1]
        target = stack[-3] if name == "load_setitem" else marked[-1]
        if id(target) in self.kept or type(target) not in codec.CHANGE:
            raise Unreadable("not to be filled")
        how(self)

    dispatch = {  # noqa: RUF012
        **{code[0]: BASE.dispatch[code[0]] for code in _codes(SAFE)},
        **{code[0]: _guarded(BASE.dispatch[code[0]]) for code in _codes(FILLING)},
        pickle.REDUCE[0]: load_reduce,
    }
