"""Multi-step arithmetic with a calculator, in a format that a tiny model can learn.

    prompt        (7+5)*3-4⏎
    response      calc: 7+5
    observation   = 12⏎
    response      calc: 12*3
    observation   = 36⏎
    response      calc: 36-4
    observation   = 32⏎
    response      answer: 32

The calculator takes two numbers and one sign. So a model learns what to send and to
copy the result, not arithmetic.
"""

from __future__ import annotations

import dataclasses
import operator
import random
import re
from typing import Any, NamedTuple

from rlhf_jax.environments.protocol import Row, Started, Turn, Written

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LARGEST = 10**12  # larger results are an overflow error
_CALL = re.compile(r"calc:[ \t]*(-?[0-9]{1,12})[ \t]*([-+*])[ \t]*(-?[0-9]{1,12})\Z")
_ANSWER = re.compile(r"answer:[ \t]*(-?[0-9]{1,13})\Z")


class State(NamedTuple):
    """The state of an episode."""

    answer: int
    calls: int


@dataclasses.dataclass(frozen=True)
class Calculator:
    """Rows with `question` and `answer`; the reward is 1 for the right answer.

    The last line of a response is a call, `calc: 12*7`, or the answer, `answer: 84`.
    Anything else is an error that the model reads, and counts as a call.
    """

    max_calls: int = 8
    """Calls after which the episode ends without an answer."""
    call_cost: float = 0.0
    """Cost of each call, subtracted from the reward; 0 is free."""

    def reset(self, row: Row) -> Started:
        """Returns the question on a line of its own."""
        return Started(f"{row['question']}\n", State(int(row["answer"]), 0))

    def step(self, state: State, response: str) -> Turn:
        """Returns the calculator's result, or the score of the answer."""
        line = response.strip().rpartition("\n")[2].strip()
        answer = _ANSWER.match(line)
        if answer is not None:
            return Turn("", float(int(answer[1]) == state.answer), True, None)
        calls = state.calls + 1
        if calls >= self.max_calls:
            return Turn("", -self.call_cost, True, None)
        return Turn(
            f"{_reckoned(line)}\n", -self.call_cost, False, state._replace(calls=calls)
        )


def rows(count: int, *, seed: int, steps: int = 2, largest: int = 9) -> list[Row]:
    """Draws different questions such as (7+5)*3-4.

    Args:
      steps: number of signs of a question.
      largest: largest number in a question.
    """
    draw = random.Random(seed)
    made: dict[str, Row] = {}
    for _ in range(100 * count):  # draws repeat if questions have few steps
        if len(made) == count:
            break
        parts: list[Any] = [draw.randint(1, largest)]
        for _ in range(steps):
            parts += [draw.choice([*SIGNS]), draw.randint(1, largest)]
        question, answer = str(parts[0]), parts[0]
        for place, (sign, number) in enumerate(
            zip(parts[1::2], parts[2::2], strict=True)
        ):
            bare = f"({question})" if place and sign == "*" else question
            question, answer = f"{bare}{sign}{number}", SIGNS[sign](answer, number)
        made[question] = {"question": question, "answer": answer, "parts": parts}
    else:
        if len(made) < count:
            raise ValueError(
                f"expected at most the questions that there are, got {count} of which"
                f" {len(made)} differ; ask for fewer, or for more steps"
            )
    return [*made.values()]


def expert(row: Row, turns: list[Written]) -> str:
    """The expert: calls from left to right with the results so far, then the answer."""
    parts, done = row["parts"], len(turns) // 2
    result = str(parts[0])
    if done:
        result = str(turns[-1]).strip().removeprefix("= ")
    if 2 * done + 1 >= len(parts):
        return f"answer: {result}"
    return f"calc: {result}{parts[2 * done + 1]}{parts[2 * done + 2]}"


def _reckoned(line: str) -> str:
    call = _CALL.match(line)
    if call is None:
        return "error: expected calc: 12*7 or answer: 84"
    left, sign, right = call.groups()
    result = SIGNS[sign](int(left), int(right))
    return f"= {result}" if abs(result) <= LARGEST else "error: overflow"
