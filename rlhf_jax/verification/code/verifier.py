"""Scores generated Python programs by their unit tests, in processes of their own.

    response ─extract─> code ─run_tests─> Verdict(passed, total, why)

The code sees neither the tests nor their expected values. The tests run in `judge`, on
copies of plain values, so no `__eq__` of the code takes part in a comparison. Tests
that need more than plain values are `refused`. A test that compares two results of the
code with each other, or a result with an argument that a call returning None modified,
trusts the code for both sides.

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

from rlhf_jax.functional.errors import refuse
from rlhf_jax.roles.rewards.verifiers import Judged
from rlhf_jax.verification.code import trial
from rlhf_jax.verification.code.trial import Verdict

LIMITS = ("seconds", "memory", "file_size", "disk")
_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)\b[^\n]*\n(.*?)(?:^[ \t]*```|\Z)",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class PythonTests:
    """Scores 1 if the code in the response passes every test of its row, else 0.

    A verifier (`roles/rewards/verifiers.py`) that starts processes for each response.
    Run it in a `verification.pool.VerifierPool` whose timeout is above `seconds`.
    """

    field: str = "tests"
    """Field of the row that holds the tests: a text or a list of texts, each a piece of
    Python that raises unless the code is right, such as `assert add(2, 3) == 5`. Tests
    see the names that the code and earlier tests define."""
    extract: Literal["last_block", "whole"] = "last_block"
    """The code: the last ```python block of the response, or the whole response."""
    seconds: float = 5.0
    """Time limit of the code and all of its tests together, seconds."""
    memory: int = 512
    """Limit of the address space, MiB."""
    file_size: int = 16
    """Limit of the size of each file that the code writes, MiB."""
    disk: int = 64
    """Limit of the size of all files together, MiB; at most 10,000 files."""
    unsafe: bool = False
    """Run the code even if the system cannot isolate it."""

    counts: ClassVar[Sequence[str]] = ("refused", "code_timed_out", "suspicious")

    def __post_init__(self) -> None:
        refuse(
            f"{name}: expected a finite number above 0, got {most}; choose {name} > 0"
            for name, most in self._limits.items()
            if not 0 < most < float("inf")
        )

    def __call__(self, prompt: str, response: str, row: Mapping[str, Any]) -> float:
        return self.judge(prompt, response, row).score

    def judge(self, prompt: str, response: str, row: Mapping[str, Any]) -> Judged:
        """Returns the score, and 1 or 0 for each of `counts`."""
        tests = self.gold(row)
        code = response if self.extract == "whole" else last_block(response)
        return self.judge_code(code, tests)

    def judge_code(self, code: str | None, tests: Sequence[str]) -> Judged:
        """Judges code by tests; None, a response without code, scores 0."""
        if code is None:
            return Judged(0.0, dict.fromkeys(self.counts, 0.0))
        verdict = self.run(code, tests)
        counts = (verdict.refused, verdict.timed_out, verdict.suspicious)
        counted = dict(zip(self.counts, map(float, counts), strict=True))
        return Judged(float(verdict.right), counted)

    def isolated(self, *, unsafe: bool) -> PythonTests:
        """Checks and prints how generated code is isolated; returns the verifier.

        Args:
          unsafe: accept that the system cannot isolate the code.

        Raises:
          InputError: the system cannot isolate the code, and not `unsafe`.
        """
        unsafe = unsafe or self.unsafe
        say_isolation(str(trial.isolation().required(unsafe=unsafe)))
        return dataclasses.replace(self, unsafe=unsafe)

    def gold(self, row: Mapping[str, Any]) -> list[str]:
        """Returns a row's tests; ValueError if there are none or one is not Python."""
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
        """Runs `trial.run_tests` with these limits."""
        return trial.run_tests(code, tests, unsafe=self.unsafe, **self._limits)

    def show(self, code: str) -> Verdict:
        """Runs `trial.run_code` with these limits."""
        return trial.run_code(code, unsafe=self.unsafe, **self._limits)

    @property
    def _limits(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in LIMITS}


@functools.cache
def say_isolation(how: str) -> None:
    """Prints once, on standard error, how generated code is isolated."""
    print(f"code verifier: generated code runs {how}", file=sys.stderr)


def last_block(response: str) -> str | None:
    """Returns the dedented code of the last ```python block; None if there is none.

    A block without a closing fence extends to the end of the response.
    """
    blocks = _BLOCK.findall(response)
    return textwrap.dedent(blocks[-1]) if blocks else None
