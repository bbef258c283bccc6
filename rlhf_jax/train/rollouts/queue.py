"""The queue of the rollouts of the next steps, which a thread draws.

    step        0    1    2    3    4        k = 2
    learns from 0    1    2    3    4        rollout s in step s
    drawn by    0    0    0    1    2        version max(0, s - k) of the policy
    submits     2    3    4    5    6        rollout s + k, with the version of step s

One thread runs the draws in order, and a second one waits for their scores, so that the
next draw begins while verifiers work. The step of a rollout determines the version that
draws it, so that runs repeat to the bit. Resumed runs do too: a snapshot waits for the
k rollouts of the next steps and stores them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self

import jax

from rlhf_jax.algorithms.batch import Request, Rollout
from rlhf_jax.devices import processes
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.rollouts.waits import Waits

Array = jax.Array
Params = Any
# A rollout and its scores from processes or an environment, as snapshots store them:
# {name of the reward: Scores}.
Entry = tuple[Rollout, dict[str, Scores]]
Draw = Callable[[Params, Request], tuple[Rollout, Callable[[], dict[str, Scores]]]]


class RolloutQueue:
    """The rollouts of the next k steps; a context manager that ends its threads.

    queue = RolloutQueue(draw, hand_over=hand_over, staleness=k, ...)
    kept |= queue.first(policy, version=version)
    with job.stage("ppo", kept) as stage, queue:
        stage.state |= queue.begin(stage.state, start=stage.start, ...)
        for step in stage.steps():
            with stage.user_code():
                rollout, scores = queue.take()
            stage.state |= queue.submit(step + k, policy, version=version)
            ...
    """

    def __init__(
        self,
        draw: Callable[[Params, Request], Any],
        *,
        hand_over: Callable[[Params], Params],
        request: Callable[[int, Array], Request],
        staleness: int,
        num_steps: int,
        threaded: bool,
        arrive: Callable[[Any], tuple[Rollout, Any]] | None = None,
        patience: float = 20.0,
    ) -> None:
        """Makes an empty queue.

        Args:
          draw: a `Draw`: (parameters of `hand_over`, request) -> the rollout, and a
            function that waits for its scores, which a second thread calls, in the
            order of the draws, while the next rollout is drawn. It may take long: host
            loops over tools, verifiers, and servers that sample are all draws.
          hand_over: returns the parameters that draws read, in buffers that no update
            donates; called at each `submit`.
          request: (step, version of the policy) -> the request of that step, in
            buffers that no update donates.
          staleness: k, at least 1.
          num_steps: of the run; no rollout is drawn for a later step.
          threaded: whether draws run in a thread; if not, `submit` dispatches them.
          arrive: for draws without a thread, which may then return anything: makes of
            it what `draw` returns, when it is taken or a snapshot stores it.
          patience: seconds to wait on exit for a draw under way.
        """
        self._draw, self._hand_over = draw, hand_over
        self._request = request
        self.staleness, self._num_steps = staleness, num_steps
        self._arrive, self._patience = arrive, patience
        self._pending: collections.deque[Future[Entry]] = collections.deque()
        self._last: Future[Entry] | None = None  # the last entry that was taken
        self.waits = Waits("trainer", "sampler")
        self._drawing = self._scoring = None
        if threaded:
            self._drawing = Lane("rollouts", waits=self.waits)
            self._scoring = Lane("scores")

    def __enter__(self) -> Self:
        for lane in (self._drawing, self._scoring):
            if lane is not None:
                lane.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A second Ctrl-C stops at once.
        patience = 0.0 if kind is KeyboardInterrupt else self._patience
        for lane in (self._drawing, self._scoring):
            if lane is not None:
                lane.close(patience)

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the entries of a stage's state, in the order of their steps."""
        return tuple(f"rollout_{i}" for i in range(self.staleness))

    def first(self, policy: Params, *, version: Array) -> dict[str, Entry]:
        """Draws the rollout of step 0, in this thread.

        Returns:
          Initial entries of a stage's state, with the shapes that snapshots store: this
          rollout in every place of the queue.
        """
        drawn: Any = self._draw(self._hand_over(policy), self._request(0, version))
        if self._arrive is not None:
            drawn = self._arrive(drawn)
        return self.filled(*_scored(*drawn))

    def filled(self, rollout: Rollout, scores: dict[str, Scores]) -> dict[str, Entry]:
        """As `first`, for a rollout of step 0 that has been drawn already."""
        return dict.fromkeys(self._names, (rollout, scores))

    def begin(
        self, state: dict[str, Any], *, start: int, policy: Params, version: Array
    ) -> dict[str, Future[Entry]]:
        """Fills the queue, from a snapshot or with draws of the initial policy.

        Args:
          state: the stage's state, at step `start`.
        """
        if start:
            self._take_back(state, start=start, policy=policy, version=version)
        else:
            self._pending.append(_done(state[self._names[0]]))
            for step in range(1, self.staleness):
                self.submit(step, policy, version=version)
        return self._state()

    def _take_back(
        self, state: dict[str, Any], *, start: int, policy: Params, version: Array
    ) -> None:
        """Fills the queue from a snapshot, and draws rollouts that it does not have.

        The snapshot of a run that was to end earlier repeats its last rollout in the
        remaining places. Its version is too old for their steps.
        """
        self._last = _done(state[self._names[0]])
        for step, name in enumerate(self._names, start):
            rollout, _ = state[name]
            oldest = max(0, step - self.staleness)
            version_of = processes.whole(rollout.version)
            if version_of is None or version_of.max() >= oldest:
                self._pending.append(_done(state[name]))
            else:
                self.submit(step, policy, version=version)

    def submit(
        self, step: int, policy: Params, *, version: Array
    ) -> dict[str, Future[Entry]]:
        """Hands over the parameters, and requests the rollout of a later step.

        Args:
          step: the step that will learn from it; past the end nothing is drawn.
          policy: must not be donated before this returns.

        Returns:
          The new entries of the stage's state.
        """
        if step >= self._num_steps:
            self.waits.end("sampler")  # no further policy will come
            return self._state()
        handed = self._hand_over(policy)
        request = self._request(step, version)
        if self._arrive is not None:
            there = self._draw(handed, request)
            self._pending.append(_Arriving(functools.partial(self._arrive, there)))
            return self._state()
        future = _Awaited(self.waits)
        self._pending.append(future)

        def job() -> None:
            with _raised_in(future):
                drawn = self._draw(handed, request)
                if self._scoring is None:
                    future.set_result(_scored(*drawn))
                    return
                # One draw at a time; its parameters are freed after it.
                jax.block_until_ready(drawn[0])
                self._scoring.append(functools.partial(finish, *drawn))

        def finish(rollout: Rollout, scores: Callable[[], dict[str, Scores]]) -> None:
            with _raised_in(future):
                future.set_result(jax.block_until_ready(_scored(rollout, scores)))

        if self._drawing is None:
            job()
        else:
            self._drawing.append(job)
        return self._state()

    def take(self) -> Entry:
        """Waits for the rollout of the next step and returns it.

        Raises:
          Exception: whatever its draw raised.
        """
        self._last = self._pending.popleft()
        return self._last.result()

    def _state(self) -> dict[str, Future[Entry]]:
        """Entries of a stage's state; a snapshot waits for those under way.

        Near the end of the run the last rollout repeats in the remaining places.
        """
        pending: Sequence[Future[Entry]] = tuple(self._pending)
        last = pending[-1] if pending else self._last
        assert last is not None  # after `begin`
        filled = (*pending, *[last] * (self.staleness - len(pending)))
        return dict(zip(self._names, filled, strict=True))


class Lane:
    """A thread that runs jobs in order."""

    def __init__(self, name: str, *, waits: Waits | None = None) -> None:
        """Makes the thread, without starting it.

        Args:
          waits: counts its idle time as the sampler's; None counts none.
        """
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._waits = waits
        # A daemon, so that a hanging draw does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def append(self, job: Callable[[], None]) -> None:
        """Appends a job; the job must not raise."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def close(self, patience: float) -> None:
        """Drops waiting jobs; waits up to `patience` seconds for the running one."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(patience)

    def _work(self) -> None:
        while True:
            waiting = contextlib.nullcontext()
            if self._waits is not None:
                waiting = self._waits.of("sampler")
            with self._changed, waiting:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs.popleft()
            job()
            del job  # frees the parameters that it holds


class _Awaited(Future[Entry]):
    """A rollout under way; waiting for it counts as the trainer's."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def result(self, timeout: float | None = None) -> Entry:
        with self._waits.of("trainer"):
            return super().result(timeout)


class _Arriving(Future[Entry]):
    """A rollout that is moved and scored when its result is first read."""

    def __init__(self, arrive: Callable[[], tuple[Rollout, Any]]) -> None:
        super().__init__()
        self._arrive: Callable[[], tuple[Rollout, Any]] | None = arrive

    def result(self, timeout: float | None = None) -> Entry:
        if self._arrive is not None:
            self.set_result(_scored(*self._arrive()))
            self._arrive = None
        return super().result(timeout)


@contextlib.contextmanager
def _raised_in(future: Future[Entry]) -> Iterator[None]:
    """Stores an exception in the future, whose reader raises it."""
    try:
        yield
    except BaseException as error:
        future.set_exception(error)


def _scored(rollout: Rollout, scores: Callable[[], dict[str, Scores]]) -> Entry:
    return rollout, scores()


def _done(entry: Entry) -> Future[Entry]:
    future: Future[Entry] = Future()
    future.set_result(entry)
    return future
