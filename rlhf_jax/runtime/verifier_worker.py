"""What a process that verifies runs, and how it is started: without JAX.

`verification` pools such processes. They are spawned, never forked: this process has
the threads of JAX, and a copy of it could wait for ever for a lock that one of them
held. And they import the verifier's module alone, not the script that was started:
that would load JAX, and its models' libraries, once a worker.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What a verifier said of one response, or why it said nothing."""

    score: float
    why: str  # "" unless it failed
    timed_out: bool = False


def verify(
    pickled: bytes, prompt: str, response: str, row: Mapping[str, Any]
) -> Answer:
    """One response, in a worker; whatever the verifier raises is an answer.

    Args:
      pickled: the verifier.
    """
    try:
        returned = _verifier(pickled)(prompt, response, row)
    except BaseException as error:  # sys.exit too; nor need the error be picklable
        return Answer(0.0, f"raised {type(error).__name__}: {error}")
    if not hasattr(returned, "__float__"):
        return Answer(0.0, f"returned {returned!r:.60}, which is not a number")
    score = float(returned)
    if not math.isfinite(score):
        return Answer(0.0, f"returned {score}")
    return Answer(score, "")


@functools.lru_cache(maxsize=1)
def _verifier(pickled: bytes) -> Callable[[str, str, Mapping[str, Any]], float]:
    return pickle.loads(pickled)


class Worker(SpawnProcess):
    """A spawned process that does not import the script that was started."""

    def start(self) -> None:
        """As ever, but for that."""
        with _without_a_script():
            super().start()


class Context(SpawnContext):
    """How `pebble` is to start processes."""

    Process = Worker


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
