"""The judge's side of the conversation with generated code (`runner`).

What arrives is data of a hostile process: read as values and numbers of objects, and
no more. `Refused` fails a test, even where the test catches it.
"""

from __future__ import annotations

import importlib
import io
import sys
import weakref
from collections import deque

from rlhf_jax.verification.code import values
from rlhf_jax.verification.code.remote import (
    CodesError,
    Coroutine,
    Function,
    Remote,
    number_of,
)
from rlhf_jax.verification.code.values import Unreadable

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from typing import Any, NoReturn

ENDED = "its process ended before the tests did"
# These end a loop quietly where they come from a call, and what it had yet to compare.
QUIET = (StopIteration, StopAsyncIteration, GeneratorExit)


class Refused(BaseException):
    """A test needs what is left to no code to decide, or cannot be sent."""


class Gone(BaseException):
    """There is no process to ask any more."""


class Link:
    """Asks the code's process, one request at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies = requests, replies
        self.over = self.refused = ""  # why all tests from here on fail
        self.defined: list[str] = []  # names
        self.remotes: dict[int, weakref.ref[Remote]] = {}
        self.errors: dict[int, type[BaseException]] = {}  # the code's own classes
        self.released: list[int] = []  # numbers that nothing here has any more
        self.handed: list[Any] = []  # functions and iterators that the code may call

    def load(self, code: str) -> None:
        """Runs the code; raises what it raises."""
        names = self.decode(["l", *self.ask("load", code)[0]])
        self.defined = [name for name in names if isinstance(name, str)]

    def named(self, name: str) -> Any:
        """What the code calls so; KeyError if nothing."""
        reply = self.ask("name", name)[0]
        match reply:
            case ["missing"]:
                raise KeyError(name)
            case ["module", str(module)]:
                if module.partition(".")[0] in sys.stdlib_module_names:
                    return importlib.import_module(module)
                self.refuse(f"{name!r} is a module of the code's own")
            case ["library", str(module)] if module in values.LIBRARIES:
                return getattr(importlib.import_module(module), name)
        return self.decode(reply)

    def refuse(self, why: str) -> NoReturn:
        """Fails the test."""
        self.refused = f"refused: {why}"
        raise Refused(why)

    def do(self, what: str, *args: Any, quiet: bool = False) -> Any:
        """One request about objects, and its result."""
        return self.decode(self.ask(what, *map(self.encode, args), quiet=quiet)[0])

    def call(self, function: Remote, args: Any, named: dict[str, Any]) -> Any:
        """Calls it, then changes what it changed, reads what it read."""
        source = sys.stdin if type(sys.stdin) is io.StringIO else None
        place = source.tell() if source else 0
        read = source.read() if source else None
        if source:
            source.seek(place)
        sent = (self.encode(function), [self.encode(arg) for arg in args])
        result, changed, taken = self.ask("call", *sent, self.encode(named), read)
        if source and type(taken) is int and taken >= 0:
            source.seek(place + taken)
        if result is None:  # else what it was handed is as it was
            for number, after in changed:
                _change(args[number], self.decode(after))
        return self.decode(result)

    def ask(self, what: str, *args: Any, quiet: bool = False) -> list[Any]:
        """One request: the reply, or the error raised.

        Args:
          quiet: the errors of `QUIET` are raised as they are.
        """
        released, self.released = self.released, []
        self._send([what, released, *args])
        while True:
            word, *payload, printed = self._receive()
            if printed and type(printed) is str:
                sys.stdout.write(printed)
            if word == "ok":
                return payload
            if word == "raise":
                error = self._error(*payload)
                if isinstance(error, QUIET) and not quiet:
                    error = RuntimeError(f"the code raised {type(error).__name__}")
                raise error
            self._answer(word, *payload)

    def _answer(self, word: str, number: int, what: str, args: Any, named: Any) -> None:
        """Calls a function that the code was handed, and sends what comes of it."""
        try:
            function = self.handed[number]
            positional, options = self.decode(args), self.decode(named)
            if word != "back" or not isinstance(options, dict):
                raise Unreadable
        except (Unreadable, LookupError, TypeError):
            self._end("its process sent what is no reply")
        try:
            result = (
                function(*positional, **options) if what == "call" else next(function)
            )
            reply = ["ok", [], self.encode(result)]
        except (Refused, Gone):
            raise
        except BaseException as error:
            known = (k for k in type(error).__mro__ if k in values.NAMES)
            kind = self.encode(type(error) if number_of(type(error)) else next(known))
            text = [
                "t",
                *(a if type(a) in values.PLAIN else f"{a}" for a in error.args),
            ]
            reply = ["raise", [], kind, text]
        self._send(reply)

    def encode(self, value: Any) -> Any:
        """A value to send."""
        try:
            return values.encode(value, self._own)
        except ValueError as error:
            self.refuse(f"{error}")

    def _own(self, value: Any) -> Any:
        number = number_of(value)
        if number is not None:
            return ["p", number]
        name = getattr(value, "__qualname__", None)
        module = getattr(value, "__module__", None)
        if name and module and module.partition(".")[0] in sys.stdlib_module_names:
            return ["m", module, name]
        iterates = hasattr(value, "__next__")
        if isinstance(value, type) or not (callable(value) or iterates):
            self.refuse(
                f"a {type(value).__name__} of the test's own cannot be handed to the "
                f"code; hand it plain values or functions"
            )
        if not any(one is value for one in self.handed):
            self.handed.append(value)
        place = next(n for n, one in enumerate(self.handed) if one is value)
        return ["g" if iterates else "f", place]

    def decode(self, data: Any) -> Any:
        """A value that was sent; objects come as `Remote`."""
        try:
            return values.decode(data, self._known)
        except Unreadable:
            self._end("its process sent what is no reply")

    def _known(self, data: list[Any]) -> Any:
        try:
            match data:
                case ["p", int(number)]:
                    return self.handed[number]
                case ["e", int(number), str(name), *bases]:
                    if number not in self.errors:
                        above = tuple(self._known_error(base) for base in bases)
                        own = {"code_number": number, "code_link": self}
                        self.errors[number] = type(
                            name, above, dict(vars(CodesError)) | own
                        )
                    return self.errors[number]
                case ["o", int(number), str(traits), holder, str(name)]:
                    return self._remote(number, traits, holder, name)
        except Unreadable:
            raise
        except Exception:
            pass
        raise Unreadable("unknown")

    def _known_error(self, data: Any) -> type[BaseException]:
        kind = values.decode(data, self._known)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
        raise Unreadable("no class of errors")

    def _remote(self, number: int, traits: str, holder: Any, name: str) -> Remote:
        known = self.remotes.get(number)
        remote = known and known()
        if remote is None:
            kind = Coroutine if "a" in traits else Function if "c" in traits else Remote
            base = values.TYPES[holder] if holder else None
            remote = kind(self, number, base, name[:100])
            self.remotes[number] = weakref.ref(remote)
            if number in self.released:
                self.released.remove(number)
        return remote

    def _error(self, kind: Any, args: Any, text: Any, number: Any) -> BaseException:
        try:
            error_class, arguments = (
                self._known_error(kind),
                values.decode(args, self._known),
            )
            error = error_class(*arguments)
        except Exception:
            return RuntimeError(f"{text}"[:300])
        if error_class in self.errors.values():
            error.code_text, error.code_error = f"{text}", number  # pyright: ignore
        return error

    def _send(self, message: list[Any]) -> None:
        if self.over:
            raise Gone(self.over)
        try:
            values.send(self.requests, message)
        except ValueError as error:
            self.refuse(f"{error}")
        except OSError:
            self._end(ENDED)

    def _receive(self) -> list[Any]:
        try:
            message = values.receive(self.replies)
        except (EOFError, OSError):
            self._end(ENDED)
        except Unreadable:
            message = None
        if type(message) is not list or len(message) < 3:
            self._end("its process sent what is no reply")
        return message

    def _end(self, why: str) -> NoReturn:
        self.over = why
        raise Gone(why)


def _change(value: Any, after: Any) -> None:
    """Makes a list, dict or set what the code made of its copy."""
    if type(value) is not type(after):
        return
    if isinstance(value, (list, bytearray)):
        value[:] = after
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(after)
    elif isinstance(value, deque):
        value.clear()
        value.extend(after)
