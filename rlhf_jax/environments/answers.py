"""What a worker sends back of an environment: checked, and of plain types alone.

An environment may return anything. What is too long, no text that UTF-8 has, no finite
number or of another type ends its episode, with a line that says so.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from rlhf_jax.environments.protocol import Message, Started, Turn, Written
from rlhf_jax.verification import worker

MAX_STATE = 2**24  # bytes that the trainer keeps for an episode
MAX_MESSAGES = 100  # of one observation or prompt
ASSISTANT = "assistant"


class Begun(NamedTuple):
    """The beginning of an episode, as the trainer keeps it."""

    prompt: Written
    state: bytes


class Answer(NamedTuple):
    """A turn of an environment, or why it ended without one."""

    observation: Written
    reward: float
    done: bool
    state: bytes
    """Pickled; b"" where the episode is done."""
    why: str = ""
    """"" unless it failed; then the reward is 0 and the episode is done."""
    timed_out: bool = False
    imported: bool = True
    """False where the environment itself could not be imported."""
    where: str = ""
    """Which turn it is of, for messages, where it failed."""


class NoAnswer(Exception):
    """Why what an environment returned is not taken."""


def failed(
    why: str, *, timed_out: bool = False, imported: bool = True, where: str = ""
) -> Answer:
    """An answer in place of the one that an environment did not give."""
    return Answer("", 0.0, True, b"", why, timed_out, imported, where)


def begun(returned: Any, *, most: int) -> Begun:
    """What `reset` returned.

    Args:
      most: characters of the prompt.

    Raises:
      NoAnswer: it is no `Started` that a run can use.
    """
    if not isinstance(returned, Started):
        raise NoAnswer(f"returned {_kind(returned)}, expected a Started")
    prompt = _written(returned.prompt, called="prompt", most=most)
    if isinstance(prompt, list) and (not prompt or prompt[-1]["role"] == ASSISTANT):
        raise NoAnswer(
            "returned a prompt that does not wait for the assistant, expected messages"
            " of which the last is another's"
        )
    return Begun(prompt, _state(returned.state))


def answer(returned: Any, *, most: int) -> Answer:
    """What `step` returned.

    Args:
      most: characters of the observation.

    Raises:
      NoAnswer: it is no `Turn` that a run can use.
    """
    if not isinstance(returned, Turn):
        raise NoAnswer(f"returned {_kind(returned)}, expected a Turn")
    reward = worker.number(returned.reward)
    if isinstance(reward, worker.Failed):
        raise NoAnswer(f"{reward.why}, expected a finite number as the reward")
    done = _truth(returned.done)
    observation = _written(returned.observation, called="observation", most=most)
    if isinstance(observation, list):
        if not (done or observation):
            raise NoAnswer("returned no message as the observation, expected one")
        if any(message["role"] == ASSISTANT for message in observation):
            raise NoAnswer(
                "returned a message of the assistant as an observation, expected those"
                " of others: what the assistant says is sampled"
            )
    state = b"" if done else _state(returned.state)
    return Answer(observation, reward, done, state)


def _written(value: Any, *, called: str, most: int) -> Written:
    if isinstance(value, str):
        return _text(value, called=called, most=most)
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        kind = f"{len(value)} messages" if isinstance(value, list) else _kind(value)
        raise NoAnswer(
            f"returned {kind} as the {called}, expected a text or a list of at most"
            f" {MAX_MESSAGES} messages"
        )
    messages, left = [], most
    for one in value:
        if not isinstance(one, dict) or not {"role", "content"} <= one.keys():
            raise NoAnswer(
                f"returned {one!r:.60} as a message of the {called}, expected"
                ' {"role": "user", "content": "Hi"}'
            )
        message: Message = {}
        for key, content in one.items():
            if content is None and key not in ("role", "content"):
                continue  # as a table has it: templates know absent keys, not null
            name = _text(key, called=f"field of the {called}", most=100)
            message[name] = _text(content, called=called, most=left)
            left -= len(message[name])
        messages.append(message)
    return messages


def _text(value: Any, *, called: str, most: int) -> str:
    """A text of exactly type str, which UTF-8 can write."""
    if not isinstance(value, str):
        raise NoAnswer(f"returned {_kind(value)} as the {called}, expected a text")
    if len(value) > most:
        raise NoAnswer(
            f"returned {len(value)} characters as the {called}, expected at most {most}"
        )
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NoAnswer(
            f"returned {text[error.start : error.start + 1]!a} at character"
            f" {error.start} of the {called}, which is no Unicode text (a lone"
            " surrogate); decode bytes with errors='replace'"
        ) from None
    return text


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise NoAnswer(f"returned {_kind(value)} as `done`, expected True or False")


def _state(value: Any) -> bytes:
    try:
        state = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever its parts raise
        raise NoAnswer(
            f"returned a state that cannot be pickled: {worker.shown(error)}"
        ) from None
    if len(state) > MAX_STATE:
        raise NoAnswer(
            f"returned a state of {len(state)} bytes, expected at most {MAX_STATE}"
        )
    return state


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return f"a value of type {kind:.60}" if value is not None else "None"
