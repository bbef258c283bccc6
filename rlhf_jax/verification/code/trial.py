"""One trial of generated code: what became of it, by the report of its judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_jax.verification.code import judge, runner
from rlhf_jax.verification.isolation import processes
from rlhf_jax.verification.isolation.processes import Isolation

PROGRAMS = runner.__name__, judge.__name__


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


def isolation() -> Isolation:
    """How generated code is set apart here; runs a program to see."""
    return processes.isolation(*PROGRAMS)


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
        code's (`unit_tests.Names`).
      seconds, memory, file_size, disk: limits in seconds and MiB.
      unsafe: also where nothing sets the code apart.

    Raises:
      InputError: nothing does. NotStarted: a process did not start.
    """
    limits = {"seconds": seconds, "memory": memory, "file_size": file_size}
    task = {"code": code, "tests": [*tests], "show": False}
    return _run(task, unsafe, **limits, disk=disk)[0]


def run_code(code: str, *, unsafe: bool, **limits: float) -> Ran:
    """Runs the code as `run_tests` does, to see what it prints."""
    task = {"code": code, "tests": [], "show": True}
    verdict, printed = _run(task, unsafe, **limits)
    return Ran(printed, verdict.why)


def _run(task: dict[str, Any], unsafe: bool, **limits: float) -> tuple[Verdict, str]:
    way = isolation().required(unsafe=unsafe).way
    passed, total, printed = 0, len(task["tests"]), ""
    with processes.started(task, *PROGRAMS, way=way, limits=limits) as lines:
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
