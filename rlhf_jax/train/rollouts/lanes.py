"""Threads that run jobs in their order, and the time that waiting takes."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Waits:
    """Seconds that each side has waited for the other since they were last read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = {"trainer": 0.0, "sampler": 0.0}
        self._since: dict[str, float] = {}  # of the waits that are under way
        self._ended: set[str] = set()  # sides whose waits count no more

    @contextlib.contextmanager
    def of(self, side: str) -> Iterator[None]:
        """Adds the seconds spent inside."""
        with self._lock:
            if side not in self._ended:
                self._since[side] = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._count(side)

    def end(self, side: str) -> None:
        """Counts no more: what this side waited for will not come."""
        with self._lock:
            self._count(side)
            self._ended.add(side)

    def _count(self, side: str) -> None:
        now = time.perf_counter()
        self._seconds[side] += now - self._since.pop(side, now)

    def read(self) -> dict[str, float]:
        """The seconds, which begin again at 0."""
        with self._lock:
            seconds, now = self._seconds, time.perf_counter()
            for side, since in self._since.items():
                seconds[side] += now - since
                self._since[side] = now
            self._seconds = dict.fromkeys(seconds, 0.0)
        return seconds


class Lane:
    """A thread that runs jobs in their order."""

    def __init__(self, name: str, *, waits: Waits | None = None) -> None:
        """A thread that is not started yet.

        Args:
          name: of the thread.
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
