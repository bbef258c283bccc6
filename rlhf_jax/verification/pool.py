"""Verifiers in a pool of processes, with a time limit, while the device does its work.

    with verification.VerifierPool(verifiers.Gsm8k(), num_workers=4) as pool:
        reward = pool.reward(decode=policy.decode, rows=rows)
        ...
        pending = reward.submit(rollout)            the processes start on it
        ref = ref_logprobs(reference, rollout)      and so does the device
        scores = pending.collect()                  Scores, as reward(rollout)

A verifier that raises, returns no finite number, takes too long or ends its process
leaves the others as they are. Its own score is 0, or the run stops, as configured.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rlhf_jax.roles.rewards import text, verifiers
from rlhf_jax.roles.rewards.scores import OnFailure, Scores
from rlhf_jax.roles.rewards.text import Row, Texts
from rlhf_jax.roles.rewards.transcripts import Decode, Prompt, Responses
from rlhf_jax.roles.rewards.verifiers import Verifier
from rlhf_jax.verification import user_objects, worker
from rlhf_jax.verification.user_objects import Failure
from rlhf_jax.verification.worker import Answer
from rlhf_jax.verification.workers import Ended, Workers


class VerifierPool(contextlib.AbstractContextManager[Any]):
    """Processes that verify; a context manager that ends them.

    They start with the first response, import the module of the verifier and nothing
    of this process, and one that hangs or dies in a call is replaced.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        num_workers: int | None = None,
        timeout: float = 10.0,
        on_failure: OnFailure = "leave_out",
    ) -> None:
        """A pool that is not started yet.

        Args:
          verifier: (prompt, response, row) -> float; a function or the instance of a
            class at the top of a module that can be imported.
          num_workers: processes; None is one a processor.
          timeout: seconds a response, without what it takes to import the verifier.
          on_failure: a response that could not be verified is left out of all that
            is learned ("leave_out", `Scores.left_out`) or scores 0 ("zero"), with a
            warning per kind of failure that names the first such prompt of a batch; or
            stops the run.

        Raises:
          InputError: the verifier cannot be sent to another process, or a number is
            not one to choose.
        """
        user_objects.check_options(timeout=timeout, on_failure=on_failure)
        self.timeout, self.on_failure = timeout, on_failure
        self.counts = verifiers.counted(verifier)
        self._workers = Workers(
            user_objects.pickled(verifier, kind="verifier"),
            of="that verify",
            num_workers=num_workers,
        )

    def __exit__(self, *exception: object) -> None:
        self._workers.close()

    def reward(
        self,
        *,
        decode: Decode,
        rows: Sequence[Row],
        prompts: Sequence[Prompt] | None = None,
    ) -> PooledReward:
        """This verifier as a reward of the responses to `rows`; any number of them.

        Args:
          decode: token ids -> text, as `transcripts.texts` takes it.
          rows: the data set that `rollout.index` points into.
          prompts: the prompts of these rows as they were written: texts, or
            messages; None decodes their tokens.
        """
        return PooledReward(self, decode, rows, prompts)

    def submit(self, texts: Texts) -> Pending:
        """Starts on a batch of texts and returns at once.

        Raises:
          StopError: a row cannot be sent to a process, or none starts.
        """
        futures = [
            self._workers.submit(worker.verify, *one, timeout=self.timeout)
            for one in zip(*texts.lists, strict=True)
        ]
        return Pending(self, texts, futures)


@dataclasses.dataclass(frozen=True)
class PooledReward:
    """A verifier as a reward, run in other processes."""

    pool: VerifierPool
    decode: Decode
    rows: Sequence[Row]
    prompts: Sequence[Prompt] | None = None

    def __call__(self, rollout: Responses) -> Scores:
        """Scores f32[B] of the responses, once all are verified."""
        return self.submit(rollout).collect()

    def submit(self, rollout: Responses) -> Pending:
        """Waits for the rollout, starts on its texts and returns."""
        return self.pool.submit(
            text.read(rollout, decode=self.decode, rows=self.rows, prompts=self.prompts)
        )


@dataclasses.dataclass(frozen=True)
class Pending:
    """A batch that is being verified."""

    pool: VerifierPool
    texts: Texts
    futures: Sequence[Future[Answer]]

    def done(self) -> bool:
        """True if `collect` would not wait."""
        return all(future.done() for future in self.futures)

    def collect(self) -> Scores:
        """Waits for all of them.

        Returns:
          total f32[B]; parts f32[B], 1 where true: `failed`, the response could not be
          verified, and `timed_out`, for it took too long; beside them what the
          verifier counts (`verifiers.Counting`), 0 where it failed; left_out bool[B],
          those that failed, where they are to be left out.

        Raises:
          StopError: one could not be verified, and the pool is to stop then; names the
            prompt. Or the verifier cannot be imported, which is no response's fault.
        """
        answers: list[Answer] = []
        try:
            for place, future in enumerate(self.futures):
                answers.append(answer := _answer(future))
                user_objects.require(
                    answer.why,
                    imported=answer.imported,
                    of="verifier",
                    where=self.texts.show_both(place),
                    case="a response",
                    stop=self.pool.on_failure == "stop",
                )
        finally:
            for future in self.futures:
                future.cancel()
        leave_out = self.pool.on_failure == "leave_out"
        become = "are left out" if leave_out else "score 0"
        user_objects.warn(
            [
                Failure(answer.why, self.texts.show_both(place))
                for place, answer in enumerate(answers)
                if answer.why
            ],
            num_rows=len(answers),
            rows=f"responses could not be verified and {become}",
            of="verifier",
        )
        # Of NumPy: JAX's would wait for what the devices were given meanwhile.
        failed: Any = np.array([bool(answer.why) for answer in answers])
        none = (0.0,) * len(self.pool.counts)
        counted = zip(*(answer.counts or none for answer in answers), strict=True)
        return Scores(
            total=_floats(answer.score for answer in answers),
            parts={
                "failed": failed.astype(np.float32),
                "timed_out": _floats(answer.timed_out for answer in answers),
                **dict(zip(self.pool.counts, map(_floats, counted), strict=False)),
            },
            left_out=failed if leave_out else None,
        )


def _answer(future: Future[Answer]) -> Answer:
    try:
        return future.result()
    except Ended as ended:
        return Answer(0.0, ended.why, timed_out=ended.timed_out)


def _floats(numbers: Any) -> Any:
    return np.fromiter(numbers, np.float32)
