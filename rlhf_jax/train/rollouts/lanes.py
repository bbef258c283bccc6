"""Threads that run jobs in their order."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable

from rlhf_jax.train.rollouts.waits import Waits


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
