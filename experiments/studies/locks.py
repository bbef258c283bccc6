"""A lock for runs of which one prepares files that all of them read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BETWEEN = 0.5  # seconds between tries to take the lock


@contextlib.contextmanager
def held(path: Path, *, prepares: Path, check: Callable[[], None]) -> Iterator[None]:
    """Waits for a lock and holds it; the lock is released if the process dies.

    Args:
      path: the lock file, in an existing folder.
      prepares: the files that the holder prepares, for the printed line.
      check: called before each try; it raises if this run should stop.

    Raises:
      OSError: the file cannot be written.
    """
    import fcntl  # not at the top of the file: only POSIX systems have it

    with path.open("w") as file:
        has_printed = False
        while True:
            check()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not has_printed:
                    print(f"waiting for the run that prepares {prepares}", flush=True)
                has_printed = True
                time.sleep(BETWEEN)
        yield
