"""Is a generated Python program right? Its unit tests say so, in a process apart.

    response ─extract─> code ─run_tests─> Verdict(passed, total, why)

The code runs in one process and its tests in another, `judge`. The code is handed
the arguments of a call and returns a value; it sees neither the tests nor what they
expect. The judge compares values of Python's own types; an object of a class of the
code's is equal to nothing (`remote`).

What the code may not do: take more time, processor time, memory or disk than it is
given, start processes or threads, use a network, touch files outside a folder that goes
with it, or see this process's environment. Printing, exiting, replacing builtins and
walking frames earn nothing.

On Linux its process has namespaces of its own where the system grants them, else those
of `bubblewrap` where that is installed: no network, no other processes, and of the
files what Python reads, read-only. `isolation()` and a line on standard error say
which. Where neither is there, limits of the system and an audit hook remain. They stop
accidents and naive cheating and are **no security boundary**. Namespaces share the
kernel, and no system call is filtered: run what you do not trust at all in a virtual
machine besides.

Between the two processes pass numbers, texts, containers of them (at most 100 deep, 16
MiB a message) and a few types of the library, as copies whose types are kept: `==` is
Python's, to which 1, 1.0 and True are equal. Objects of the code's classes stay with it
and are used by their methods, attributes and items; functions of the tests may be
handed to the code, objects of the tests' own classes may not. A call that returns None
may change the lists, dicts and sets it was handed; another may not.

What a test leaves to the code remains with the code: two results of the code that are
compared with one another, or with what it made of an argument.

Worker processes import this module: it loads no JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_jax.verification.code import folder, judge, runner, sandbox

WAYS = sandbox.WAYS  # in which the code is set apart; the first that works
PACKAGE = str(Path(__file__).parents[2])
JUDGE = sandbox.START.format(judge.__name__)
START_SECONDS = 60.0  # an interpreter takes a tenth of one, on a machine that is free
WATCH_SECONDS = 0.05  # between two looks at a folder on disk

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)\b[^\n]*\n(.*?)(?:^[ \t]*```|\Z)",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)


class Isolation(NamedTuple):
    """How the code was set apart from the system."""

    way: str  # "namespaces", "bubblewrap" or "none"
    why: str  # what failed of those before it

    def __str__(self) -> str:
        if self.way == "none":
            return (
                f"without namespaces or bubblewrap ({self.why}): limits and an audit "
                f"hook alone, which are no security boundary"
            )
        other = f"; {self.why}" if self.why else ""
        return f"apart from files, network and processes, by {self.way}{other}"


class Verdict(NamedTuple):
    """What became of some code."""

    passed: int  # tests, in order, before one failed
    total: int  # tests
    why: str  # the first error, or what ended the process; "" if all passed

    @property
    def right(self) -> bool:
        """Every test ran and passed."""
        return self.passed == self.total


@dataclasses.dataclass(frozen=True)
class PythonTests:
    """1 where the code in the response passes every test of its row, else 0.

    A verifier (`roles/rewards/verifiers.py`) that starts processes for a response: run
    it in a `verification.pool.VerifierPool`, whose timeout should be above `seconds`.
    """

    field: str = "tests"
    """Of the row: a text, or a list of them, each a piece of Python that raises unless
    the code is right, as `assert add(2, 3) == 5`. They see what the code defines, and
    what the tests before them do."""
    extract: Literal["last_block", "whole"] = "last_block"
    """The code is the last ```python block of the response, or all of it."""
    seconds: float = 5.0
    """For the code and all of its tests together."""
    memory: int = 512
    """Address space, MiB."""
    file_size: int = 16
    """Of each file it writes, MiB."""
    disk: int = 64
    """Of all files together, MiB; there may be 10,000."""

    def __post_init__(self) -> None:
        for name, most in {
            "seconds": self.seconds,
            "memory": self.memory,
            "file_size": self.file_size,
            "disk": self.disk,
        }.items():
            if not 0 < most < float("inf"):
                raise _input_error(
                    f"{name}: expected a finite number above 0, got {most}; choose "
                    f"{name} > 0"
                )
        _say_isolation()

    def __call__(self, prompt: str, response: str, row: Mapping[str, Any]) -> float:
        tests = self.gold(row)
        code = response if self.extract == "whole" else last_block(response)
        return 0.0 if code is None else float(self.run(code, tests).right)

    def gold(self, row: Mapping[str, Any]) -> list[str]:
        """The tests of a row; ValueError if there are none, or one is not Python."""
        if self.field not in row:
            raise ValueError(
                f"expected a field {self.field!r}, got {', '.join(map(repr, row))}; "
                f"add it, or name the field that holds the tests"
            )
        said = row[self.field]
        tests = [said] if isinstance(said, str) else said
        if not isinstance(tests, list) or not all(isinstance(t, str) for t in tests):
            raise ValueError(
                f"expected a text or a list of texts in {self.field!r}, got "
                f"{said!r:.60}"
            )
        if not any(test.strip() for test in tests):
            raise ValueError(f"expected a test in {self.field!r}, got {said!r}")
        for test in tests:
            try:
                compile(test, "<test>", "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                raise ValueError(
                    f"expected Python in {self.field!r}, got {test!r:.60} ({error})"
                ) from None
        return tests

    def run(self, code: str, tests: Sequence[str]) -> Verdict:
        """`run_tests` with these limits."""
        return run_tests(
            code,
            tests,
            seconds=self.seconds,
            memory=self.memory,
            file_size=self.file_size,
            disk=self.disk,
        )


@functools.cache
def isolation() -> Isolation:
    """How generated code is set apart here; runs a program to see."""
    task: dict[str, Any] = {"code": "", "tests": []}
    limits = {"seconds": START_SECONDS, "memory": 512, "file_size": 1, "disk": 1}
    return _run(task, **limits)[1]


@functools.cache
def _say_isolation() -> None:
    print(f"code verifier: generated code runs {isolation()}", file=sys.stderr)


def last_block(response: str) -> str | None:
    """The code of the last ```python block, without what all its lines are indented by.

    One that is cut off counts to its end.
    """
    found = _BLOCK.findall(response)
    return textwrap.dedent(found[-1]) if found else None


def run_tests(
    code: str,
    tests: Sequence[str],
    *,
    seconds: float = 5.0,
    memory: int = 512,
    file_size: int = 16,
    disk: int = 64,
) -> Verdict:
    """Runs the code and its tests, in two processes that are gone afterwards.

    Args:
      code: Python, with the standard library and nothing else to import.
      tests: pieces of Python, run in order. A name that they do not define is the
        code's (`judge.Names`).
      seconds, memory, file_size, disk: as `PythonTests`.

    Raises:
      RuntimeError: the process did not start: this is not the code's fault.
    """
    return _run(
        {"code": code, "tests": [*tests]},
        seconds=seconds,
        memory=memory,
        file_size=file_size,
        disk=disk,
    )[0]


def _run(task: dict[str, Any], **limits: float) -> tuple[Verdict, Isolation]:
    settings = {
        "folder": tempfile.mkdtemp(prefix="code-"),
        "ways": WAYS,
        "start": sandbox.START.format(runner.__name__),
        **limits,
    }
    with contextlib.ExitStack() as stack:
        stack.callback(folder.remove, settings["folder"])
        said = stack.enter_context(tempfile.TemporaryFile())  # before it is ready
        ours, theirs = os.pipe()
        stack.callback(os.close, ours)
        told = [PACKAGE, str(theirs), json.dumps(settings)]
        try:
            process = subprocess.Popen(
                [sys.executable, *["-I", "-S", "-B", "-X", "utf8", "-c"], JUDGE, *told],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=said,
                cwd=settings["folder"],
                env={},
                pass_fds=(theirs,),
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        stack.callback(_end, process)
        assert process.stdin is not None  # a pipe
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(task).encode())
        lines = _Lines(ours)
        started = lines.next(time.monotonic() + START_SECONDS)
        if started is None or not started.startswith("ready "):
            _end(process)
            said.seek(0)
            raise RuntimeError(
                f"the process for generated code did not start (status "
                f"{process.returncode}): {said.read().decode(errors='replace')[-500:]}"
            )
        isolation = Isolation(*started.split(" ", 2)[1:])
        watched = None if isolation.way == "namespaces" else settings["folder"]
        seconds, disk = limits["seconds"], limits["disk"]
        passed, why = _follow(lines, watched, seconds=seconds, disk=disk)
        return Verdict(passed, len(task["tests"]), why), isolation


def _follow(
    lines: _Lines, watched: str | None, *, seconds: float, disk: float
) -> tuple[int, str]:
    """How many tests passed, and why that was not all of them."""
    passed, end = 0, time.monotonic() + seconds
    while True:
        now = time.monotonic()
        if now > end:
            return passed, f"took longer than {seconds:g} s"
        line = lines.next(end if watched is None else min(end, now + WATCH_SECONDS))
        if line == "passed":
            passed += 1
        elif line == "":  # a test ended the judge: nothing that it said counts
            return 0, "its process ended before the tests did"
        elif line is not None:
            return passed, line.removeprefix("end").strip()
        if watched is not None:
            why = folder.too_much(watched, disk=disk, files=sandbox.FILES)
            if why:
                return passed, why


class _Lines:
    """What the judge writes, a line at a time."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.held = pipe, b""
        self.poll = select.poll()
        self.poll.register(pipe, select.POLLIN)

    def next(self, end: float) -> str | None:
        """A line; "" if there will be none, None if there is none by `end`."""
        while b"\n" not in self.held:
            if not self.poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return None
            read = os.read(self.pipe, 2**16)
            if not read:
                return ""
            self.held += read
        line, _, self.held = self.held.partition(b"\n")
        return line.decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and whatever is in its session, and waits for it."""
    if process.returncode is None:  # else its number may be another's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _input_error(message: str) -> ValueError:
    # Not imported above: processes that verify have no use for JAX, which it loads.
    from rlhf_jax.functional.checks import InputError

    return InputError(message)
