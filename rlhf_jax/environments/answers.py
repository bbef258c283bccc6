"""Calls an environment in a worker process, and checks what it returns.

The processes are those of `verification/workers.py`, which load no JAX. An environment
may return anything, but only plain types are sent back: a value of another type, a text
that is too long or not valid Unicode, or a number that is not finite ends the episode
with a message.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, TypeVar

from rlhf_jax.environments import protocol
from rlhf_jax.environments.protocol import (
    CountedTurn,
    Message,
    Row,
    Started,
    Turn,
    Written,
)
from rlhf_jax.verification import worker
from rlhf_jax.verification.worker import Failed, Rejected

MAX_STATE = 2**24  # bytes of the pickled state of an episode
MAX_MESSAGES = 100  # messages of one observation or prompt
ASSISTANT = "assistant"
Result = TypeVar("Result")


class Begun(NamedTuple):
    """The beginning of an episode, with the state pickled."""

    prompt: Written
    state: bytes


class Answer(NamedTuple):
    """A turn of an environment, or why the call failed."""

    observation: Written
    reward: float
    done: bool
    state: bytes
    """Pickled; b"" if the episode is done."""
    counts: tuple[float, ...] = ()
    """In the order of `protocol.counted`; empty if the call failed."""
    failure: Failed | None = None
    """Why the call failed; then the reward is 0 and the episode is done."""


def reset(environment: Any, row: Row, most: int) -> Begun:
    """Begins the episode of a row; its prompt has at most `most` characters."""
    return begun(waited(environment.reset(row)), most=most)


def step(environment: Any, state: bytes, response: str, most: int) -> Answer:
    """Answers a response; the observation has at most `most` characters."""
    returned = waited(environment.step(pickle.loads(state), response))
    return answer(returned, most=most, counts=protocol.counted(environment))


async def reset_async(environment: Any, row: Row, most: int) -> Begun:
    """Runs `reset` in a worker with concurrent calls."""
    returned = environment.reset(row)
    if inspect.isawaitable(returned):
        returned = await returned
    return begun(returned, most=most)


async def step_async(
    environment: Any, state: bytes, response: str, most: int
) -> Answer:
    """Runs `step` in a worker with concurrent calls."""
    returned = await environment.step(pickle.loads(state), response)
    return answer(returned, most=most, counts=protocol.counted(environment))


def waited(returned: Result | Awaitable[Result]) -> Result:
    """Returns a value, or the result of a coroutine."""
    if inspect.iscoroutine(returned):
        return asyncio.run(returned)
    return returned  # type: ignore[return-value]


def begun(returned: Any, *, most: int) -> Begun:
    """Checks what `reset` returned; the prompt has at most `most` characters.

    Raises:
      Rejected: it is not a valid `Started`.
    """
    _check_type(returned, Started, expected="a Started")
    prompt = _written(returned.prompt, called="prompt", most=most)
    if isinstance(prompt, list) and (not prompt or prompt[-1]["role"] == ASSISTANT):
        raise Rejected(
            "returned a prompt that does not wait for the assistant, expected messages"
            " of which the last is another's"
        )
    return Begun(prompt, _state(returned.state))


def answer(returned: Any, *, most: int, counts: Sequence[str] = ()) -> Answer:
    """Checks what `step` returned; the observation has at most `most` characters.

    Args:
      counts: names of the environment's counts; 0 for those missing from the turn.

    Raises:
      Rejected: it is not a valid `Turn`.
    """
    _check_type(returned, Turn, expected="a Turn")
    reward = worker.number(returned.reward, called="reward")
    done = returned.done
    if type(done).__module__ == "numpy" and type(done).__name__ in ("bool", "bool_"):
        done = bool(done)
    _check_type(done, bool, called="`done`", expected="True or False")
    observation = _written(returned.observation, called="observation", most=most)
    if isinstance(observation, list):
        roles = [message["role"] for message in observation]
        if ASSISTANT in roles or not (roles or done):
            what = "a message of the assistant" if roles else "no message"
            raise Rejected(
                f"returned {what} as the observation, expected those of others: what"
                " the assistant says is sampled"
            )
    state = b"" if done else _state(returned.state)
    own = dict(returned.counts) if isinstance(returned, CountedTurn) else {}
    if others := sorted(own.keys() - {*counts}):
        raise Rejected(f"returned counts of {others}, expected some of {[*counts]}")
    counted = worker.counted(dict.fromkeys(counts, 0.0) | own, counts)
    return Answer(observation, reward, done, state, counts=tuple(counted.values()))


def _written(value: Any, *, called: str, most: int) -> Written:
    """Checks a text, or messages of texts, of at most `most` characters."""
    if not isinstance(value, list):
        expected = f"a text or a list of at most {MAX_MESSAGES} messages"
        return _text(value, called=called, most=most, expected=expected)
    _check_length(value, MAX_MESSAGES, unit="messages", called=called)
    messages, left = [], most
    for one in value:
        if not isinstance(one, dict) or not {"role", "content"} <= one.keys():
            raise Rejected(
                f"returned {one!r:.60} as a message of the {called}, expected"
                ' {"role": "user", "content": "Hi"}'
            )
        message: Message = {}
        for key, content in one.items():
            if content is None and key not in ("role", "content"):
                continue  # tables have nulls, but templates test for absent keys
            name = _text(key, called=f"field of the {called}", most=100)
            message[name] = _text(content, called=called, most=left)
            left -= len(message[name])
        messages.append(message)
    return messages


def _text(value: Any, *, called: str, most: int, expected: str = "a text") -> str:
    """Converts a text to exactly type str, and checks that UTF-8 can encode it."""
    _check_type(value, str, called=f"the {called}", expected=expected)
    _check_length(value, most, unit="characters", called=called)
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Rejected(
            f"returned {text[error.start : error.start + 1]!a} at character"
            f" {error.start} of the {called}, which is not Unicode text (a lone"
            " surrogate); decode bytes with errors='replace'"
        ) from None
    return text


def _state(value: Any) -> bytes:
    try:
        state = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the state's own `__reduce__` may raise anything
        raise Rejected(
            f"returned a state that cannot be pickled: {worker.shown(error)}"
        ) from None
    _check_length(state, MAX_STATE, unit="bytes", called="state")
    return state


def _check_type(value: Any, kind: type, *, expected: str, called: str = "") -> None:
    if not isinstance(value, kind):
        got = "None" if value is None else f"a value of type {type(value).__name__:.60}"
        of = f" as {called}" if called else ""
        raise Rejected(f"returned {got}{of}, expected {expected}")


def _check_length(value: Any, most: int, *, unit: str, called: str) -> None:
    if len(value) > most:
        raise Rejected(
            f"returned {len(value)} {unit} as the {called}, expected at most {most}"
        )
