"""How worker processes are started; a worker imports this too, so it loads no JAX."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess


class Spawned(SpawnProcess):
    """A spawned process that does not import the script that was started.

    Spawned and never forked: this process has the threads of JAX, and a copy of it
    could wait for ever for a lock that one of them held. The script would load JAX, and
    its models' libraries, once per worker.
    """

    def start(self) -> None:
        """Starts it."""
        with _without_a_script():
            super().start()


_STARTING = threading.Lock()


@contextlib.contextmanager
def _without_a_script() -> Iterator[None]:
    # `multiprocessing` tells a process what to import by looking here.
    with _STARTING:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script
