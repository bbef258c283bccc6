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

import dataclasses
import functools
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlhf_jax.verification.code import trial
from rlhf_jax.verification.code.trial import Ran, Verdict

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)\b[^\n]*\n(.*?)(?:^[ \t]*```|\Z)",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)


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
        for name, most in self._limits.items():
            if not 0 < most < float("inf"):
                # Its neighbours' checks load JAX, of which these processes have no use.
                from rlhf_jax.functional.errors import InputError

                raise InputError(
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
        gold = row[self.field]
        tests = [gold] if isinstance(gold, str) else gold
        if not isinstance(tests, list) or not all(isinstance(t, str) for t in tests):
            raise ValueError(
                f"expected a text or a list of texts in {self.field!r}, got "
                f"{gold!r:.60}"
            )
        if not any(test.strip() for test in tests):
            raise ValueError(f"expected a test in {self.field!r}, got {gold!r}")
        for test in tests:
            try:
                compile(test, "<test>", "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                raise ValueError(
                    f"expected Python in {self.field!r}, got {test!r:.60} ({error})"
                ) from None
        return tests

    def run(self, code: str, tests: Sequence[str]) -> Verdict:
        """What `trial.run_tests` says of the code, with these limits."""
        return trial.run_tests(code, tests, **self._limits)

    def show(self, code: str) -> Ran:
        """What `trial.run_code` says of the code, with these limits."""
        return trial.run_code(code, **self._limits)

    @property
    def _limits(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "memory": self.memory,
            "file_size": self.file_size,
            "disk": self.disk,
        }


@functools.cache
def _say_isolation() -> None:
    print(f"code verifier: generated code runs {trial.isolation()}", file=sys.stderr)


def last_block(response: str) -> str | None:
    """The code of the last ```python block, without what all its lines are indented by.

    One that is cut off counts to its end.
    """
    blocks = _BLOCK.findall(response)
    return textwrap.dedent(blocks[-1]) if blocks else None
