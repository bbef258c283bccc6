"""One trial of generated code: what became of it, by the report of its judge."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_jax.verification.code import judge, runner
from rlhf_jax.verification.isolation import processes, ways


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
    limits = {"seconds": processes.START_SECONDS, "memory": 512, "file_size": 1}
    for way in ways.WAYS:
        try:
            _run({"code": "", "tests": [], "show": False}, way, **limits, disk=1)
        except (OSError, ImportError, processes.NotStarted) as error:
            reasons.append(f"{way}: {error}".split("\n")[0][-200:])
        else:
            return Isolation(way, "; ".join(reasons))
    raise processes.NotStarted("; ".join(reasons))


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
      NotIsolated: nothing does. NotStarted: a process did not start.
    """
    limits = {"seconds": seconds, "memory": memory, "file_size": file_size}
    task = {"code": code, "tests": [*tests], "show": False}
    return _run(task, require(unsafe=unsafe).way, **limits, disk=disk)[0]


def run_code(code: str, *, unsafe: bool, **limits: float) -> Ran:
    """Runs the code as `run_tests` does, to see what it prints."""
    task = {"code": code, "tests": [], "show": True}
    verdict, printed = _run(task, require(unsafe=unsafe).way, **limits)
    return Ran(printed, verdict.why)


def _run(task: dict[str, Any], way: str, **limits: float) -> tuple[Verdict, str]:
    passed, total, printed = 0, len(task["tests"]), ""
    parts: dict[str, Any] = {"code": runner, "judge": judge, "limits": limits}
    with processes.started(task, way=way, **parts) as lines:
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "passed":
                passed += 1
            elif word == "printed":
                printed = json.loads(rest)
            elif word == "end":
                suspicious, _, why = rest.partition(" ")
                return Verdict(passed, total, why, suspicious == "1"), printed
            elif word == "over:":
                return Verdict(passed, total, rest), printed
            else:  # a test ended the judge: nothing that it said counts
                break
    why = "its process ended before the tests did"
    return Verdict(0, total, why, suspicious=True), printed
