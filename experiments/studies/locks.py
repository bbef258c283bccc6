"""A lock that runs wait for, where one of them makes what all of them read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BETWEEN = 0.5  # seconds between looks at a lock that another run holds


@contextlib.contextmanager
def held(path: Path, *, prepares: Path, check: Callable[[], None]) -> Iterator[None]:
    """Waits for a lock, and holds it; it goes with its process.

    Args:
      path: of the lock's file, in a folder that is there.
      prepares: what the holder makes, for the line that says who is waited for.
      check: called before each try; raises where this run is to stop.

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
