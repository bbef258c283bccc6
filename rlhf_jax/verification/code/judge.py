"""Runs the tests of generated code, which itself runs in another process.

`verifier` starts it, and it starts the other (`sandbox`). A name that the
tests use and do not define is the code's. Where that is a value, a copy comes over;
where it is a function, what is here is a `remote.Remote`: calling it sends the
arguments over, and a copy of the result comes back. So the code sees arguments alone:
neither the tests nor what they expect, and every comparison is made here, between plain
values.

It writes to a pipe, a line each: `ready WAY why`; then `passed` for each test passed;
then, if it was asked to show it, `printed` and a JSON text; then `end why`.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import os
import sys
import types

from rlhf_jax.verification.code import guard, sandbox
from rlhf_jax.verification.code.link import Link

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

SHOWN = 10_000  # characters that are passed on of what the code printed
BUILT_IN = frozenset(vars(builtins))


class Names(dict[str, object]):
    """The globals of the tests: what they lack is looked up in the code.

    A name of Python's own means Python's, so that no code replaces the `abs` or
    `isinstance` of a test; unless all that the tests need are such names, and the code
    defines one of them: then that one is the function they test.
    """

    def __init__(self, link: Link, tests: Sequence[str]) -> None:
        super().__init__(__builtins__=builtins, __name__="solution")
        self.link = link
        loaded, bound, called, owners = set(), set(), set(), set()
        explicit = False  # what they test is imported
        for node in (node for test in tests for node in ast.walk(ast.parse(test))):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    loaded.add(name)
                case ast.Name(id=name) | ast.arg(arg=name):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    bound.add(name)
                case ast.AsyncFunctionDef(name=name) | ast.ExceptHandler(name=name):
                    bound.add(name)
                case ast.ImportFrom(module="solution"):
                    explicit = True
                case ast.alias(name=name, asname=other):
                    bound.add(other or name.partition(".")[0])
                    explicit |= name == "solution"
                case ast.Call(func=ast.Name(id=name)):
                    called.add(name)
                case ast.Attribute(value=ast.Name(id=name)):
                    owners.add(name)
        free = loaded - bound
        # `math.isclose` is of the library, whatever the code calls `math`.
        self.modules = (free & owners & sys.stdlib_module_names) - called
        self.free = free - self.modules
        self.explicit = explicit
        self.replaced: set[str] = set()

    def defined(self, names: list[str]) -> None:
        """Told what the code defines."""
        if self.free <= BUILT_IN and not self.explicit:
            own = self.free & set(names)
            self.replaced = own if len(own) == 1 else set()

    def __missing__(self, name: str) -> Any:
        if name in self.modules:
            return importlib.import_module(name)
        if name.startswith("__") or name in BUILT_IN - self.replaced:
            raise KeyError(name)
        return self.link.named(name)


class Solution(types.ModuleType):
    """The code as a module that tests may import from."""

    def __init__(self, link: Link) -> None:
        super().__init__("solution")
        vars(self)["_link"] = link

    def __getattr__(self, name: str) -> Any:
        link = vars(self)["_link"]
        if name == "__all__":  # of `import *`; the names are looked up when needed
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return link.named(name)
        except KeyError:
            raise AttributeError(f"the code defines no {name!r}") from None


def describe(error: BaseException) -> str:
    """The error in a line."""
    try:
        lines = f"{type(error).__name__}: {error}".split("\n")
        return lines[0][:300]
    except BaseException:  # its own __str__ raised
        return "an error that cannot be shown"


def judge(task: dict[str, Any], candidate: sandbox.Candidate, report: int) -> str:
    """Why the tests ended; "" after the last one passed."""
    compiled = [
        compile(test, f"<test {n}>", "exec", dont_inherit=True)
        for n, test in enumerate(task["tests"], start=1)
    ]
    link = Link(candidate.requests, candidate.replies)
    names = Names(link, task["tests"])
    sys.modules["solution"] = sys.modules["__main__"] = Solution(link)
    try:
        link.load(task.pop("code"))
        names.defined(link.defined)
    except BaseException as error:
        return link.over or describe(error)
    for test in compiled:
        try:
            exec(test, names)
        except BaseException as error:  # SystemExit too: the tests that are left count
            return link.over or link.refused or describe(error)
        if link.over or link.refused:  # which the test itself has caught
            return link.over or link.refused
        os.write(report, b"passed\n")
    return ""


def main() -> None:
    """Starts the other process, reads the task and judges."""
    report, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    sys.argv[1:] = []
    try:
        candidate = sandbox.start(settings)
    except sandbox.NotStarted as error:
        sys.exit(f"{error}")
    task = json.loads(sys.stdin.buffer.read())
    sandbox.hide_memory()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    limits = ("seconds", "memory", "file_size")
    guard.limits(**{name: settings[name] for name in limits})
    guard.forbid_processes()
    sys.addaudithook(guard.guard(os.path.realpath(os.getcwd())))
    os.write(report, f"ready {candidate.way} {candidate.why}\n".encode())
    shown = io.StringIO() if task.pop("show", False) else None
    if shown is not None:
        sys.stdout = shown
    why = judge(task, candidate, report)
    if shown is not None:
        os.write(report, f"printed {json.dumps(shown.getvalue()[:SHOWN])}\n".encode())
    os.write(report, f"end {why[:300]}\n".encode("utf-8", "replace"))
    os._exit(0)
