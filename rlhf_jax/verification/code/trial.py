"""One trial of generated code: its process, its judge, and what they report."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax.verification.code import judge, runner
from rlhf_jax.verification.isolation import folder, ways

OURS = str(Path(__file__).parents[2])
# Runs the `main` of one of our modules, without what the package loads besides.
START = (
    "import sys; sys.modules['rlhf_jax'] = package = type(sys)('rlhf_jax'); "
    "package.__path__ = [sys.argv.pop(1)]; from {0} import main; main()"
)
INTERPRETER = (ways.python(), "-I", "-S", "-B", "-X", "utf8", "-c")
START_SECONDS = 60.0  # an interpreter takes a tenth of one, on a machine that is free
WATCH_SECONDS = 0.05  # between two looks at a folder on disk


class Isolation(NamedTuple):
    """How the code was set apart from the system."""

    way: str  # one of `ways.WAYS`
    why: str  # what failed of those before it

    def __str__(self) -> str:
        if self.way == "none":
            return f"without isolation ({self.why}): limits alone, no security boundary"
        other = f"; {self.why}" if self.why else ""
        return f"apart from files, network and processes, by {self.way}{other}"


class Verdict(NamedTuple):
    """What became of some code."""

    passed: int  # tests, in order, before one failed
    total: int  # tests
    why: str  # the first error, or what ended the process; "" if all passed
    suspicious: bool = False  # it answered as no right program does

    @property
    def right(self) -> bool:
        """Every test ran and passed."""
        return self.passed == self.total

    @property
    def refused(self) -> bool:
        """The failure may be this verifier's: the tests ask for more than it judges."""
        return self.why.startswith("refused: ")

    @property
    def timed_out(self) -> bool:
        """It took too long."""
        return self.why.startswith("took longer than ")


class Ran(NamedTuple):
    """What some code did without tests."""

    printed: str  # the first characters; nothing where its time was over
    why: str  # the error it raised, or what ended the process; "" if nothing did


class NotIsolated(RuntimeError):
    """Nothing sets generated code apart here."""


@functools.cache
def isolation() -> Isolation:
    """How generated code is set apart here; runs a program to see."""
    reasons: list[str] = []
    for way in ways.WAYS:
        try:
            limits = {"seconds": START_SECONDS, "memory": 512, "file_size": 1, "disk": 1}
            _start({"code": "", "tests": [], "show": False}, way=way, **limits)
            return Isolation(way, "; ".join(reasons))
        except (OSError, ImportError, RuntimeError) as error:
            reasons.append(f"{way}: {error}".split("\n")[0][-200:])
    raise RuntimeError("; ".join(reasons))


def require(*, unsafe: bool) -> Isolation:
    """`isolation`, which is to be one.

    Raises:
      NotIsolated: it is "none", and that is not what `unsafe` allows.
    """
    found = isolation()
    if found.way == "none" and not unsafe:
        raise NotIsolated(
            f"expected a system that sets generated code apart, got none "
            f"({found.why}); install bubblewrap, or run on Linux 5.13 or newer with "
            f"libseccomp, or accept the risk by --unsafe-verifier"
        )
    return found


def run_tests(
    code: str,
    tests: Sequence[str],
    *,
    seconds: float = 5.0,
    memory: int = 512,
    file_size: int = 16,
    disk: int = 64,
    unsafe: bool = False,
) -> Verdict:
    """Runs the code and its tests, in two processes that are gone afterwards.

    Args:
      code: Python, with the standard library and NumPy to import.
      tests: pieces of Python, run in order. A name that they do not define is the
        code's (`names.Names`).
      seconds, memory, file_size, disk: limits in seconds and MiB.
      unsafe: also where nothing sets the code apart.

    Raises:
      NotIsolated: nothing does. RuntimeError: a process did not start: this is not the
        code's fault.
    """
    limits = {"seconds": seconds, "memory": memory, "file_size": file_size, "disk": disk}
    task = {"code": code, "tests": [*tests], "show": False}
    return _start(task, way=require(unsafe=unsafe).way, **limits)[0]


def run_code(code: str, *, unsafe: bool, **limits: float) -> Ran:
    """Runs the code as `run_tests` does, to see what it prints."""
    task = {"code": code, "tests": [], "show": True}
    verdict, printed = _start(task, way=require(unsafe=unsafe).way, **limits)
    return Ran(printed, verdict.why)


def _start(task: dict[str, Any], *, way: str, **limits: float) -> tuple[Verdict, str]:
    task["nonce"] = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:

        def opened(end: int, mode: str) -> Any:
            return stack.enter_context(open(end, mode, buffering=0))

        def pipe() -> tuple[Any, Any]:
            ours, theirs = os.pipe()
            return opened(ours, "rb"), opened(theirs, "wb")

        place = tempfile.mkdtemp(prefix="code-")
        stack.callback(folder.remove, place)
        errors = stack.enter_context(tempfile.TemporaryFile())  # before it is ready
        settings: dict[str, Any] = {
            **limits,
            "folder": ways.INSIDE if way == "bubblewrap" else place,
            "numpy": ways.numpy_folder(),
            "ruleset": None,
        }
        before, package = [], OURS
        if way == "bubblewrap":
            before, package = ways.bubblewrap(place), ways.PACKAGE
        elif way == "landlock":
            settings["filter"] = ways.seccomp().hex()
            ruleset = opened(ways.landlock(place), "rb")
            settings["ruleset"] = ruleset.fileno()
        to_read, requests = pipe()
        replies, to_write = pipe()
        ours, report = pipe()

        def start(module: str, own: dict[str, Any], **options: Any) -> Any:
            words = [*INTERPRETER, START.format(module), package, json.dumps(own)]
            process = subprocess.Popen(
                words if options["stdin"] == subprocess.PIPE else [*before, *words],
                stderr=errors,
                cwd=place,
                env={},
                start_new_session=True,
                **options,
            )
            stack.callback(_end, process)
            return process

        passed_on = () if settings["ruleset"] is None else (settings["ruleset"],)
        start(
            runner.__name__,
            settings,
            stdin=to_read,
            stdout=to_write,
            pass_fds=passed_on,
        )
        package, files = OURS, (report, requests, replies)
        pipes = tuple(file.fileno() for file in files)
        judging = start(
            judge.__name__,
            settings | {"pipes": pipes},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=pipes,
        )
        for file in (to_read, to_write, *files):
            file.close()
        with contextlib.suppress(BrokenPipeError), judging.stdin:
            judging.stdin.write(json.dumps(task).encode())
        lines = _Lines(ours.fileno(), task["nonce"])
        if lines.next(time.monotonic() + START_SECONDS) != "ready":
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-300:]
            raise RuntimeError(f"the process for generated code did not start: {said}")
        verdict = _follow(lines, place, limits["seconds"], limits["disk"])
        return verdict[0]._replace(total=len(task["tests"])), verdict[1]


def _follow(
    lines: _Lines, watched: str, seconds: float, disk: float
) -> tuple[Verdict, str]:
    """How many tests passed, why that was not all of them, and what was printed."""
    passed, printed, end = 0, "", time.monotonic() + seconds

    def verdict(why: str, *, suspicious: bool = False) -> tuple[Verdict, str]:
        return Verdict(passed, 0, why, suspicious), printed

    while True:
        now = time.monotonic()
        if now > end:
            return verdict(f"took longer than {seconds:g} s")
        line = lines.next(min(end, now + WATCH_SECONDS))
        if line == "passed":
            passed += 1
        elif line == "":  # a test ended the judge: nothing that it said counts
            passed = 0
            return verdict("its process ended before the tests did", suspicious=True)
        elif line is not None and line.startswith("printed "):
            printed = json.loads(line.removeprefix("printed "))
        elif line is not None and line.startswith("end "):
            _, suspicious, why = line.split(" ", 2)
            return verdict(why, suspicious=suspicious == "1")
        if why := folder.too_much(watched, disk=disk):
            return verdict(why)


class _Lines:
    """What the judge writes, a line at a time."""

    def __init__(self, pipe: int, nonce: str) -> None:
        self.pipe, self.nonce, self.buffer = pipe, f"{nonce} ", b""
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
        text = line.decode(errors="replace")
        return text.removeprefix(self.nonce) if text.startswith(self.nonce) else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and whatever is in its session, and waits for it."""
    if process.returncode is None:  # else its number may be another's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
