"""The queue of rollouts: those of the next steps, drawn by a thread of its own.

    step        0    1    2    3    4        k = 2
    learns from 0    1    2    3    4        rollout s in step s
    drawn by    0    0    0    1    2        version max(0, s - k) of the policy
    submits     2    3    4    5    6        rollout s + k, with the version of step s

One thread runs the draws in their order, and a second one waits for their scores where
verifiers are slow, so that the next draw begins meanwhile. Which version draws a
rollout is fixed by its step and not by what was ready first, so that runs repeat to the
bit, and so do runs that were killed: a snapshot waits for the k rollouts of the next
steps, and has them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.rollouts.waits import Waits

Array = jax.Array
Params = Any
# As a snapshot has it: what processes or an environment scored comes with the rollout.
Entry = tuple[Rollout, dict[str, Scores]]


class Draw(Protocol):
    """Draws a rollout, and scores it where the scores come with it.

    It is called from the queue's thread, and may take as long as it likes there: host
    loops over tools, verifiers, and servers that sample are all draws.
    """

    def __call__(
        self, policy: Params, *, prompts: Prompts, key: Array, version: Array
    ) -> tuple[Rollout, dict[str, Scores] | Callable[[], dict[str, Scores]]]:
        """The rollout of these prompts, and scores by the names of their rewards.

        Scores may be a function that waits for them. It is called from a second thread,
        in the order of the draws, while the next rollout is drawn.

        Args:
          policy: as the queue's `hand_over` made it.
          key: of the step that is to learn from it.
          version: i32[], of the policy, `TrainState.step`.
        """
        ...


class RolloutQueue:
    """The rollouts of the next k steps; a context manager that ends its thread.

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
        draw: Draw,
        *,
        hand_over: Callable[[Params], Params],
        prompts: Callable[[int], Prompts],
        key: Array,
        staleness: int,
        num_steps: int,
        threaded: bool,
        arrive: Callable[[Rollout], tuple[Rollout, Any]] | None = None,
        patience: float = 20.0,
    ) -> None:
        """A queue that is empty.

        Args:
          hand_over: the parameters as draws read them, in buffers that no update
            donates; called at each `submit`.
          key: of the run; a step's is `fold_in(key, step)`.
          staleness: k, at least 1.
          num_steps: of the run; no rollout is drawn for a later one.
          threaded: whether draws have a thread; without one `submit` draws, whose
            programs devices then run behind it.
          arrive: what the rollout that is taken, or that a snapshot has, begins with
            where there is no thread: it comes to the policy's devices, and its scores
            are computed. What the draw dispatched runs on other devices until then.
          patience: seconds that leaving waits for the draw that is under way.
        """
        self._draw, self._hand_over = draw, hand_over
        self._prompts, self._key = prompts, key
        self.staleness, self._num_steps = staleness, num_steps
        self._arrive, self._patience = arrive, patience
        self._pending: collections.deque[Future[Entry]] = collections.deque()
        self._last: Future[Entry] | None = None  # that was taken
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
        """The entries of a stage's state, in the order of the steps they are for."""
        return tuple(f"rollout_{i}" for i in range(self.staleness))

    def first(self, policy: Params, *, version: Array) -> dict[str, Entry]:
        """Draws the rollout of step 0, in this thread.

        Returns:
          What a stage's state begins with: this rollout in every place of the queue,
          of the shapes that a snapshot has.
        """
        drawn = self._draw(self._hand_over(policy), **self._of(0, version))
        if self._arrive is not None:
            drawn = self._arrive(drawn[0])
        return self.filled(*_entry(*drawn))

    def filled(self, rollout: Rollout, scores: dict[str, Scores]) -> dict[str, Entry]:
        """As `first`, of a rollout of step 0 that is drawn already."""
        return dict.fromkeys(self._names, (rollout, scores))

    def begin(
        self, state: dict[str, Any], *, start: int, policy: Params, version: Array
    ) -> dict[str, Future[Entry]]:
        """Fills the queue: from a snapshot, or with draws of the policy as it starts.

        Args:
          state: of the stage, which is at step `start`.
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
        """The rollouts of a snapshot; those that it has none of are drawn now.

        Where the run was to end before, the last rollout stands in their places, which
        is older than a rollout of their steps would be.
        """
        self._last = _done(state[self._names[0]])
        for step, name in enumerate(self._names, start):
            rollout, _ = state[name]
            oldest = max(0, step - self.staleness)
            if rollout.version is None or int(rollout.version.max()) >= oldest:
                self._pending.append(_done(state[name]))
            else:
                self.submit(step, policy, version=version)

    def submit(
        self, step: int, policy: Params, *, version: Array
    ) -> dict[str, Future[Entry]]:
        """Hands the parameters over, and asks for the rollout of a later step.

        Args:
          step: that is to learn from it; nothing is drawn where the run ends before.
          policy: not donated before this returns.

        Returns:
          The entries of the stage's state from now on.
        """
        if step >= self._num_steps:
            self.waits.end("sampler")  # for a policy, as none will come
            return self._state()
        handed = self._hand_over(policy)
        arguments = self._of(step, version)
        if self._arrive is not None:
            drawn, _ = self._draw(handed, **arguments)
            self._pending.append(_Arriving(functools.partial(self._arrive, drawn)))
            return self._state()
        future = _Awaited(self.waits)
        self._pending.append(future)

        def job() -> None:
            with _raised_in(future):
                rollout, scores = self._draw(handed, **arguments)
                if self._scoring is None:
                    future.set_result(_entry(rollout, scores))
                    return
                # One draw at a time, and its parameters are let go after it.
                jax.block_until_ready(rollout)
                self._scoring.append(functools.partial(finish, rollout, scores))

        def finish(
            rollout: Rollout,
            scores: dict[str, Scores] | Callable[[], dict[str, Scores]],
        ) -> None:
            with _raised_in(future):
                future.set_result(jax.block_until_ready(_entry(rollout, scores)))

        if self._drawing is None:
            job()
        else:
            self._drawing.append(job)
        return self._state()

    def take(self) -> Entry:
        """The rollout of the next step, once it is drawn.

        Raises:
          Exception: whatever its draw raised.
        """
        self._last = self._pending.popleft()
        return self._last.result()

    def _of(self, step: int, version: Array) -> dict[str, Any]:
        """What a draw for a step is called with beside the parameters."""
        return {
            "prompts": self._prompts(step),
            "key": jax.random.fold_in(self._key, step),
            "version": jnp.array(version, copy=True),  # the update donates it
        }

    def _state(self) -> dict[str, Future[Entry]]:
        """The entries of a stage's state; a snapshot waits for what is not drawn yet.

        Near the end, where no more are drawn, the last one stands in every place left.
        """
        pending: Sequence[Future[Entry]] = tuple(self._pending)
        last = pending[-1] if pending else self._last
        assert last is not None  # after `begin`
        filled = (*pending, *[last] * (self.staleness - len(pending)))
        return dict(zip(self._names, filled, strict=True))


class Lane:
    """A thread that runs jobs in their order."""

    def __init__(self, name: str, *, waits: Waits | None = None) -> None:
        """A thread that is not started yet.

        Args:
          waits: where its idle time is counted, as the sampler's; None counts none.
        """
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._waits = waits
        # A daemon, as a draw that hangs must not keep the process.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Begins with the first job."""
        self._thread.start()

    def append(self, job: Callable[[], None]) -> None:
        """Runs a job, which raises nothing, after those before it."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def close(self, patience: float) -> None:
        """Drops what has not begun, and waits so many seconds for what has."""
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
            del job  # and with it the parameters


class _Awaited(Future[Entry]):
    """A rollout for which the trainer, or its snapshot, waits."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def result(self, timeout: float | None = None) -> Entry:
        with self._waits.of("trainer"):
            return super().result(timeout)


class _Arriving(Future[Entry]):
    """A rollout that has been asked for, and arrives when somebody looks at it."""

    def __init__(self, arrive: Callable[[], tuple[Rollout, Any]]) -> None:
        super().__init__()
        self._arrive: Callable[[], tuple[Rollout, Any]] | None = arrive

    def result(self, timeout: float | None = None) -> Entry:
        if self._arrive is not None:
            self.set_result(_entry(*self._arrive()))
            self._arrive = None
        return super().result(timeout)


@contextlib.contextmanager
def _raised_in(future: Future[Entry]) -> Iterator[None]:
    """What is raised inside is the future's, and the main thread raises it."""
    try:
        yield
    except BaseException as error:
        future.set_exception(error)


def _entry(
    rollout: Rollout, scores: dict[str, Scores] | Callable[[], dict[str, Scores]]
) -> Entry:
    return rollout, scores() if callable(scores) else scores


def _done(entry: Entry) -> Future[Entry]:
    future: Future[Entry] = Future()
    future.set_result(entry)
    return future
