"""What a process that verifies runs, and how it is started: without JAX.

`processes` makes pools of them, for verifiers (`pool`) and for environments. They are
spawned, never forked: this process has the threads of JAX, and a copy of it could wait
for ever for a lock that one of them held. And they import the module of what they call
alone, not the script that was started: that would load JAX, and its models' libraries,
once a worker.
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
from typing import Any, NamedTuple, TypeVar

QUIETLY = (
    256  # in place of status 0, which `pebble` takes for an end that was asked for
)
GRACE_SECONDS = 2.0  # for a worker to end by itself
Result = TypeVar("Result")


class Answer(NamedTuple):
    """What a verifier said of one response, or why it said nothing."""

    score: float
    why: str  # "" unless it failed
    timed_out: bool = False
    imported: bool = True  # False where the verifier itself could not be imported


class Terminated(BaseException):
    """This worker is to end; on its way up it clears away what verifiers have made."""


class Failed(NamedTuple):
    """Why a call in a worker returned nothing."""

    why: str
    imported: bool = True  # False where what is called could not be imported


_working = False


def prepare(pickled: bytes) -> None:
    """Before a worker's first call: imports what is called, outside its time limit.

    From here on the worker ends with its parent, however that ends.
    """
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(BaseException):  # told with the first call
        _loaded(pickled)


def call(pickled: bytes, use: Callable[[Any], Result]) -> Result | Failed:
    """`use` of what was pickled, in a worker; whatever it raises is an answer.

    Args:
      pickled: a verifier, or whatever else the pool's processes hold.
    """
    global _working
    try:
        _working = True
        try:
            loaded = _loaded(pickled)
        except (Exception, SystemExit) as error:
            return Failed(f"could not be imported: {shown(error)}", imported=False)
        return use(loaded)
    except Terminated:
        os._exit(1)
    except BaseException as error:  # sys.exit too; nor need the error be picklable
        return Failed(f"raised {shown(error)}")
    finally:
        _working = False


def verify(
    pickled: bytes, prompt: str, response: str, row: Mapping[str, Any]
) -> Answer:
    """One response, in a worker.

    Args:
      pickled: the verifier.
    """
    returned = call(pickled, lambda verifier: number(verifier(prompt, response, row)))
    if isinstance(returned, Failed):
        return Answer(0.0, returned.why, imported=returned.imported)
    return Answer(returned, "")


def number(returned: Any) -> float | Failed:
    """A finite float32, or why what was returned is none."""
    if not hasattr(returned, "__float__"):
        return Failed(f"returned {returned!r:.60}, which is not a number")
    score = float(returned)
    return score if _is_float32(score) else Failed(f"returned {score}")


def _is_float32(score: float) -> bool:
    """Whether a score is finite, and stays so as the float32 that it becomes."""
    try:
        struct.pack("<f", score)  # the native "f" would make it infinite
    except OverflowError:
        return False
    return math.isfinite(score)


def shown(error: BaseException) -> str:
    """The error in a line."""
    try:
        return f"{type(error).__name__}: {error}".split("\n")[0][:300]
    except BaseException:  # its own __str__ raised
        return f"{type(error).__name__}, which cannot be shown"


def _terminate(signum: int, frame: types.FrameType | None) -> None:
    if not _working:
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
def _loaded(pickled: bytes) -> Any:
    return pickle.loads(pickled)


class Worker(SpawnProcess):
    """A spawned process that does not import the script that was started."""

    def start(self) -> None:
        """As ever, but for that."""
        with _without_a_script():
            super().start()

    @property
    def exitcode(self) -> int | None:
        """As ever, but `QUIETLY` for 0: no worker is asked to end by itself."""
        code = super().exitcode
        return QUIETLY if code == 0 else code


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
