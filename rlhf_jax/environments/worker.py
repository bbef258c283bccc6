"""Calls of an environment in a worker process: without JAX.

The processes are verification's (`verification/workers.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Awaitable
from typing import Any, TypeVar

from rlhf_jax.environments import answers
from rlhf_jax.environments.answers import Answer, Begun
from rlhf_jax.environments.protocol import Row
from rlhf_jax.verification import worker
from rlhf_jax.verification.worker import Failed

Result = TypeVar("Result")


def is_async(environment: Any) -> bool:
    """Whether its `step` is a coroutine function, of which many may be under way."""
    return inspect.iscoroutinefunction(environment.step)


def reset(pickled: bytes, row: Row, most: int) -> Begun | Failed:
    """The beginning of a row's episode, with a prompt of at most `most` characters."""

    def use(environment: Any) -> Begun:
        return answers.begun(waited(environment.reset(row)), most=most)

    return worker.call(pickled, use)


def step(pickled: bytes, state: bytes, response: str, most: int) -> Answer:
    """The answer to a response; whatever the environment raises is an answer.

    Args:
      most: characters of an observation.
    """

    def use(environment: Any) -> Answer:
        returned = waited(environment.step(pickle.loads(state), response))
        return answers.answer(returned, most=most)

    return _or_failed(worker.call(pickled, use))


async def reset_async(pickled: bytes, row: Row, most: int) -> Begun | Failed:
    """`reset` in a worker that has several calls under way."""

    async def use(environment: Any) -> Begun:
        returned = environment.reset(row)
        if inspect.isawaitable(returned):
            returned = await returned
        return answers.begun(returned, most=most)

    return await worker.call_several(pickled, use)


async def step_async(pickled: bytes, state: bytes, response: str, most: int) -> Answer:
    """`step` in a worker that has several calls under way."""

    async def use(environment: Any) -> Answer:
        returned = await environment.step(pickle.loads(state), response)
        return answers.answer(returned, most=most)

    return _or_failed(await worker.call_several(pickled, use))


def _or_failed(answer: Answer | Failed) -> Answer:
    if isinstance(answer, Failed):
        return answers.failed(answer.why, imported=answer.imported)
    return answer


def waited(returned: Result | Awaitable[Result]) -> Result:
    """What was returned, or what a coroutine returns."""
    if inspect.iscoroutine(returned):
        return asyncio.run(returned)
    return returned  # type: ignore[return-value]
