"""Is a generated Python program right? Its unit tests say so, in a process of its own.

    response ─extract─> code ─run_tests─> Verdict(passed, total, why)

What the process may not do: take more time, processor time or memory than it is given,
start processes or threads, use a network, touch files outside a temporary folder that
goes with it, or see this process's environment. What cannot earn a verdict: printing,
exiting (`sys.exit(0)`, `os._exit(0)`, `atexit`) and replacing builtins: only a process
that ran all tests knows what to report.

This stops accidents and naive cheating. It is **no security boundary**: the code and
its tests share an interpreter, whose audit hook and resource limits a determined
adversary gets around (by frames, a path below another's descriptor, a database that is
attached). A test of `==` is passed by an object that equals anything, and one that
calls `abs` or `math.isclose` by code that has defined or replaced it: compare with
operators, or read the code first. Run what you do not trust in a container or a
virtual machine besides. Limits and hook
are those of Linux; other systems have fewer of them. On Python 3.12 or newer the
process also leaves the network by a namespace where the system lets it.

Worker processes import this module: it loads no JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

RUNNER = Path(__file__).with_name("code_runner.py")
READY = b"ready\n"  # of the runner
START_SECONDS = 60.0  # an interpreter takes a tenth of one, on a machine that is free
GRACE_SECONDS = 2.0  # the runner ends itself; after these it is ended

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)\b[^\n]*\n(.*?)(?:^[ \t]*```|\Z)",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)


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

    A verifier (`roles/verifiers.py`) that starts a process a response: run it in a
    `verification.VerifierPool`, whose timeout should be above `seconds`.
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

    def __post_init__(self) -> None:
        for name, most in {
            "seconds": self.seconds,
            "memory": self.memory,
            "file_size": self.file_size,
        }.items():
            if not 0 < most < float("inf"):
                raise _input_error(
                    f"{name}: expected a finite number above 0, got {most}; choose "
                    f"{name} > 0"
                )

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
        )


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
) -> Verdict:
    """Runs the code, then its tests, in a process that is gone afterwards.

    Args:
      code: Python, with the standard library and nothing else to import.
      tests: pieces of Python, run in order among what the code defines.
      seconds, memory, file_size: as `PythonTests`.

    Raises:
      RuntimeError: the process did not start: this is not the code's fault.
    """
    nonce = secrets.token_hex(16)
    task = {
        "nonce": nonce,
        "code": code,
        "tests": list(tests),
        "seconds": seconds,
        "memory": memory,
        "file_size": file_size,
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True)
        )
        said = stack.enter_context(tempfile.TemporaryFile())  # before it is ready
        ours, theirs = os.pipe()
        stack.callback(os.close, ours)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", RUNNER, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=said,
                cwd=folder,
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
        if _receive(ours, len(READY), seconds=START_SECONDS) != READY:
            _end(process)
            said.seek(0)
            raise RuntimeError(
                f"the process for generated code did not start (status "
                f"{process.returncode}): {said.read().decode(errors='replace')[-500:]}"
            )
        report = _receive(ours, select.PIPE_BUF, seconds=seconds + GRACE_SECONDS)
        return _verdict(report, nonce=nonce, total=len(tests))


def _verdict(report: bytes, *, nonce: str, total: int) -> Verdict:
    said, _, rest = report.decode(errors="replace").partition(" ")
    if said != nonce:
        return Verdict(0, total, "its process ended before the tests did")
    passed, _, why = rest.partition(" ")
    return Verdict(int(passed), total, why)


def _receive(pipe: int, size: int, *, seconds: float) -> bytes:
    """What is written at once, at most `size` bytes; b"" at the end or too late."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return os.read(pipe, size) if poll.poll(seconds * 1000) else b""


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
