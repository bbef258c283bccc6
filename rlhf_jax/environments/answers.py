"""What a worker sends back of an environment: checked, and of plain types alone.

An environment may return anything. What is too long, no text that UTF-8 has, no finite
number or of another type ends its episode, with a line that says so.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from rlhf_jax.environments.protocol import Message, Started, Turn, Written
from rlhf_jax.verification import worker
from rlhf_jax.verification.worker import Rejected

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


def failed(
    why: str, *, timed_out: bool = False, imported: bool = True, where: str = ""
) -> Answer:
    """An answer in place of the one that an environment did not give."""
    return Answer("", 0.0, True, b"", why, timed_out, imported, where)


def begun(returned: Any, *, most: int) -> Begun:
    """What `reset` returned, with a prompt of at most `most` characters.

    Raises:
      Rejected: it is no `Started` that a run can use.
    """
    _check_type(returned, Started, expected="a Started")
    prompt = _written(returned.prompt, called="prompt", most=most)
    if isinstance(prompt, list) and (not prompt or prompt[-1]["role"] == ASSISTANT):
        raise Rejected(
            "returned a prompt that does not wait for the assistant, expected messages"
            " of which the last is another's"
        )
    return Begun(prompt, _state(returned.state))


def answer(returned: Any, *, most: int) -> Answer:
    """What `step` returned, with an observation of at most `most` characters.

    Raises:
      Rejected: it is no `Turn` that a run can use.
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
    return Answer(observation, reward, done, b"" if done else _state(returned.state))


def _written(value: Any, *, called: str, most: int) -> Written:
    """A text, or messages of texts, of at most `most` characters."""
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
                continue  # as a table has it: templates know absent keys, not null
            name = _text(key, called=f"field of the {called}", most=100)
            message[name] = _text(content, called=called, most=left)
            left -= len(message[name])
        messages.append(message)
    return messages


def _text(value: Any, *, called: str, most: int, expected: str = "a text") -> str:
    """A text of exactly type str, which UTF-8 can write."""
    _check_type(value, str, called=f"the {called}", expected=expected)
    _check_length(value, most, unit="characters", called=called)
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Rejected(
            f"returned {text[error.start : error.start + 1]!a} at character"
            f" {error.start} of the {called}, which is no Unicode text (a lone"
            " surrogate); decode bytes with errors='replace'"
        ) from None
    return text


def _state(value: Any) -> bytes:
    try:
        state = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever its parts raise
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
