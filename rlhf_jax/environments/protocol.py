"""What an environment is: a task that answers what the model writes, turn by turn.

    row ──reset──> prompt, state
                   response ──step──> observation, reward, state
                   response ──step──> observation, reward, done

Worker processes import this module: it loads no JAX.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

Row = Mapping[str, Any]  # one row of the user's data, every field of it
Message = dict[str, Any]  # role and content, as a chat template reads them
Written = str | list[Message]  # plain text, or messages for the chat template


class Started(NamedTuple):
    """The beginning of an episode."""

    prompt: Written
    state: Any
    """What `step` is to know; any value that can be pickled."""


class Turn(NamedTuple):
    """What an environment answers to a response."""

    observation: Written
    """What the model reads next; not shown to it if `done`."""
    reward: float
    """Of this turn. The score of an episode is the sum of its rewards."""
    done: bool
    """Whether the episode ends here."""
    state: Any
    """What the next `step` is to know; not read if `done`."""


class CountedTurn(Turn):
    """A turn of a `Counting` environment with what it counts, 0 by other names."""

    counts: Mapping[str, float]

    def __new__(cls, *turn: Any, counts: Mapping[str, float]) -> Self:
        """From the four of a turn in their order."""
        made = super().__new__(cls, *turn)
        made.counts = counts
        return made


@runtime_checkable
class Environment(Protocol):
    """A task of several turns: a function of its arguments, with nothing besides.

    Both methods run in worker processes, one call in this and the next in that one. So
    what an environment remembers stands in its state alone; what it draws at random is
    drawn from the row, or from its state. Either may be a coroutine function: of an
    environment with `async def step` a process has many calls under way.
    """

    def reset(self, row: Row) -> Started | Awaitable[Started]:
        """The prompt and the first state of a row; the same for an equal row."""
        ...

    def step(self, state: Any, response: str) -> Turn | Awaitable[Turn]:
        """The answer to a response; the same for an equal state and response."""
        ...


@runtime_checkable
class Counting(Protocol):
    """An environment that counts more than its rewards say."""

    counts: Sequence[str]
    """Names. Numbers of turns (`CountedTurn`) are added up over an episode, and the
    mean over episodes is logged: reward/NAME."""


def counted(environment: Environment) -> tuple[str, ...]:
    """The names of what an environment counts."""
    return tuple(environment.counts) if isinstance(environment, Counting) else ()
