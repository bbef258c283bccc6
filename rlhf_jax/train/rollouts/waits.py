"""The time that the trainer and the sampler of a queue wait for each other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rlhf_jax.runs import metrics, report


class Waits:
    """Seconds that each side has waited since the last read; safe for threads."""

    def __init__(self, *sides: str) -> None:
        """Starts every side at 0 seconds."""
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(sides, 0.0)
        self._since: dict[str, float] = {}  # start times of waits under way
        self._ended: set[str] = set()  # sides that are not counted any more

    @contextlib.contextmanager
    def of(self, side: str) -> Iterator[None]:
        """Adds the seconds spent inside the context to a side."""
        with self._lock:
            if side not in self._ended:
                self._since[side] = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._count(side)

    def end(self, side: str) -> None:
        """Stops counting a side, because what it waits for will not come."""
        with self._lock:
            self._count(side)
            self._ended.add(side)

    def _count(self, side: str) -> None:
        now = time.perf_counter()
        self._seconds[side] += now - self._since.pop(side, now)

    def read(self) -> dict[str, float]:
        """Returns the seconds of every side, and resets them to 0."""
        with self._lock:
            seconds, now = self._seconds, time.perf_counter()
            for side, since in self._since.items():
                seconds[side] += now - since
                self._since[side] = now
            self._seconds = dict.fromkeys(seconds, 0.0)
        return seconds


def waited(run_folder: Path) -> dict[str, float]:
    """Prints and returns the seconds that each side of the queue waited in a run."""
    total: dict[str, float] = {}
    for row in metrics.read(run_folder / "timings.jsonl"):
        for side, seconds in row.get("waits", {}).items():
            total[side] = total.get(side, 0.0) + seconds
    report.table(
        "Seconds that one side of the queue waited for the other",
        ("", "seconds"),
        [
            ("trainer, for its next rollout", total.get("trainer")),
            ("sampler, for its next policy", total.get("sampler")),
        ],
    )
    return total
