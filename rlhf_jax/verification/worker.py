"""What a process that verifies runs, and how it is started: without JAX.

`pool` pools such processes. They are spawned, never forked: this process has
the threads of JAX, and a copy of it could wait for ever for a lock that one of them
held. And they import the verifier's module alone, not the script that was started:
that would load JAX, and its models' libraries, once a worker.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, NamedTuple

GRACE_SECONDS = 2.0  # for a worker to end by itself


class Answer(NamedTuple):
    """What a verifier said of one response, or why it said nothing."""

    score: float
    why: str  # "" unless it failed
    timed_out: bool = False
    imported: bool = True  # False where the verifier itself could not be imported


class Terminated(BaseException):
    """This worker is to end; on its way up it clears away what verifiers have made."""


_verifying = False


def prepare(pickled: bytes) -> None:
    """Before a worker's first response: imports the verifier, outside its time limit.

    From here on the worker ends with its parent, however that ends.
    """
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(BaseException):  # told with the first response
        _verifier(pickled)


def verify(
    pickled: bytes, prompt: str, response: str, row: Mapping[str, Any]
) -> Answer:
    """One response, in a worker; whatever the verifier raises is an answer.

    Args:
      pickled: the verifier.
    """
    global _verifying
    try:
        _verifying = True
        try:
            verifier = _verifier(pickled)
        except (Exception, SystemExit) as error:
            return Answer(
                0.0, f"could not be imported: {_shown(error)}", imported=False
            )
        returned = verifier(prompt, response, row)
        if not hasattr(returned, "__float__"):
            return Answer(0.0, f"returned {returned!r:.60}, which is not a number")
        score = float(returned)
        if not _is_float32(score):
            return Answer(0.0, f"returned {score}")
        return Answer(score, "")
    except Terminated:
        os._exit(1)
    except BaseException as error:  # sys.exit too; nor need the error be picklable
        return Answer(0.0, f"raised {_shown(error)}")
    finally:
        _verifying = False


def _is_float32(score: float) -> bool:
    """Whether a score is finite, and stays so as the float32 that it becomes."""
    try:
        struct.pack("<f", score)  # the native "f" would make it infinite
    except OverflowError:
        return False
    return math.isfinite(score)


def _shown(error: BaseException) -> str:
    """The error in a line."""
    try:
        return f"{type(error).__name__}: {error}".split("\n")[0][:300]
    except BaseException:  # its own __str__ raised
        return f"{type(error).__name__}, which cannot be shown"


def _terminate(signum: int, frame: types.FrameType | None) -> None:
    if not _verifying:
        os._exit(1)
    raise Terminated


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a worker
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # to the main thread, which clears away
    time.sleep(GRACE_SECONDS)
    os._exit(1)


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
