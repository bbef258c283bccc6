"""Runs generated code, in a process of its own, and answers what it is asked.

`sandbox` starts it. It holds no test and no expected value: it is told the code,
then asked for a name the code defines, to call a function with these arguments, and so
on, one request at a time; see `serve`. All it can gain by forging an answer is to have
answered it: `judge`, in another process, compares.

Objects that are no plain values stay here. The judge holds their numbers.
"""

from __future__ import annotations

import builtins
import io
import operator
import os
import sys
import types

from rlhf_jax.verification.code import guard, values

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PRINTED = 2**20  # bytes that are passed on of what a request printed
# Types whose subclasses are compared by what they hold, unless they say otherwise.
HOLDERS = (int, float, str, bytes, tuple, list, dict, set, frozenset)
COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
CHANGEABLE = ("l", "d", "s", "ba", "x")  # tags of values that a call may change


def held_by(value: Any) -> Any:
    """What an object of a subclass of a built-in type holds, as that type."""
    holder = _holder(type(value))
    return str.__str__(value) if holder is str else holder and holder(value)


def awaited(value: Any) -> Any:
    """What a coroutine returns, run to its end."""
    import asyncio  # which few programs need

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


# What may be asked of objects, beside calls.
DONE: dict[str, Callable[..., Any]] = {
    "iter": iter,
    "next": next,
    "len": len,
    "str": lambda value: str.__str__(str(value)),
    "repr": lambda value: str.__str__(repr(value)),
    "truth": operator.truth,
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "instance": isinstance,
    "subclass": issubclass,
    "held": held_by,
    "await": awaited,
    **{name: getattr(operator, name) for name in values.OPERATORS},
}


class Printed(io.BytesIO):
    """Standard output, of which the first `PRINTED` bytes count."""

    def write(self, data: Any, /) -> int:
        """As ever."""
        super().write(memoryview(data)[: max(0, PRINTED - self.tell())])
        return len(data)


class Runner:
    """The code's side of a conversation."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies = requests, replies
        self.module = types.ModuleType("solution")
        self.objects: dict[int, Any] = {}  # objects that the judge has numbers of
        self.numbers: dict[int, int] = {}  # by id
        self.handed: dict[int, Any] = {}  # stand-ins for what the judge holds
        self.handed_numbers: dict[int, int] = {}
        self.count = 0
        self.printed = Printed()
        sys.stdout = io.TextIOWrapper(self.printed, "utf-8", write_through=True)

    def serve(self) -> Any:
        """Answers requests until there are none; or until a call to the judge returns.

        A request is [what, released numbers, ...]; what is a name of `do`, or "ok" or
        "raise" with what a function of the judge's returned or raised.
        """
        while True:
            what, released, *args = values.receive(self.requests)
            for number in released:
                self.numbers.pop(id(self.objects.pop(number, None)), None)
            if what == "ok":
                return self.decode(args[0])
            if what == "raise":
                kind, arguments = map(self.decode, args)
                raise kind(*arguments)
            try:
                reply = ["ok", *self.do(what, args)]
            except BaseException as error:  # SystemExit too
                reply = ["raise", *self.raised(error)]
            values.send(self.replies, [*reply, self.drain()])

    def do(self, what: str, args: list[Any]) -> list[Any]:
        """One request: [the result, what it changed]."""
        if what == "load":
            names = vars(self.module)
            exec(compile(args[0], "<code>", "exec", dont_inherit=True), names)
            return [[name for name in names if not name.startswith("_")], []]
        if what == "name":
            return [self.named(args[0]), []]
        if what == "call":
            return self.call(*args)
        return [self.encode(DONE[what](*map(self.decode, args))), []]

    def named(self, name: str) -> Any:
        """A global of the code: a value, a module, a function of a library."""
        try:
            value = vars(self.module)[name]
        except KeyError:
            return ["missing"]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        for library in values.LIBRARIES:
            if vars(sys.modules.get(library, builtins)).get(name) is value:
                return ["library", library]
        return self.encode(value)

    def call(self, function: Any, args: list[Any], named: Any, read: Any) -> list[Any]:
        """A call; lists, dicts and sets that it changed if it returns None."""
        arguments = [self.decode(arg) for arg in args]
        if read is not None:
            sys.stdin = io.StringIO(read)
        result = self.decode(function)(*arguments, **self.decode(named))
        changed = []
        if result is None:
            for place, (before, value) in enumerate(zip(args, arguments, strict=True)):
                if type(before) is list and before[0] in CHANGEABLE:
                    after = self.encode(value)
                    if after != before:
                        changed.append([place, after])
        taken = sys.stdin.tell() if read is not None else 0
        return [self.encode(result), changed, taken]

    def raised(self, error: BaseException) -> list[Any]:
        """An error: its class, its arguments or its text, and its own number."""
        try:
            text = f"{error}"[:1000]
        except BaseException:  # its own __str__ raised
            text = "an error that cannot be shown"
        try:
            args = self.encode(error.args)
        except BaseException:
            args = ["t", text]
        return [self.kind(type(error)), args, text, self.number(error)]

    def kind(self, kind: type[BaseException]) -> Any:
        """A class of errors, with the classes above it."""
        if kind in values.NAMES:
            return ["n", values.NAMES[kind]]
        bases = [self.kind(b) for b in kind.__bases__ if issubclass(b, BaseException)]
        return ["e", self.number(kind), kind.__name__, *bases]

    def number(self, value: Any) -> int:
        """The number of an object, which is kept for as long as the judge wants."""
        if id(value) not in self.numbers:
            self.count += 1
            self.numbers[id(value)], self.objects[self.count] = self.count, value
        return self.numbers[id(value)]

    def encode(self, value: Any) -> Any:
        """A value, or the number of an object."""
        return values.encode(value, self.own)

    def own(self, value: Any) -> Any:
        """How a value of the code's own is named to the judge."""
        if id(value) in self.handed_numbers:
            return ["p", self.handed_numbers[id(value)]]
        kind = type(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return self.kind(value)
        holder = _holder(kind)
        traits = "c" * callable(value) + "a" * isinstance(value, types.CoroutineType)
        name = holder and values.NAMES[holder]
        return ["o", self.number(value), traits, name, kind.__name__]

    def decode(self, data: Any) -> Any:
        """What the judge wrote."""
        return values.decode(data, self.known)

    def known(self, data: list[Any]) -> Any:
        """The object that a name in a message of the judge stands for."""
        tag, number, *more = data
        if tag == "p":
            return self.objects[number]
        if tag == "m":
            return operator.attrgetter(more[0])(__import__(number, fromlist=["_"]))
        if number not in self.handed:
            stand_in = (
                _Iterator(self, number) if tag == "g" else _function(self, number)
            )
            self.handed[number] = stand_in
            self.handed_numbers[id(stand_in)] = number
        return self.handed[number]

    def ask(self, number: int, what: str, *args: Any, **named: Any) -> Any:
        """Has a function of the judge's called, and answers what it asks meanwhile."""
        payload = [self.encode(args), self.encode(named)]
        values.send(self.replies, ["back", number, what, *payload, self.drain()])
        return self.serve()

    def drain(self) -> str:
        """What was printed since the last time."""
        text = self.printed.getvalue().decode("utf-8", "replace")
        self.printed.seek(0)
        self.printed.truncate()
        return text


def _holder(kind: type) -> type | None:
    """The built-in type whose comparisons a subclass has kept."""
    for holder in HOLDERS:
        if issubclass(kind, holder):
            inherited = (getattr(kind, n) is getattr(holder, n) for n in COMPARISONS)
            return holder if all(inherited) else None
    return None


def _function(runner: Runner, number: int) -> Callable[..., Any]:
    def function(*args: Any, **named: Any) -> Any:
        return runner.ask(number, "call", *args, **named)

    return function


class _Iterator:
    """An iterator of the judge's."""

    def __init__(self, runner: Runner, number: int) -> None:
        self.runner, self.number = runner, number

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        return self.runner.ask(self.number, "next")


def main() -> None:
    """Takes its limits, says that it is ready, and serves."""
    arguments = sys.argv[1:]
    requests, replies, memory, file_size = (int(arguments[n]) for n in (0, 1, 3, 4))
    sys.argv[1:] = []
    guard.limits(seconds=float(arguments[2]), memory=memory, file_size=file_size)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    runner = Runner(requests, replies)
    # Dataclasses and pickle look a class's module up; and this one holds our functions.
    sys.modules["solution"] = sys.modules["__main__"] = runner.module
    guard.forbid_processes()
    sys.addaudithook(guard.guard(os.path.realpath(os.getcwd())))
    values.send(replies, "ready")
    try:
        runner.serve()
    finally:
        os._exit(0)
