"""The judge's side of the conversation with generated code (`runner`).

What arrives is read as plain values and numbers of objects, and no more.
"""

from __future__ import annotations

import importlib
import io
import sys
import weakref

from rlhf_jax.verification.code import values, wire
from rlhf_jax.verification.code.objects import LIBRARIES, Class, Function, Handle
from rlhf_jax.verification.code.wire import Unreadable

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

ENDED = "its process ended before the tests did"
FORGED = "its process sent what is no reply"
OTHERS = ("numpy", "os", "sys", "time", "operator", "enum", "asyncio")  # modules
# These end a loop quietly where they come from a call, and what it had yet to compare.
QUIET = (StopIteration, StopAsyncIteration, GeneratorExit)


class Over(BaseException):
    """The tests end here, with the reason `Link.over`, even if one catches this."""


class Link:
    """Asks the code's process, one request at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = open(requests, "wb")  # noqa: SIM115 - as long as this process
        self.replies = open(replies, "rb", 2**16)  # noqa: SIM115
        self.over = ""  # why all tests from here on fail
        self.lost: list[str] = []  # of values, so that a failure may not be the code's
        self.suspicious = self.reading = False
        self.keeps_arguments = False  # the test compares them with a result
        self.handles: dict[int, weakref.ref[Handle]] = {}
        self.errors: dict[int, type[BaseException]] = {}  # the code's own classes
        self.kinds: set[str] = set()  # the names of the code's classes
        self.tuples: dict[tuple[str, Any], type] = {}
        self.classes: dict[str, type] = {}  # of the tests, of objects handed over
        self.released: list[int] = []  # numbers that nothing here has any more
        self.handed: list[Any] = []  # functions and iterators that the code may call
        self.read: dict[tuple[int, str], Any] = {}  # attributes, since the last call
        self.what = ""  # is being sent
        self.taken = 0  # characters of standard input, by the last call
        self.raised: BaseException | None = None  # the last error of the code's

    def load(self, code: str) -> list[str]:
        """Runs the code, and raises what it raises; the names that it defines."""
        return [name for name in self.ask("load", plain=[code]) if type(name) is str]

    def named(self, name: str) -> Any:
        """What the code calls so; KeyError if nothing."""
        match self.ask("name", plain=[name]):
            case ("module", str(module)):
                if module.partition(".")[0] in (*OTHERS, *LIBRARIES.split()):
                    return importlib.import_module(module)
                self.refuse(f"{name!r} is a module that the test does not import")
            case ("library", str(module)) if module in LIBRARIES.split():
                return vars(importlib.import_module(module))[name]
            case ("value", value):
                if isinstance(value, Class):
                    # The test's author wrote the name, the code may be lying.
                    value.made_if(name[:1].isupper())
                return value
        raise KeyError(name)

    def refuse(self, why: str) -> NoReturn:
        """Ends the tests: one needs what is left to no code to decide."""
        self._end(f"refused: {why}", suspicious=False)

    def call(self, what: str, function: Handle, args: Any, named: Any) -> Any:
        """Calls it; then the arguments are what it made of them."""
        self.read.clear()
        source, read = sys.stdin, None
        place = source.tell() if type(source) is io.StringIO else None
        if place is not None:
            read = source.read()
            source.seek(place)
        function._put("_pinned", None)  # which it may change
        plain = function._number, read, [*named]
        values = *args, *named.values()
        value = self.ask(what, *values, plain=plain)
        if place is not None and read is not None:
            source.seek(place + min(self.taken, len(read)))
        return value

    def ask(self, what: str, *args: Any, plain: Sequence[Any] = ()) -> Any:
        """One request: the result, or the error raised.

        Args:
          args: values, behind those of `plain`, which JSON has.
        """
        if self.reading:
            raise Unreadable("an object among what values are made of")
        kept = self._send(what, args, plain)
        while True:
            word, printed, notes, taken, changed, *rest = self._receive()
            if printed:
                sys.stdout.write(f"{printed}")
            try:
                for note, suspicious in notes:
                    self.lost.append(f"{note}"[:200])
                    self.suspicious |= suspicious is True
            except (TypeError, ValueError):  # which a test could take for the code's
                self._end(FORGED)
            self.taken = taken if type(taken) is int and taken > 0 else 0
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
        """A class of errors that the code knows, and arguments for it."""
        kinds = (kind for kind in type(error).__mro__ if kind in values.NAMES)
        kind = type(error) if "code_number" in vars(type(error)) else next(kinds)
        plain = {*wire.PLAIN, float}
        return kind, [one if type(one) in plain else f"{one}" for one in error.args]

    def _answer(self, number: int, what: str, args: Any, named: Any) -> None:
        """Calls a function that the code was handed, and sends what comes of it."""
        try:
            function = self.handed[number]
            result = function(*args, **named) if what == "call" else next(function)
            self._send("ok", [result])
        except Over:
            raise
        except BaseException as error:
            self._send("raise", self.parts_of(error))

    def reference(self, value: Any) -> Any:
        """How what is no value is written; None if it is one."""
        if isinstance(value, Handle):
            if self.what == "call":  # which may change it
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
        if values.passes(value):
            return None
        if isinstance(value, type) or not hasattr(value, "__dict__"):
            self.refuse(f"a {kind.__name__} of the test's cannot be handed to the code")
        self.classes[kind.__name__] = kind
        own = {name for name in vars(kind) if callable(vars(kind)[name])}
        if own - {"__init__", "__repr__", "__str__", "__eq__", "__hash__", "__lt__"}:
            lost = f"a {kind.__name__} of the test's went over without its methods"
            self.lost.append(lost)
        return None

    def shell(self, name: str) -> Any:
        """An object of a class of the tests."""
        return object.__new__(self.classes[name])

    def known(self, tag: str, number: Any, *more: Any) -> Any:
        """What the code refers to."""
        if tag in ("f", "g"):
            return self.handed[number]
        if tag == "error":
            name, bases = more
            self.kinds.add(f"{name}")
            if not all(issubclass(base, BaseException) for base in bases):
                raise Unreadable("no class of errors")
            if number not in self.errors:
                own = {"code_number": number, "__str__": lambda self: self.code_text}
                self.errors[number] = type(name, bases or (Exception,), own)
            return self.errors[number]
        if tag != "o":
            raise Unreadable("unknown")
        self.kinds.add(f"{more[0]}")
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
        """The first value of a table; the others are what of `kept` holds now."""
        self.reading = True
        try:
            reader = wire.Reader(self, table, packed, kept)
            # A result that is compared with an argument: as that was before the call.
            if self.keeps_arguments and changed and reader.items[0] is not None:
                lost = "a call changed an argument that its result is held to"
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
