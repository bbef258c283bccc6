"""The protocol of an environment, a task that answers the model turn by turn.

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
    """The state that `step` gets; any value that can be pickled."""


class Turn(NamedTuple):
    """An environment's answer to a response."""

    observation: Written
    """The text that the model reads next; ignored if `done`."""
    reward: float
    """Reward of this turn. The score of an episode is the sum of its rewards."""
    done: bool
    """Whether the episode ends here."""
    state: Any
    """The state that the next `step` gets; ignored if `done`."""


class CountedTurn(Turn):
    """A turn of a `Counting` environment with counts; 0 for names without one."""

    counts: Mapping[str, float]

    def __new__(cls, *turn: Any, counts: Mapping[str, float]) -> Self:
        """Takes the four fields of `Turn` in order, and counts by name."""
        made = super().__new__(cls, *turn)
        made.counts = counts
        return made


@runtime_checkable
class Environment(Protocol):
    """A task of several turns whose methods are pure functions.

    Calls of one episode may run in different worker processes. So everything that an
    environment remembers must be in its state, and random draws must be seeded by the
    row or the state. Both methods may be coroutine functions; with `async def step` a
    process runs many calls concurrently.
    """

    def reset(self, row: Row) -> Started | Awaitable[Started]:
        """Returns the prompt and first state of a row; equal rows begin alike."""
        ...

    def step(self, state: Any, response: str) -> Turn | Awaitable[Turn]:
        """Answers a response; equal states and responses give equal turns."""
        ...


@runtime_checkable
class Counting(Protocol):
    """An environment with counts besides its rewards."""

    counts: Sequence[str]
    """Names of the counts. Counts of turns (`CountedTurn`) are summed over an episode,
    and the mean over episodes is logged as reward/NAME."""


def counted(environment: Environment) -> tuple[str, ...]:
    """Returns the names of an environment's counts."""
    return tuple(environment.counts) if isinstance(environment, Counting) else ()
