"""Runs generated code in a process of its own and answers the judge's requests.

This process sees neither the tests nor the expected values, only requests such as to
call a function with some arguments. Code that forges replies gains nothing over code
that returns the same values.
"""

from __future__ import annotations

import _thread
import builtins
import enum
import gc
import importlib
import io
import itertools
import json
import operator
import os
import sys
import types

from rlhf_jax.verification.code import values, wire
from rlhf_jax.verification.code.objects import LIBRARIES
from rlhf_jax.verification.isolation import confined

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Methods by which a subclass of a built-in type can pretend to be another value.
LYING = "eq ne lt le gt ge len iter getitem contains bool hash int float index add radd"
LYING += " sub rsub mul rmul mod abs round reversed"
# Requests other than calls and the functions of `operator` and `builtins`.
DONE: dict[str, Callable[..., Any]] = {
    "await": lambda value: importlib.import_module("asyncio").run(value),
    "enter": lambda value: value.__enter__(),
    "exit": lambda v, kind, args: bool(v.__exit__(kind, kind and kind(*args), None)),
    "fields": lambda v: [object.__getattribute__(v, n) for n in _fields(type(v))],
    "content": lambda value: list(values.READ[values.base_of(type(value))](value)),
}
OTHERS = vars(operator) | vars(builtins) | DONE


class Runner:
    """The code's side of the conversation with the judge (`link`)."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = open(requests, "rb", 2**16)  # noqa: SIM115 - for this process
        self.replies = open(replies, "wb")  # noqa: SIM115
        self.module = types.ModuleType("solution")
        self.objects: dict[int, Any] = {}  # number: object that the judge refers to
        self.numbers: dict[int, int] = {}  # id(object): number
        self.count = self.characters = 0
        self.handed: dict[tuple[Any, ...], Any] = {}  # the judge's functions, iterators
        self.references: dict[int, tuple[Any, ...]] = {}  # id(function): its reference
        self.classes: dict[str, type] = {}  # empty copies of the tests' own classes
        self.tuples: dict[tuple[str, Any], type] = {}
        self.notes: list[tuple[str, bool]] = []  # (what a copy lost, suspicious)
        self.main = _thread.get_ident()
        self.printed = confined.Printed()
        sys.stdout = io.TextIOWrapper(self.printed, "utf-8", write_through=True)

    def serve(self) -> Any:
        """Answers requests until the pipe closes or a call of the judge's returns.

        A request is a word, numbers to release, and arguments. The word is one of `do`,
        or "ok" or "raise" with the result or error of a function of the judge's.
        """
        while True:
            what, released, plain, *table = wire.receive(self.requests)
            for number in released:
                self.numbers.pop(id(self.objects.pop(number, None)), None)
            reader = wire.Reader(self, *table)
            args, kept = reader.items, reader.values
            if what == "ok":
                return args[0]
            if what == "raise":
                raise args[0](*args[1])
            before = {
                number: values.content(value)
                for number, value in enumerate(kept)
                if values.is_mutable(value, self)
            }
            word, self.characters = "ok", 0
            try:
                value = self.do(what, *plain, *args)
            except BaseException as error:  # SystemExit too
                word, value = "raise", self.raised(error)
            try:
                self.reply(word, value, kept, before)
            except Exception as error:
                self.notes.append((f"a result cannot be sent: {error}"[:200], False))
                self.reply("raise", (ValueError, [f"{error}"[:200]], "", {}), [], {})

    def reply(
        self, word: str, value: Any, kept: list[Any], before: dict[int, list[Any]]
    ) -> None:
        """Sends a word and a value, and the new contents of changed arguments.

        The word is "ok", "raise", or "back" to call a function of the judge's. `before`
        has the old contents of mutable values, by index in `kept`.
        """
        changed = {}
        for number, old in before.items():
            now = values.content(kept[number])
            if len(now) != len(old) or not all(map(operator.is_, now, old)):
                changed[number] = now
        writer = wire.Writer(self, kept)
        table = writer.table([value, *changed.values()])
        notes, self.notes = self.notes, []
        text = self.printed.getvalue().decode("utf-8", "replace")
        self.printed.seek(0)
        self.printed.truncate()
        message = [word, text, notes, self.characters, [*changed], table]
        wire.send(self.replies, message, writer.packed)

    def do(self, what: str, *args: Any) -> Any:
        """Returns the result of one request."""
        names = vars(self.module)
        if what == "load":
            exec(compile(args[0], "<code>", "exec", dont_inherit=True), names)
            return [name for name in names if not name.startswith("_")]
        if what in ("call", "make"):
            number, read, keys, *arguments = args
            first = len(arguments) - len(keys)
            named = dict(zip(keys, arguments[first:], strict=True))
            if read is not None:
                sys.stdin = io.StringIO(read)
            result = self.objects[number](*arguments[:first], **named)
            self.characters = sys.stdin.tell() if read is not None else 0
            base = values.base_of(type(result))
            own = type(result) not in values.READ and base in (None, *values.MUTABLE)
            if what == "make" and own:
                self.number(result)  # sent as a reference, not copied
            return result
        if what != "name":
            return OTHERS[what](*args)
        if args[0] not in names:
            return ("missing",)
        value = names[args[0]]
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        for name in LIBRARIES.split():
            if name in sys.modules and vars(sys.modules[name]).get(args[0]) is value:
                return "library", name
        return "value", value

    def raised(self, error: BaseException) -> tuple[Any, ...]:
        """Returns the class, arguments, text and fields of an error."""
        try:
            text = f"{error}"[:1000]
        except BaseException:  # its own __str__ raised
            text = "an error that cannot be shown"
        fields = {} if type(error) in values.NAMES else vars(error)
        try:
            wire.Writer(self).table([error.args, fields])
        except Exception:
            return type(error), [text], text, {}
        return type(error), list(error.args), text, fields

    def number(self, value: Any) -> int:
        """Numbers an object, which is kept until the judge releases the number."""
        if id(value) not in self.numbers:
            self.count += 1
            self.numbers[id(value)], self.objects[self.count] = self.count, value
        return self.numbers[id(value)]

    def reference(self, value: Any) -> tuple[Any, ...] | None:
        """Encodes an object that is not copied as a reference; None for a value.

        The traits of an object: c callable, k class, a coroutine, n iterator, and q, b,
        l for its own `__eq__`, `__bool__` and `__len__`.
        """
        kind, base = type(value), values.base_of(type(value))
        if id(value) in self.references:
            return self.references[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            if value in values.NAMES:
                return None
            bases = tuple(b for b in value.__bases__ if issubclass(b, BaseException))
            return "error", self.number(value), value.__name__, bases
        if id(value) not in self.numbers:
            if isinstance(value, enum.Enum):
                base = base if isinstance(value, enum.ReprEnum) else None
            if base is not None:
                return self.flattened(kind, base)
            if values.is_plain(value) or self.classes.get(kind.__name__) is kind:
                return None
        traits = "c" * callable(value) + "k" * isinstance(value, type)
        traits += "a" * isinstance(value, types.CoroutineType)
        traits += "n" * hasattr(kind, "__next__")
        traits += "q" * (kind.__eq__ is not object.__eq__)
        traits += "b" * hasattr(kind, "__bool__") + "l" * hasattr(kind, "__len__")
        named = value.__name__ if isinstance(value, type) else kind.__name__
        fields = _fields(kind)
        return "o", self.number(value), named, traits, fields, base and base.__name__

    def flattened(self, kind: type, base: type) -> None:
        """Notes what a value of a subclass loses when it is copied as its base."""
        written = _written(kind)
        lying = sorted(written & {f"__{name}__" for name in LYING.split()})
        own = f" with {', '.join(lying)} of its own" if lying else ""
        note = f"a {kind.__name__}{own} was copied as a plain {base.__name__}"
        if written or issubclass(kind, enum.Enum):
            self.notes.append((note, bool(lying)))

    def shell(self, name: str) -> Any:
        """Makes an empty object for a class of the tests, without its methods."""
        if name not in self.classes:
            self.classes[name] = type(name, (), {})
        return self.classes[name]()

    def known(self, tag: str, number: Any, *more: Any) -> Any:
        """Resolves a reference from the judge."""
        if tag == "p":
            return self.objects[number]
        if tag == "m":
            return operator.attrgetter(more[0])(__import__(number, fromlist=["_"]))
        if (tag, number) not in self.handed:
            what = "next" if tag == "g" else "call"

            def asked(*args: Any, **named: Any) -> Any:
                return self.ask(number, what, args, named)

            made: Any = asked
            if tag == "g":
                made = itertools.starmap(asked, itertools.repeat(()))  # until it raises
            self.handed[tag, number], self.references[id(made)] = made, (tag, number)
        return self.handed[tag, number]

    def ask(self, number: int, what: str, args: Any, named: dict[str, Any]) -> Any:
        """Has the judge call one of its functions; serves its requests meanwhile."""
        if _thread.get_ident() != self.main:
            raise RuntimeError("refused: a thread calls a function of the tests")
        self.reply("back", (number, what, args, named), [], {})
        return self.serve()


def _fields(kind: type) -> list[str]:
    if issubclass(kind, enum.Enum):
        return ["_name_"]
    return list(getattr(kind, "__dataclass_fields__", ()))


def _written(kind: type) -> set[str]:
    """Names the methods of a class that are defined in the generated code."""
    named = [item for base in kind.__mro__ for item in vars(base).items()]
    methods = {n: getattr(v, "fget", getattr(v, "__func__", v)) for n, v in named}
    codes = {name: getattr(one, "__code__", None) for name, one in methods.items()}
    return {n for n, code in codes.items() if code and code.co_filename == "<code>"}


def main() -> None:
    """Confines this process, reports that it is ready, and serves requests."""
    settings = json.loads(sys.argv.pop())
    gc.set_threshold(100_000)  # a message may have as many values
    runner = Runner(*confined.take(settings))
    # Dataclasses and pickle look up a class's module; ours would show our functions.
    sys.modules["solution"] = sys.modules["__main__"] = runner.module
    wire.send(runner.replies, ["ready"])
    try:
        runner.serve()
    finally:
        os._exit(0)
