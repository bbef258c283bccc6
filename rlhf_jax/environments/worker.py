"""Calls of an environment in a worker process: without JAX.

The processes are verification's (`verification/worker.py`).
"""

from __future__ import annotations

import pickle

from rlhf_jax.environments import answers
from rlhf_jax.environments.answers import Answer, Begun
from rlhf_jax.environments.protocol import Environment, Row
from rlhf_jax.verification import worker
from rlhf_jax.verification.worker import Failed


def reset(pickled: bytes, row: Row, most: int) -> Begun | Failed:
    """The beginning of a row's episode, in a worker.

    Args:
      pickled: the environment.
      most: characters of a prompt.
    """

    def use(environment: Environment) -> Begun | Failed:
        returned = environment.reset(row)
        try:
            return answers.begun(returned, most=most)
        except answers.NoAnswer as error:
            return Failed(f"{error}")

    return worker.call(pickled, use)


def step(pickled: bytes, state: bytes, response: str, most: int) -> Answer:
    """The answer to a response, in a worker; whatever is raised is an answer.

    Args:
      pickled: the environment.
      most: characters of an observation.
    """

    def use(environment: Environment) -> Answer:
        returned = environment.step(pickle.loads(state), response)
        try:
            return answers.answer(returned, most=most)
        except answers.NoAnswer as error:
            return answers.failed(f"{error}")

    found = worker.call(pickled, use)
    if isinstance(found, Failed):
        return answers.failed(found.why, imported=found.imported)
    return found
