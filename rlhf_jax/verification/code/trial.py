"""One trial of generated code: runs its tests and returns a verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_jax.verification.isolation import processes
from rlhf_jax.verification.isolation.processes import isolation


class Verdict(NamedTuple):
    """The outcome of some code and its tests."""

    passed: int  # tests that passed, in order, before one failed
    total: int  # tests
    why: str  # the first error, or what ended the process; "" if all passed
    suspicious: bool = False  # the code did what no right program does
    printed: str = ""  # the first `judge.SHOWN` characters, of `run_code`

    @property
    def right(self) -> bool:
        """Whether every test passed."""
        return self.passed == self.total

    @property
    def refused(self) -> bool:
        """Whether the failure may be the verifier's, which cannot judge these tests."""
        return self.why.startswith("refused: ")

    @property
    def timed_out(self) -> bool:
        """Whether the code exceeded its time limit."""
        return self.why.startswith("took longer than ")


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
    """Runs the code and its tests in two processes, which end before it returns.

    Args:
      code: Python source; it may import the standard library and NumPy.
      tests: Python sources, run in order. Names that they do not define are looked up
        in the code (`unit_tests.Names`).
      seconds: time limit of all tests together.
      memory, file_size, disk: MiB of address space, of each file, and of all files.
      unsafe: run the code even if the system cannot isolate it.

    Raises:
      InputError: the system cannot isolate the code, and not `unsafe`.
      NotStarted: a process did not start.
    """
    limits = {"seconds": seconds, "memory": memory, "file_size": file_size}
    task = {"code": code, "tests": [*tests], "show": False}
    return _run(task, unsafe, **limits, disk=disk)


def run_code(code: str, *, unsafe: bool, **limits: float) -> Verdict:
    """Runs the code without tests, and returns what it prints, "" if its time ran out.

    Options as in `run_tests`.
    """
    task = {"code": code, "tests": [], "show": True}
    return _run(task, unsafe, **limits)


def _run(task: dict[str, Any], unsafe: bool, **limits: float) -> Verdict:
    way = isolation().required(unsafe=unsafe).way
    passed, total, printed = 0, len(task["tests"]), ""
    with processes.started(task, way=way, limits=limits) as lines:
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "passed":
                passed += 1
            elif word == "printed":
                printed = json.loads(rest)
            elif word == "end":
                suspicious, _, why = rest.partition(" ")
                return Verdict(passed, total, why, suspicious == "1", printed)
            elif word == "over:":
                return Verdict(passed, total, rest, printed=printed)
            else:  # the judge ended before its `end`: its reports do not count
                break
    why = "its process ended before the tests did"
    return Verdict(0, total, why, suspicious=True, printed=printed)
