"""Verifiers in a pool of processes, with a time limit, while the device computes.

    with VerifierPool(verifiers.Gsm8k(), num_workers=4) as pool:
        reward = pool.reward(decode=policy.decode, rows=rows)
        ...
        pending = reward.submit(rollout)            the processes start
        ref = ref_logprobs(reference, rollout)      and so does the device
        scores = pending.collect()                  Scores, as reward(rollout)

A call that raises, returns no finite number, takes too long or ends its process does
not affect other calls. The option `on_failure` decides what happens to its response.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rlhf_jax.roles.rewards import text, verifiers
from rlhf_jax.roles.rewards.scores import OnFailure, Scores
from rlhf_jax.roles.rewards.text import Row, Texts
from rlhf_jax.roles.rewards.transcripts import Decode, Prompt, Responses
from rlhf_jax.roles.rewards.verifiers import Judged, Verifier
from rlhf_jax.verification import user_objects, worker
from rlhf_jax.verification.worker import Failed
from rlhf_jax.verification.workers import Workers


class VerifierPool(contextlib.AbstractContextManager[Any]):
    """Processes that run a verifier; a context manager that ends them.

    They start with the first response and import the module of the verifier, not the
    script of this process. A process that hangs or dies in a call is replaced.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        num_workers: int | None = None,
        timeout: float = 10.0,
        on_failure: OnFailure = "leave_out",
    ) -> None:
        """Makes a pool; its processes start later.

        Args:
          verifier: (prompt, response, row) -> float; a function, or an instance of a
            class, at the top level of a module that can be imported.
          num_workers: number of processes; None is one per processor.
          timeout: seconds per response, not counting the import of the verifier.
          on_failure: what happens to a response that could not be verified: it is left
            out of the update ("leave_out", `Scores.left_out`), scores 0 ("zero"), or
            stops the run ("stop"). The first two warn once per kind of failure and
            batch, and name the first such prompt.

        Raises:
          InputError: the verifier cannot be sent to another process, or an option is
            not valid.
        """
        user_objects.check_options(timeout=timeout, on_failure=on_failure)
        self.timeout, self.on_failure = timeout, on_failure
        self.counts = verifiers.counted(verifier)
        taken = ("failed", "timed_out")  # by `Pending.collect`
        user_objects.check_counts(self.counts, taken=taken, of="verifier")
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
        """Makes a reward for responses to `rows`; a pool can have several rewards.

        Args:
          decode: token ids -> text, as for `transcripts.texts`.
          rows: the data set that `rollout.index` points into.
          prompts: the original prompts of these rows, texts or messages; None decodes
            their tokens.
        """
        return PooledReward(self, decode, rows, prompts)

    def submit(self, texts: Texts) -> Pending:
        """Starts to verify a batch of texts and returns at once.

        Raises:
          StopError: a row cannot be sent to a process, or no process starts.
        """
        futures = [
            self._workers.submit(worker.verify, *one, timeout=self.timeout)
            for one in zip(texts.prompts, texts.responses, texts.rows, strict=True)
        ]
        return Pending(self, texts, futures)


@dataclasses.dataclass(frozen=True)
class PooledReward:
    """A reward whose verifier runs in other processes."""

    pool: VerifierPool
    decode: Decode
    rows: Sequence[Row]
    prompts: Sequence[Prompt] | None = None

    def __call__(self, rollout: Responses) -> Scores:
        """Scores f32[B] of the responses, once all are verified."""
        return self.submit(rollout).collect()

    def submit(self, rollout: Responses) -> Pending:
        """Waits for the rollout, starts to verify its texts and returns."""
        return self.pool.submit(
            text.read(rollout, decode=self.decode, rows=self.rows, prompts=self.prompts)
        )


@dataclasses.dataclass(frozen=True)
class Pending:
    """A batch that is being verified."""

    pool: VerifierPool
    texts: Texts
    futures: Sequence[Future[Judged | Failed]]

    def done(self) -> bool:
        """Whether `collect` would return without waiting."""
        return all(future.done() for future in self.futures)

    def collect(self) -> Scores:
        """Waits for the scores of all responses.

        Returns:
          total: f32[B]. parts: f32[B] each; `failed` is 1 where a response could not be
          verified, `timed_out` 1 where that was for lack of time, and the counts of the
          verifier (`verifiers.Counting`) are 0 where it failed. left_out: bool[B], the
          failed responses if `on_failure` is "leave_out", else None.

        Raises:
          StopError: a response could not be verified and `on_failure` is "stop", with
            the prompt; or the verifier cannot be imported.
        """
        pool, names = self.pool, self.pool.counts
        results: list[Judged] = []
        failures: dict[int, Failed] = {}  # by place
        none = Judged(0.0, dict.fromkeys(names, 0.0))
        try:
            for place, future in enumerate(self.futures):
                result = future.result()
                if isinstance(result, Failed):
                    failed = result._replace(where=self.texts.show_both(place))
                    stop = pool.on_failure == "stop"
                    user_objects.require(
                        failed, of="verifier", case="a response", stop=stop
                    )
                    failures[place], result = failed, none
                results.append(result)
        finally:
            for future in self.futures:
                future.cancel()
        leave_out = pool.on_failure == "leave_out"
        become = "are left out" if leave_out else "score 0"
        user_objects.warn(
            failures.values(),
            num_rows=len(results),
            rows=f"responses could not be verified and {become}",
            of="verifier",
        )
        # NumPy arrays: JAX would wait for the devices' current work.
        left_out: Any = np.zeros(len(results), bool)
        timed_out: Any = np.zeros(len(results), np.float32)
        for place, failed in failures.items():
            left_out[place], timed_out[place] = True, failed.timed_out
        return Scores(
            total=_floats(result.score for result in results),
            parts={
                "failed": left_out.astype(np.float32),
                "timed_out": timed_out,
                **{
                    name: _floats(result.counts[name] for result in results)
                    for name in names
                },
            },
            left_out=left_out if leave_out else None,
        )


def _floats(numbers: Iterable[float]) -> Any:
    return np.fromiter(numbers, np.float32)
