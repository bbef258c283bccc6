"""Runs the tests of generated code, which itself runs in another process.

A call of the code's function sends copies of the arguments, and receives copies of the
result and of the arguments as the call left them. Every comparison is made in this
process, between plain values.

The judge reports over a pipe; a nonce begins each message. It reports `ready`; `passed`
for each test that passes; `printed` and a JSON text if the task asks to `show` the
output; then `end`, 1 or 0 for `suspicious`, and why the code failed.
"""

from __future__ import annotations

import gc
import io
import json
import os
import sys
import types

from rlhf_jax.verification.code import wire
from rlhf_jax.verification.code.link import Link
from rlhf_jax.verification.isolation import confined
from rlhf_jax.verification.unit_tests import Flow, Names

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from typing import Any

SHOWN = 10_000  # characters of the code's output that are reported


def solution(link: Link) -> types.ModuleType:
    """Makes the module `solution`, from which tests may import the code's names."""

    def look_up(name: str) -> Any:
        if name == "__all__":  # of `import *`; the names are looked up when needed
            return []
        try:
            if name.startswith("__"):
                raise KeyError(name)
            return link.named(name)
        except KeyError:
            raise AttributeError(f"the code defines no {name!r}") from None

    module = types.ModuleType("solution")
    vars(module)["__getattr__"] = look_up
    return module


def describe(error: BaseException) -> str:
    """Returns the error's class and message in one line."""
    try:
        return f"{type(error).__name__}: {error}".split("\n")[0][:300]
    except BaseException:  # its own __str__ raised
        return "an error that cannot be shown"


def reason(error: BaseException, link: Link, names: Names) -> str:
    """Returns "refused: ..." if the failure may not be the code's fault, else ""."""
    if error is link.raised:
        named = any(f"{name!r}" in f"{error}" for name in names.bound)
        if isinstance(error, ModuleNotFoundError | OSError) or (
            isinstance(error, NameError) and named
        ):
            return f"refused: {describe(error)}"
    elif isinstance(error, AttributeError | TypeError) and (
        link.lost or any(f"'{name}'" in f"{error}" for name in link.class_names)
    ):  # the test used an object of the code's as if it were in this process
        return f"refused: {describe(error)}"
    return f"refused: {link.lost[0]}" if link.lost else ""


def judge(task: dict[str, Any], link: Link, passed: Any) -> str:
    """Runs the tests, and calls `passed` after each; returns why one failed, or ""."""
    compiled = [
        compile(test, f"<test {n}>", "exec", dont_inherit=True)
        for n, test in enumerate(task["tests"], start=1)
    ]
    names = Names(link, task["tests"])
    sys.modules["solution"] = sys.modules["__main__"] = solution(link)
    try:
        names.defined(link.load(task["code"]))
    except BaseException as error:
        return link.over or reason(error, link, names) or describe(error)
    flow = Flow(names)
    compares = [flow.called or flow.compares(tree) for tree in names.trees]
    for number, test in enumerate(compiled):
        link.keeps_arguments = any(compares[number:])  # a later test sees the names
        try:
            exec(test, names)
        except BaseException as error:  # SystemExit must not skip the remaining tests
            return link.over or reason(error, link, names) or describe(error)
        if link.over:  # the test has caught `Over`
            return link.over
        passed()
    return ""


def main() -> None:
    """Reads the task, waits for the code's process and runs the tests."""
    settings = json.loads(sys.argv.pop())
    gc.set_threshold(100_000)  # a message may have as many values
    report, requests, replies = settings["pipes"]
    task = json.loads(sys.stdin.buffer.read())
    confined.no_standard_files()
    confined.limits(settings)
    sys.meta_path.append(confined.NumpyFinder(settings["numpy"]))
    link = Link(requests, replies)

    def say(what: str) -> None:
        text = f"{task['nonce']} {what}".encode("utf-8", "replace")
        os.write(report, len(text).to_bytes(4, "big") + text)  # `Connection`'s framing

    try:
        wire.receive(link.replies)
        say("ready")
    except EOFError:
        os._exit(1)
    shown = io.StringIO() if task["show"] else None
    if shown is not None:
        sys.stdout = shown
    why = judge(task, link, lambda: say("passed"))
    if shown is not None:
        say(f"printed {json.dumps(shown.getvalue()[:SHOWN])}")
    say(f"end {int(link.suspicious)} {why[:300]}".replace("\n", " "))
    os._exit(0)
