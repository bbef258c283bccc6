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

import dataclasses
import os
import pickle
import sys
import types
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self

import numpy as np
import pebble

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.rewards import text
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.roles.rewards.text import Decode, Responses, Row, Texts
from rlhf_jax.roles.rewards.verifiers import Verifier
from rlhf_jax.verification import worker
from rlhf_jax.verification.worker import Answer

OnFailure = Literal["zero", "stop"]


class VerifierPool:
    """Processes that verify; a context manager that ends them.

    They start with the first response, import the module of the verifier and nothing
    of this process, and one that hangs or dies is replaced.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        num_workers: int | None = None,
        timeout: float = 10.0,
        on_failure: OnFailure = "zero",
    ) -> None:
        """A pool that is not started yet.

        Args:
          verifier: (prompt, response, row) -> float; a function or the instance of a
            class at the top of a module that can be imported.
          num_workers: processes; None is one a processor.
          timeout: seconds a response, without what it takes to import the verifier.
          on_failure: a response that could not be verified scores 0, with a warning
            that names the first such prompt of a batch; or stops the run.

        Raises:
          InputError: the verifier cannot be sent to another process, or a number is
            not one to choose.
        """
        if num_workers is None:
            num_workers = os.cpu_count() or 1
        checks.positive(num_workers=num_workers, timeout=timeout)
        if num_workers != int(num_workers):
            raise InputError(
                f"num_workers: expected a whole number, got {num_workers}; choose one"
            )
        if on_failure not in ("zero", "stop"):
            raise InputError(
                f"on_failure: expected 'zero' or 'stop', got {on_failure!r}; choose one"
            )
        self.timeout, self.on_failure = timeout, on_failure
        self._pickled = _pickled(verifier)
        self._pool = pebble.ProcessPool(
            max_workers=num_workers,
            initializer=worker.prepare,
            initargs=(self._pickled,),
            context=worker.Context(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.stop()
        self._pool.join()

    def reward(self, *, decode: Decode, rows: Sequence[Row]) -> PooledReward:
        """This verifier as a reward of the responses to `rows`; any number of them.

        Args:
          decode: token ids -> text; the tokenizer's, with special tokens left out.
          rows: the data set that `rollout.index` points into.
        """
        return PooledReward(self, decode, rows)

    def submit(self, texts: Texts) -> Pending:
        """Starts on a batch of texts and returns at once."""
        futures = [
            self._pool.schedule(
                worker.verify,
                args=(self._pickled, *one),
                timeout=self.timeout,
            )
            for one in zip(*texts.lists, strict=True)
        ]
        return Pending(self, texts, futures)


@dataclasses.dataclass(frozen=True)
class PooledReward:
    """A verifier as a reward, run in other processes."""

    pool: VerifierPool
    decode: Decode
    rows: Sequence[Row]

    def __call__(self, rollout: Responses) -> Scores:
        """Scores f32[B] of the responses, once all are verified."""
        return self.submit(rollout).collect()

    def submit(self, rollout: Responses) -> Pending:
        """Waits for the rollout, starts on its texts and returns."""
        return self.pool.submit(text.read(rollout, decode=self.decode, rows=self.rows))


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
          verified, and `timed_out`, for it took too long.

        Raises:
          StopError: one could not be verified, and the pool is to stop then; names the
            prompt. Or the verifier cannot be imported, which is no response's fault.
        """
        answers = []
        for place, future in enumerate(self.futures):
            answer = self._answer(future)
            if not answer.imported:
                raise StopError(
                    f"the verifier {answer.why}; expected one that the processes of "
                    f"the pool can import, so set PYTHONPATH, or mend its module"
                )
            if answer.why and self.pool.on_failure == "stop":
                for waiting in self.futures:
                    waiting.cancel()
                raise StopError(
                    f"the verifier {answer.why} for {self._show(place)}; mend it, or "
                    f"let such a response score 0 (on_failure='zero')"
                )
            answers.append(answer)
        failed = [place for place, answer in enumerate(answers) if answer.why]
        if failed:
            print(
                f"warning: {len(failed)} of {len(answers)} responses could not be "
                f"verified and score 0; the verifier {answers[failed[0]].why} for "
                f"{self._show(failed[0])}",
                file=sys.stderr,
            )
        return Scores(
            total=_floats(answer.score for answer in answers),
            parts={
                "failed": _floats(bool(answer.why) for answer in answers),
                "timed_out": _floats(answer.timed_out for answer in answers),
            },
        )

    def _answer(self, future: Future[Answer]) -> Answer:
        try:
            return future.result()
        except TimeoutError:
            why = f"took longer than {self.pool.timeout:g} s"
            return Answer(0.0, why, timed_out=True)
        except pebble.ProcessExpired as error:
            return Answer(0.0, f"ended its process (status {error.exitcode})")
        except Exception as error:
            # Not the verifier's: the pool itself, or a row that cannot be sent.
            raise StopError(
                f"the processes that verify do not work: {type(error).__name__}: "
                f"{error}"
            ) from error

    def _show(self, place: int) -> str:
        return self.texts.show_both(place)


def _floats(numbers: Any) -> Any:
    return np.fromiter(numbers, np.float32)


def _pickled(verifier: Verifier) -> bytes:
    expected = (
        "expected a verifier that other processes can import: a function, or an "
        "instance of a class, at the top of a module"
    )
    try:
        pickled = pickle.dumps(verifier)
    except Exception as error:  # whatever its own state raises
        raise InputError(f"{expected}; got {verifier!r:.80}: {error}") from error
    kind = verifier if isinstance(verifier, types.FunctionType) else type(verifier)
    if kind.__module__ == "__main__":
        raise InputError(
            f"{expected}; got {verifier!r:.80} of the script that was started; move it "
            f"to a module beside it"
        )
    return pickled
