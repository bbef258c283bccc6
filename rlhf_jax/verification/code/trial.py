"""One trial of generated code: its process, its judge, and what they report."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax.verification.code import folder, judge, runner, sandbox

WAYS = sandbox.WAYS  # in which the code is set apart; the first that works
PACKAGE = str(Path(__file__).parents[2])
JUDGE = sandbox.START.format(judge.__name__)
START_SECONDS = 60.0  # an interpreter takes a tenth of one, on a machine that is free
WATCH_SECONDS = 0.05  # between two looks at a folder on disk


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


class Ran(NamedTuple):
    """What some code did without tests."""

    printed: str  # the first characters; nothing where its time was over
    why: str  # the error it raised, or what ended its process; "" if nothing did


@functools.cache
def isolation() -> Isolation:
    """How generated code is set apart here; runs a program to see."""
    task: dict[str, Any] = {"code": "", "tests": []}
    limits = {"seconds": START_SECONDS, "memory": 512, "file_size": 1, "disk": 1}
    return _start(task, **limits)[1]


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
      seconds, memory, file_size, disk: limits in seconds and bytes.

    Raises:
      RuntimeError: the process did not start: this is not the code's fault.
    """
    limits = {"seconds": seconds, "memory": memory, "file_size": file_size}
    verdict, _, _ = _start({"code": code, "tests": [*tests]}, **limits, disk=disk)
    return verdict


def run_code(
    code: str, *, seconds: float, memory: int, file_size: int, disk: int
) -> Ran:
    """Runs the code as `run_tests` does, to see what it prints."""
    task = {"code": code, "tests": [], "show": True}
    limits = {"seconds": seconds, "memory": memory, "file_size": file_size}
    verdict, _, printed = _start(task, **limits, disk=disk)
    return Ran(printed, verdict.why)


def _start(task: dict[str, Any], **limits: float) -> tuple[Verdict, Isolation, str]:
    settings = {
        "folder": tempfile.mkdtemp(prefix="code-"),
        "ways": WAYS,
        "start": sandbox.START.format(runner.__name__),
        **limits,
    }
    with contextlib.ExitStack() as stack:
        stack.callback(folder.remove, settings["folder"])
        errors = stack.enter_context(tempfile.TemporaryFile())  # before it is ready
        ours, theirs = os.pipe()
        stack.callback(os.close, ours)
        words = [PACKAGE, str(theirs), json.dumps(settings)]
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    *["-I", "-S", "-B", "-X", "utf8", "-c"],
                    JUDGE,
                    *words,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
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
            errors.seek(0)
            raise RuntimeError(
                f"the process for generated code did not start (status "
                f"{process.returncode}): "
                f"{errors.read().decode(errors='replace')[-500:]}"
            )
        isolation = Isolation(*started.split(" ", 2)[1:])
        watched = None if isolation.way == "namespaces" else settings["folder"]
        seconds, disk = limits["seconds"], limits["disk"]
        passed, why, printed = _follow(lines, watched, seconds=seconds, disk=disk)
        return Verdict(passed, len(task["tests"]), why), isolation, printed


def _follow(
    lines: _Lines, watched: str | None, *, seconds: float, disk: float
) -> tuple[int, str, str]:
    """How many tests passed, why that was not all of them, and what was printed."""
    passed, printed, end = 0, "", time.monotonic() + seconds
    while True:
        now = time.monotonic()
        if now > end:
            return passed, f"took longer than {seconds:g} s", printed
        line = lines.next(end if watched is None else min(end, now + WATCH_SECONDS))
        if line == "passed":
            passed += 1
        elif line == "":  # a test ended the judge: nothing that it said counts
            return 0, "its process ended before the tests did", printed
        elif line is not None and line.startswith("printed "):
            printed = json.loads(line.removeprefix("printed "))
        elif line is not None:
            return passed, line.removeprefix("end").strip(), printed
        if watched is not None:
            why = folder.too_much(watched, disk=disk, files=sandbox.FILES)
            if why:
                return passed, why, printed


class _Lines:
    """What the judge writes, a line at a time."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.buffer = pipe, b""
        self.poll = select.poll()
        self.poll.register(pipe, select.POLLIN)

    def next(self, end: float) -> str | None:
        """A line; "" if there will be none, None if there is none by `end`."""
        while b"\n" not in self.buffer:
            if not self.poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return None
            read = os.read(self.pipe, 2**16)
            if not read:
                return ""
            self.buffer += read
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and whatever is in its session, and waits for it."""
    if process.returncode is None:  # else its number may be another's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
