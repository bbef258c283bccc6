"""Is a generated Python program right? Its unit tests say so, in a process apart.

    response ─extract─> code ─run_tests─> Verdict(passed, total, why)

The code sees neither the tests nor what they expect. They run in `judge`, on copies of
plain values, which no class of the code's makes equal to what they are not; what they
ask beyond that is `refused`. What a test leaves to the code remains with the code: two
results that are compared with one another, or with what a call that returns None made
of its argument.

Worker processes import this module: it loads no JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from rlhf_jax.functional.errors import InputError
from rlhf_jax.roles.rewards.verifiers import Judged
from rlhf_jax.verification.code import trial
from rlhf_jax.verification.code.trial import Ran, Verdict

LIMITS = ("seconds", "memory", "file_size", "disk")
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
    unsafe: bool = False
    """Runs the code also where nothing sets it apart from the system."""

    counts: ClassVar[Sequence[str]] = ("refused", "code_timed_out", "suspicious")

    def __post_init__(self) -> None:
        for name, most in self._limits.items():
            if not 0 < most < float("inf"):
                raise InputError(
                    f"{name}: expected a finite number above 0, got {most}; choose "
                    f"{name} > 0"
                )

    def __call__(self, prompt: str, response: str, row: Mapping[str, Any]) -> float:
        return self.judge(prompt, response, row).score

    def judge(self, prompt: str, response: str, row: Mapping[str, Any]) -> Judged:
        """The score, and 1 or 0 by each of `counts`."""
        tests = self.gold(row)
        code = response if self.extract == "whole" else last_block(response)
        return self.judge_code(code, tests)

    def judge_code(self, code: str | None, tests: Sequence[str]) -> Judged:
        """`judge` of code by tests, None where there is no code."""
        if code is None:
            return Judged(0.0, dict.fromkeys(self.counts, 0.0))
        verdict = self.run(code, tests)
        counts = (verdict.refused, verdict.timed_out, verdict.suspicious)
        counted = dict(zip(self.counts, map(float, counts), strict=True))
        return Judged(float(verdict.right), counted)

    def isolated(self, *, unsafe: bool) -> PythonTests:
        """It, where generated code is set apart, or where `unsafe` allows otherwise.

        Raises:
          InputError: nothing sets it apart.
        """
        unsafe = unsafe or self.unsafe
        say_isolation(str(trial.isolation().required(unsafe=unsafe)))
        return dataclasses.replace(self, unsafe=unsafe)

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
        return trial.run_tests(code, tests, unsafe=self.unsafe, **self._limits)

    def show(self, code: str) -> Ran:
        """What `trial.run_code` says of the code, with these limits."""
        return trial.run_code(code, unsafe=self.unsafe, **self._limits)

    @property
    def _limits(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in LIMITS}


@functools.cache
def say_isolation(how: str) -> None:
    """On standard error, once."""
    print(f"code verifier: generated code runs {how}", file=sys.stderr)


def last_block(response: str) -> str | None:
    """The code of the last ```python block, without what all its lines are indented by.

    One that is cut off counts to its end.
    """
    blocks = _BLOCK.findall(response)
    return textwrap.dedent(blocks[-1]) if blocks else None
