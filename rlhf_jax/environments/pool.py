"""Environments in a pool of processes, with a time limit per call.

    with EnvironmentPool(Calculator(), num_workers=4) as pool:
        begun = pool.reset(rows)                     once, when the data is loaded
        future = pool.step(begun[0].state, "calc: 12*7\n")
        ...                                          the device goes on
        answer = future.result()                     Answer(observation, reward, ...)

A call that raises, hangs, ends its process or returns something invalid does not affect
other episodes. The option `on_failure` decides what happens to its episode. States pass
through this process as bytes and are never unpickled here. If `step` is a coroutine
function, a process runs many calls concurrently.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rlhf_jax.data import json_lines
from rlhf_jax.environments import answers, finished, protocol
from rlhf_jax.environments.answers import Answer, Begun
from rlhf_jax.environments.protocol import Environment
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.rewards.scores import OnFailure
from rlhf_jax.verification import user_objects
from rlhf_jax.verification.worker import Failed
from rlhf_jax.verification.workers import Workers

IN_FLIGHT = 64  # concurrent calls per process if `step` is a coroutine function
SHOWN = 300  # characters of a response in a message


class EnvironmentPool(contextlib.AbstractContextManager[Any]):
    """Processes that run an environment; a context manager that ends them.

    They start with the first call and import the module of the environment, not the
    script of this process. A process that hangs or dies in a call is replaced.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        num_workers: int | None = None,
        timeout: float = 10.0,
        on_failure: OnFailure = "leave_out",
        max_observation: int = 100_000,
    ) -> None:
        """Makes a pool; its processes start later.

        Args:
          environment: an instance of a class at the top level of a module that can be
            imported.
          num_workers: number of processes; None is one per processor.
          timeout: seconds per call, not counting the import of the environment.
          on_failure: what happens to an episode whose environment failed: it is left
            out of the update ("leave_out"), ends with its rewards so far and 0 for the
            failed turn ("zero"), or stops the run ("stop").
          max_observation: the most characters of an observation or a prompt.

        Raises:
          InputError: the environment cannot be sent to another process, or an option is
            not valid.
        """
        user_objects.check_options(timeout=timeout, on_failure=on_failure)
        checks.positive(max_observation=max_observation)
        if isinstance(environment, type) or not isinstance(environment, Environment):
            raise InputError(
                f"expected an instance with the methods reset and step, got"
                f" {environment!r:.80}; see environments/README.md for an example"
            )
        self.counts = protocol.counted(environment)
        taken = (*finished.EARLY, finished.TURNS)
        user_objects.check_counts(self.counts, taken=taken, of="environment")
        self.timeout, self.on_failure = timeout, on_failure
        self.max_observation = max_observation
        several = inspect.iscoroutinefunction(environment.step)
        self._reset = answers.reset_async if several else answers.reset
        self._step = answers.step_async if several else answers.step
        self._workers = Workers(
            user_objects.pickled(environment, kind="environment"),
            of="of the environment",
            num_workers=num_workers,
            in_flight=IN_FLIGHT if several else 1,
        )

    def __exit__(self, *exception: object) -> None:
        self._workers.close()

    def reset(self, rows: Sequence[dict[str, Any]]) -> list[Begun]:
        """Returns the prompts and first states of rows.

        Raises:
          InputError: `reset` failed for a row; names its file and line.
          StopError: the environment cannot be imported, or no process starts.
        """
        futures = [
            self._workers.submit(
                self._reset,
                *(row, self.max_observation),
                timeout=self.timeout,
                then=functools.partial(self._begun, row=row, place=place),
            )
            for place, row in enumerate(rows)
        ]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def step(self, state: bytes, response: str, *, where: str = "") -> Future[Answer]:
        """Starts to answer a response and returns at once.

        Args:
          state: from `reset`, or from the previous answer.
          where: the episode, for messages, such as "prompt 'Hi' (row 3)".

        Returns:
          A future of the `Answer`. It raises StopError if the environment cannot be
          imported, or if it failed and `on_failure` is "stop".

        Raises:
          StopError: no process starts.
        """
        return self._workers.submit(
            self._step,
            *(state, response, self.max_observation),
            timeout=self.timeout,
            then=functools.partial(self._answer, response=response, where=where),
        )

    def warn(self, failures: Sequence[Failed], *, num_episodes: int) -> None:
        """Warns on standard error about failed episodes, one line per kind of failure.

        Args:
          num_episodes: episodes of the batch.
        """
        become = "with what they had"
        if self.on_failure == "leave_out":
            become = "and are left out"
        user_objects.warn(
            failures,
            num_rows=num_episodes,
            rows=f"episodes were ended by a failure of their environment, {become}",
            of="environment",
        )

    def _begun(
        self, begun: Begun | Failed, *, row: dict[str, Any], place: int
    ) -> Begun:
        if isinstance(begun, Begun):
            return begun
        if not begun.imported:
            self.require(begun)  # raises
        where = json_lines.place(row, place)
        raise InputError(
            f"{where}: expected a row that the environment can"
            f" begin with, got {_cut(row)}, for which its reset {begun.why}; correct"
            " the row, or mend the environment"
        )

    def _answer(self, result: Answer | Failed, *, response: str, where: str) -> Answer:
        if not isinstance(result, Failed):
            return result
        of = f"{where} and response" if where else "response"
        failure = result._replace(where=f"{of} {_cut(response)}")
        self.require(failure)
        return Answer("", 0.0, True, b"", failure=failure)

    def require(self, failure: Failed) -> None:
        """Raises StopError if a failure stops the run."""
        stop = self.on_failure == "stop"
        user_objects.require(failure, of="environment", case="an episode", stop=stop)


def _cut(value: Any) -> str:
    shown = value[:SHOWN] if isinstance(value, str) else value
    text = f"{shown!r:.{SHOWN}}"
    return text if shown is value and len(text) < SHOWN else f"{text}..."
