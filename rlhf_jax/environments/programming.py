"""Programming tasks: the model runs Python code until it hands in a solution.

    response      Let me see. ```python⏎print(sorted([3, 1]))⏎```
    observation   [1, 3]
    response      FINAL ```python⏎def least(xs): return sorted(xs)[0]⏎```

Code runs in the code verifier's sandbox (`verification/code`). Each block has a process
of its own, so blocks do not see each other's names or files.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from rlhf_jax.environments.protocol import CountedTurn, Row, Started, Turn, Written
from rlhf_jax.verification.code import verifier
from rlhf_jax.verification.code.verifier import PythonTests

# A line that begins with FINAL, unless it assigns to a variable of that name.
_FINAL = re.compile(r"^[ \t]*FINAL\b(?![ \t]*=)", re.MULTILINE)
HOW = (
    "\n\nA ```python block that you write is run, and you read what it prints. When you"
    " are done, write a line FINAL and a block with the whole solution.\n"
)


class State(NamedTuple):
    """The state of an episode."""

    tests: list[str]
    code: str
    """The last block that the model wrote."""
    runs: int


@dataclasses.dataclass(frozen=True)
class Programming:
    """Rows with `prompt` and `tests`; the reward is 1 if the final code passes them.

    The time limit of the pool should be above `tests.seconds`.
    """

    tests: PythonTests = dataclasses.field(default_factory=PythonTests)
    """The verifier, with the field of the tests and the limits of a run."""
    field: str = "prompt"
    """Field of the row with the prompt, a text."""
    max_runs: int = 4
    """Blocks that the model may run; the next response is final."""
    shown: int = 1_000
    """Characters of the output that the model reads."""

    counts: ClassVar[Sequence[str]] = PythonTests.counts

    def isolated(self, *, unsafe: bool) -> Programming:
        """Checks the isolation of generated code (`verifiers.Isolating`)."""
        return dataclasses.replace(self, tests=self.tests.isolated(unsafe=unsafe))

    def reset(self, row: Row) -> Started:
        """Returns the task with instructions on how to run code."""
        prompt = row[self.field]
        if not isinstance(prompt, str):
            raise TypeError(f"expected a text in {self.field!r}, got {prompt!r:.60}")
        return Started(f"{prompt}{HOW}", State(self.tests.gold(row), "", 0))

    def step(self, state: State, response: str) -> Turn:
        """Returns what the code prints, or the score of the final code."""
        block = verifier.last_block(response)
        code = state.code if block is None else block
        runs = state.runs + 1
        if _FINAL.search(response) or runs > self.max_runs:
            judged = self.tests.judge_code(code if code.strip() else None, state.tests)
            return CountedTurn("", judged.score, True, None, counts=judged.counts)
        state = state._replace(code=code, runs=runs)
        if block is None:
            return Turn("error: expected a ```python block\n", 0.0, False, state)
        ran = self.tests.show(block)
        text = ran.printed
        if ran.why:
            ended = not text or text.endswith("\n")
            text += f"error: {ran.why}\n" if ended else f"\nerror: {ran.why}\n"
        if len(text) > self.shown:
            text = f"{text[: self.shown]}...\n"
        return Turn(text or "(no output)\n", 0.0, False, state)


TASKS: tuple[tuple[str, str, Callable[[int, int], int]], ...] = (
    ("the larger of a and b", "max(a, b)", max),
    ("the sum of a and b", "a + b", operator.add),
    ("a minus b", "a - b", operator.sub),
    ("the remainder of a divided by b + 1", "a % (b + 1)", lambda a, b: a % (b + 1)),
    (
        "the sum of the numbers from 1 to a, plus b",
        "sum(range(a + 1)) + b",
        lambda a, b: a * (a + 1) // 2 + b,
    ),
    ("how often b + 1 goes into a", "a // (b + 1)", lambda a, b: a // (b + 1)),
)
PAIRS = ((3, 8), (12, 5), (20, 20), (1, 0))


def rows(count: int) -> list[Row]:
    """Makes small tasks of two whole numbers with tests, repeated in turn."""
    made = []
    for place in range(count):
        task, source, right = TASKS[place % len(TASKS)]
        made.append(
            {
                "prompt": f"Write a function solve(a, b) that returns {task}.",
                "tests": [f"assert solve({a}, {b}) == {right(a, b)}" for a, b in PAIRS],
                "solution": f"def solve(a, b):\n    return {source}\n",
            }
        )
    return made


def expert(row: Row, turns: list[Written]) -> str:
    """The expert: runs the solution once, then hands it in."""
    block = f"```python\n{row['solution']}{{}}```\n"
    if not turns:
        return block.format("print(solve(3, 8))\n")
    return f"FINAL\n{block.format('')}"
