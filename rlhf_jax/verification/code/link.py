"""The judge's side of the conversation with generated code (`runner`).

Replies are read as plain values and numbers of objects, nothing else.
"""

from __future__ import annotations

import importlib
import io
import sys
import weakref

from rlhf_jax.verification.code import values, wire
from rlhf_jax.verification.code.objects import LIBRARIES, Class, Function, Handle
from rlhf_jax.verification.code.wire import Unreadable

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

ENDED = "its process ended before the tests did"
FORGED = "its process sent an invalid reply"
# Modules, besides `LIBRARIES`, that a test may use if only the code imports them.
OTHERS = ("numpy", "os", "sys", "time", "operator", "enum", "asyncio")
# Raised by a call, these would silently end a loop in the test and skip its checks.
QUIET = (StopIteration, StopAsyncIteration, GeneratorExit)


class Over(BaseException):
    """The tests are over, for the reason `Link.over`, even if a test catches this."""


class Link:
    """Sends requests to the code's process, one at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = open(requests, "wb")  # noqa: SIM115 - as long as this process
        self.replies = open(replies, "rb", 2**16)  # noqa: SIM115
        self.over = ""  # why all tests from here on fail
        # What copies lost; a failure afterwards may not be the code's fault.
        self.lost: list[str] = []
        self.suspicious = self.reading = False
        self.keeps_arguments = False  # the test compares arguments with a result
        self.handles: dict[int, weakref.ref[Handle]] = {}
        self.errors: dict[int, type[BaseException]] = {}  # the code's own error classes
        self.class_names: set[str] = set()  # of the code's classes
        self.tuples: dict[tuple[str, Any], type] = {}
        self.classes: dict[str, type] = {}  # the tests' classes that the code was sent
        self.released: list[int] = []  # numbers of handles that were deleted here
        self.handed: list[Any] = []  # functions and iterators that the code may call
        self.attributes: dict[tuple[int, str], Any] = {}  # cleared by calls
        self.what = ""  # the request being sent
        self.characters = 0  # of standard input that the last call read
        self.raised: BaseException | None = None  # the last error that the code raised

    def load(self, code: str) -> list[str]:
        """Runs the code and returns the names that it defines; raises its errors."""
        return [name for name in self.ask("load", plain=[code]) if type(name) is str]

    def named(self, name: str) -> Any:
        """Returns what the code defines under a name; KeyError if nothing."""
        match self.ask("name", plain=[name]):
            case ("module", str(module)):
                if module.partition(".")[0] in (*OTHERS, *LIBRARIES.split()):
                    return importlib.import_module(module)
                self.refuse(f"{name!r} is a module that the test does not import")
            case ("library", str(module)) if module in LIBRARIES.split():
                return vars(importlib.import_module(module))[name]
            case ("value", value):
                if isinstance(value, Class):
                    # The name in the test is trusted; the code may rename a class.
                    value.made_if(name[:1].isupper())
                return value
        raise KeyError(name)

    def refuse(self, why: str) -> NoReturn:
        """Ends the tests: a test asks for what generated code must not decide."""
        self._end(f"refused: {why}", suspicious=False)

    def call(self, what: str, function: Handle, args: Any, named: Any) -> Any:
        """Calls a function of the code; applies its changes to the arguments here."""
        self.attributes.clear()
        source, read = sys.stdin, None
        place = source.tell() if type(source) is io.StringIO else None
        if place is not None:
            read = source.read()
            source.seek(place)
        function._put("_pinned", None)  # a call may change the fields
        plain = function._number, read, [*named]
        values = *args, *named.values()
        value = self.ask(what, *values, plain=plain)
        if place is not None and read is not None:
            source.seek(place + min(self.characters, len(read)))
        return value

    def ask(self, what: str, *args: Any, plain: Sequence[Any] = ()) -> Any:
        """Sends one request; returns its result or raises the code's error.

        Args:
          args: values, which follow the values of JSON's own types in `plain`.
        """
        if self.reading:
            raise Unreadable("an object among what values are made of")
        kept = self._send(what, args, plain)
        while True:
            word, printed, notes, characters, changed, *rest = self._receive()
            if printed:
                sys.stdout.write(f"{printed}")
            try:
                for note, suspicious in notes:
                    self.lost.append(f"{note}"[:200])
                    self.suspicious |= suspicious is True
            except (TypeError, ValueError):  # a test could expect these from the code
                self._end(FORGED)
            self.characters = max(characters, 0) if type(characters) is int else 0
            back = word == "back"
            value = self._read(*([], []) if back else (changed, kept), *rest)
            if word == "ok":
                return value
            if type(value) is not tuple or len(value) != 4:
                self._end(FORGED)
            if back:
                self._answer(*value)
                continue
            self.raised = error = self._error(*value)
            if isinstance(error, QUIET) and what != "next":
                error = RuntimeError(f"the code raised {type(error).__name__}")
            raise error

    def parts_of(self, error: BaseException) -> tuple[type[BaseException], list[Any]]:
        """Returns an error class that the code knows, and arguments for it."""
        kinds = (kind for kind in type(error).__mro__ if kind in values.NAMES)
        kind = type(error) if "code_number" in vars(type(error)) else next(kinds)
        plain = {*wire.PLAIN, float}
        return kind, [one if type(one) in plain else f"{one}" for one in error.args]

    def _answer(self, number: int, what: str, args: Any, named: Any) -> None:
        """Calls a function of the tests for the code, and sends the result or error."""
        try:
            function = self.handed[number]
            result = function(*args, **named) if what == "call" else next(function)
            self._send("ok", [result])
        except Over:
            raise
        except BaseException as error:
            self._send("raise", self.parts_of(error))

    def reference(self, value: Any) -> Any:
        """Encodes an object that is not copied as a reference; None for a value."""
        if isinstance(value, Handle):
            if self.what == "call":  # the call may change it
                value._put("_pinned", None)
            return "p", value._number
        kind = type(value)
        if isinstance(value, type) and "code_number" in vars(value):
            return "p", vars(value)["code_number"]
        name, owner = getattr(value, "__qualname__", None), value
        if hasattr(value, "__objclass__"):  # a method such as str.upper
            owner = value.__objclass__
        module = getattr(owner, "__module__", None)
        if name and module and module.partition(".")[0] in sys.stdlib_module_names:
            return "m", module, name
        iterates = hasattr(kind, "__next__")
        if iterates or (callable(value) and not isinstance(value, type)):
            if not any(one is value for one in self.handed):
                self.handed.append(value)
            number = next(n for n, one in enumerate(self.handed) if one is value)
            return "g" if iterates else "f", number
        if values.is_plain(value):
            return None
        if isinstance(value, type) or not hasattr(value, "__dict__"):
            self.refuse(f"a {kind.__name__} object of the test cannot be copied")
        self.classes[kind.__name__] = kind
        own = {name for name in vars(kind) if callable(vars(kind)[name])}
        if own - {"__init__", "__repr__", "__str__", "__eq__", "__hash__", "__lt__"}:
            lost = f"a {kind.__name__} object of the test lost its methods"
            self.lost.append(lost)
        return None

    def shell(self, name: str) -> Any:
        """Makes an empty object of a class of the tests."""
        return object.__new__(self.classes[name])

    def known(self, tag: str, number: Any, *more: Any) -> Any:
        """Resolves a reference from the code to a handle, function or error class."""
        if tag in ("f", "g"):
            return self.handed[number]
        if tag == "error":
            name, bases = more
            self.class_names.add(f"{name}")
            if not all(issubclass(base, BaseException) for base in bases):
                raise Unreadable("no class of errors")
            if number not in self.errors:
                own = {"code_number": number, "__str__": lambda self: self.code_text}
                self.errors[number] = type(name, bases or (Exception,), own)
            return self.errors[number]
        if tag != "o":
            raise Unreadable("unknown")
        self.class_names.add(f"{more[0]}")
        known = self.handles.get(number)
        handle = known and known()
        if handle is None:
            name, traits, fields, base = more
            traits, base = f"{traits}", base and f"{base}"
            kind = Class if "k" in traits else Function if "c" in traits else Handle
            handle = type(f"{name}"[:100], (kind,), {"__slots__": ()})(
                self, number, traits, list(fields), base
            )
            self.handles[number] = weakref.ref(handle)
            if number in self.released:
                self.released.remove(number)
        return handle._awaited() if "a" in handle._traits else handle

    def _error(self, kind: Any, args: Any, text: Any, fields: Any) -> BaseException:
        try:
            assert issubclass(kind, BaseException)
            error = kind(*args)
            if kind in self.errors.values():
                vars(error).update(fields, code_text=f"{text}")
            return error
        except Exception:
            return RuntimeError(f"{text}"[:300])

    def _send(self, what: str, args: Any, plain: Any = ()) -> list[Any]:
        if self.over:
            raise Over
        released, self.released, self.what = self.released, [], what
        writer = wire.Writer(self)
        try:
            message = [what, released, [*plain], writer.table([*args])]
            wire.send(self.requests, message, writer.packed)
        except (ValueError, TypeError) as error:
            self.refuse(f"{error}")
        except OSError:
            self._end(ENDED)
        return writer.values

    def _receive(self) -> list[Any]:
        try:
            message = wire.receive(self.replies)
        except (EOFError, OSError):
            self._end(ENDED)
        except Unreadable:
            self._end(FORGED)
        if len(message) != 7 or message[0] not in ("ok", "raise", "back"):
            self._end(FORGED)
        return message

    def _read(self, changed: Any, kept: list[Any], table: Any, packed: bytes) -> Any:
        """Returns a table's first value; the others replace the `changed` of `kept`."""
        self.reading = True
        try:
            reader = wire.Reader(self, table, packed, kept)
            # The test compares the result with an argument as it was before the call.
            if self.keeps_arguments and changed and reader.items[0] is not None:
                lost = "a call changed an argument that its result is compared with"
                self.lost.append(lost)
                kept = values.copies(kept, self)
                reader = wire.Reader(self, table, packed, kept)
            value, *contents = reader.items
            reader.change(changed, contents)
            return value
        except Exception:
            self._end(FORGED)
        finally:
            self.reading = False

    def _end(self, why: str, *, suspicious: bool = True) -> NoReturn:
        self.over = self.over or why
        self.suspicious |= suspicious
        raise Over
