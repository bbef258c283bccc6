"""Guess a number: higher, lower, and a reward for success in few guesses.

prompt        Guess a number from 1 to 20.⏎
response      10
observation   higher⏎
response      15
observation   lower⏎
response      12                    reward 1, less the cost of two guesses
"""

from __future__ import annotations

import dataclasses
import random
import re
from typing import NamedTuple

from rlhf_jax.environments.protocol import Row, Started, Turn, Written
from rlhf_jax.functional.errors import expect_between

_NUMBER = re.compile(r"(?<![0-9])-?[0-9]{1,9}(?![0-9])")
MOST = 10**9 - 1  # that the environment reads


class State(NamedTuple):
    """The state of an episode."""

    number: int
    guesses: int


@dataclasses.dataclass(frozen=True)
class Guessing:
    """Rows with `number`, to be guessed by the last number of a response."""

    largest: int = 20
    """Largest number; the smallest is 1."""
    max_guesses: int = 8
    """Guesses after which the episode ends without a reward."""
    guess_cost: float = 0.1
    """Cost of each wrong guess, subtracted from the reward of 1, down to 0."""

    def __post_init__(self) -> None:
        expect_between(1, MOST, largest=self.largest, max_guesses=self.max_guesses)

    def reset(self, row: Row) -> Started:
        """Returns the task."""
        return Started(
            f"Guess a number from 1 to {self.largest}.\n", State(int(row["number"]), 0)
        )

    def step(self, state: State, response: str) -> Turn:
        """Answers whether the number is higher or lower."""
        numbers = _NUMBER.findall(response)
        guess = int(numbers[-1]) if numbers else None
        if guess == state.number:
            return Turn("", max(0.0, 1 - self.guess_cost * state.guesses), True, None)
        guesses = state.guesses + 1
        if guesses >= self.max_guesses:
            return Turn("", 0.0, True, None)
        if guess is None:
            observation = "a number, please"
        else:
            observation = "higher" if guess < state.number else "lower"
        return Turn(f"{observation}\n", 0.0, False, state._replace(guesses=guesses))


def rows(count: int, *, seed: int, largest: int = 20) -> list[Row]:
    """Draws numbers to guess, all about equally often.

    Args:
      largest: as in the environment.
    """
    expect_between(1, MOST, largest=largest)
    draw = random.Random(seed)
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += draw.sample(range(1, largest + 1), largest)
    return [{"number": number} for number in numbers[:count]]


@dataclasses.dataclass(frozen=True)
class Bisection:
    """The expert: the middle of the remaining interval."""

    largest: int = 20
    """As in the environment."""

    def __call__(self, row: Row, turns: list[Written]) -> str:
        low, high = 1, self.largest
        for guess, observation in zip(turns[::2], turns[1::2], strict=True):
            if str(observation).strip() == "higher":
                low = int(str(guess)) + 1
            else:
                high = int(str(guess)) - 1
        return str((low + high) // 2)
