"""Environments in a pool of processes, with a time limit a call.

    with EnvironmentPool(Calculator(), num_workers=4) as pool:
        begun = pool.reset(rows)                     once, when the data is loaded
        future = pool.step(begun[0].state, "calc: 12*7\n")
        ...                                          the device goes on
        answer = future.result()                     Answer(observation, reward, ...)

An environment that raises, hangs, ends its process or returns what no run can use
leaves the other episodes as they are. Its own ends with what it had, or the run stops,
as configured. States pass through this process as bytes and are never unpickled here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Self

from rlhf_jax.data import json_lines
from rlhf_jax.environments import answers, worker
from rlhf_jax.environments.answers import Answer, Begun
from rlhf_jax.environments.protocol import Environment
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.verification import processes
from rlhf_jax.verification.processes import OnFailure
from rlhf_jax.verification.worker import Failed

OF = "of the environment"  # whose processes they are, for messages
SHOWN = 300  # characters of a response in a message
IMPORTABLE = (
    "expected one that the processes of the pool can import, so set PYTHONPATH, or mend"
    " its module"
)


class EnvironmentPool:
    """Processes that run an environment; a context manager that ends them.

    They start with the first call, import the module of the environment and nothing of
    this process, and one that hangs or dies in a call is replaced.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        num_workers: int | None = None,
        timeout: float = 10.0,
        on_failure: OnFailure = "zero",
        max_observation: int = 100_000,
    ) -> None:
        """A pool that is not started yet.

        Args:
          environment: the instance of a class at the top of a module that can be
            imported.
          num_workers: processes; None is one a processor.
          timeout: seconds a call, without what it takes to import the environment.
          on_failure: an episode whose environment failed ends with what it had, and
            that turn's reward is 0; or the run stops.
          max_observation: characters of an observation, or of a prompt.

        Raises:
          InputError: the environment cannot be sent to another process, or a number is
            not one to choose.
        """
        processes.check_options(timeout=timeout, on_failure=on_failure)
        checks.positive(max_observation=max_observation)
        if isinstance(environment, type) or not isinstance(environment, Environment):
            raise InputError(
                f"expected an instance with the methods reset and step, got"
                f" {environment!r:.80}; see environments/README.md for an example"
            )
        self.timeout, self.on_failure = timeout, on_failure
        self.max_observation = max_observation
        self._pickled = processes.pickled(environment, kind="environment")
        self._pool = processes.start(self._pickled, num_workers=num_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.stop()
        self._pool.join()

    def reset(self, rows: Sequence[dict[str, Any]]) -> list[Begun]:
        """The prompts and first states of rows.

        Raises:
          InputError: a row has no beginning; names its file and line.
          StopError: the environment cannot be imported, or the processes were killed
            between two calls.
        """
        futures = [self._schedule(worker.reset, row) for row in rows]
        starts = []
        try:
            for place, future in enumerate(futures):
                starts.append(self._begun(future, rows[place], place))
        finally:
            for future in futures:
                future.cancel()
        return starts

    def step(self, state: bytes, response: str, *, where: str = "") -> Future[Answer]:
        """Starts on the answer to a response and returns at once.

        Args:
          state: of `reset`, or of the answer before.
          where: which episode it is, for messages, as "prompt 'Hi' (row 3)".

        Returns:
          What becomes an `Answer`. With on_failure="stop" its result is a StopError
          where the environment failed; and so it is where the environment cannot be
          imported, which is no response's fault.

        Raises:
          StopError: the processes were killed between two calls.
        """
        answered: Future[Answer] = Future()
        inner = self._schedule(worker.step, state, response)

        def cancelled(outer: Future[Answer]) -> None:
            if outer.cancelled():
                inner.cancel()

        def done(future: Future[Any]) -> None:
            try:
                try:
                    answered.set_result(self._answer(future, response, where))
                except StopError as error:
                    answered.set_exception(error)
            except InvalidStateError:
                pass  # cancelled meanwhile

        answered.add_done_callback(cancelled)
        inner.add_done_callback(done)
        return answered

    def warn(self, failures: Sequence[Answer], *, num_episodes: int) -> None:
        """Says on standard error, in one line, that episodes of a batch failed.

        Args:
          failures: the answers with a `why`; none says nothing.
        """
        if failures:
            print(
                f"warning: {len(failures)} of {num_episodes} episodes were ended by a"
                f" failure of their environment, with what they had; the environment"
                f" {failures[0].why}",
                file=sys.stderr,
            )

    def _schedule(self, function: Any, *args: Any) -> Future[Any]:
        return processes.schedule(
            self._pool,
            function,
            args=(self._pickled, *args, self.max_observation),
            timeout=self.timeout,
            of=OF,
        )

    def _begun(self, future: Future[Any], row: dict[str, Any], place: int) -> Begun:
        try:
            found = future.result()
        except Exception as error:
            found = Failed(self._ended(error).why)
        if isinstance(found, Begun):
            return found
        if not found.imported:
            raise StopError(f"the environment {found.why}; {IMPORTABLE}")
        raise InputError(
            f"{json_lines.place(row, place)}: expected a row that the environment can"
            f" begin with, got {_cut(row)}, for which its reset {found.why}; correct"
            " the row, or mend the environment"
        )

    def _answer(self, future: Future[Any], response: str, where: str) -> Answer:
        if future.cancelled():
            return answers.failed("was not asked: the run is ending")
        try:
            answer = future.result()
        except Exception as error:
            ended = self._ended(error)
            answer = answers.failed(ended.why, timed_out=ended.timed_out)
        if not answer.imported:
            raise StopError(f"the environment {answer.why}; {IMPORTABLE}")
        if answer.why:
            of = f"{where} and response" if where else "response"
            answer = answer._replace(why=f"{answer.why} for {of} {_cut(response)}")
            if self.on_failure == "stop":
                raise StopError(
                    f"the environment {answer.why}; mend it, or let such an episode end"
                    f" with what it had (on_failure='zero')"
                )
        return answer

    def _ended(self, error: Exception) -> processes.Ended:
        ended = processes.ended(error, timeout=self.timeout)
        if ended is None:
            # Not the environment's: the pool itself, or a row that cannot be sent.
            raise processes.broken(error, of=OF) from error
        return ended


def _cut(value: Any) -> str:
    shown = value[:SHOWN] if isinstance(value, str) else value
    text = f"{shown!r:.{SHOWN}}"
    return text if shown is value and len(text) < SHOWN else f"{text}..."
