"""A worker process, and what it runs: calls of one object, one at a time or several.

`workers` starts them, for verifiers (`pool`), environments and samplers. This module
loads no JAX.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, TypeVar

from rlhf_jax.roles.rewards import verifiers
from rlhf_jax.runs.stops import dropped

GRACE_SECONDS = 2.0  # for a worker to end by itself
Result = TypeVar("Result")


class Kind(enum.Enum):
    """What a worker says, with the number of a call and a value."""

    READY = enum.auto()  # for calls; what is called has been imported
    BEGUN = enum.auto()
    RESULT = enum.auto()
    TIMED_OUT = enum.auto()
    ERROR = enum.auto()  # the call could not be read, or its result not be sent


class Answer(NamedTuple):
    """What a verifier said of one response, or why it said nothing."""

    score: float
    why: str  # "" unless it failed
    timed_out: bool = False
    imported: bool = True  # False where the verifier itself could not be imported
    counts: tuple[float, ...] = ()  # in the order of a verifier's own `counts`


class Rejected(Exception):
    """Why what the user's object returned is not taken: "returned None, ..."."""


class Terminated(BaseException):
    """This worker is to end; on its way up it clears away what verifiers have made."""


class Failed(NamedTuple):
    """Why a call in a worker returned nothing."""

    why: str
    imported: bool = True  # False where what is called could not be imported


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


_working = False


def serve(pickled: bytes, link: Connection, several: bool) -> None:
    """Answers the calls of this worker until it is ended.

    Args:
      pickled: what is called; functions get it before their own arguments.
      link: brings (number, pickled function and arguments, seconds).
      several: functions are coroutine functions, and calls run beside each other.
    """
    _prepare(pickled)
    try:
        link.send((Kind.READY, 0, None))
        if several:
            asyncio.run(_serve_several(pickled, link))
        while not several:
            number, data, _ = link.recv()  # `workers` ends a call that takes too long
            link.send((Kind.BEGUN, number, None))
            try:
                function, args = pickle.loads(data)
                result = Kind.RESULT, function(pickled, *args)
            except Exception as error:
                result = Kind.ERROR, shown(error)
            link.send((result[0], number, result[1]))
    except (EOFError, OSError):
        pass  # the parent has no use for it any more
    os._exit(1)


async def _serve_several(pickled: bytes, link: Connection) -> None:
    """Until SIGTERM; coroutines that are under way then are cancelled."""
    loop, tasks = asyncio.get_running_loop(), dict[int, asyncio.Task[None]]()

    async def answer(number: int, data: bytes, seconds: float) -> None:
        link.send((Kind.BEGUN, number, None))
        try:
            function, args = pickle.loads(data)
            async with asyncio.timeout(seconds):
                result = Kind.RESULT, await function(pickled, *args)
        except TimeoutError:
            result = Kind.TIMED_OUT, None
        except Exception as error:
            result = Kind.ERROR, shown(error)
        with contextlib.suppress(OSError):  # the parent has ended the link
            link.send((result[0], number, result[1]))

    def begin(number: int, data: bytes | None, seconds: float) -> None:
        if data is None:  # cancelled
            if number in tasks:
                tasks[number].cancel()
            return
        tasks[number] = loop.create_task(answer(number, data, seconds))
        tasks[number].add_done_callback(lambda _: tasks.pop(number))

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(begin, *link.recv())

    ends = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ends.set)
    threading.Thread(target=receive, daemon=True).start()
    await ends.wait()


def _prepare(pickled: bytes) -> None:
    """Before a worker's first call: imports what is called, outside its time limit.

    From here on the worker ends with its parent, however that ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, _terminate)
    dropped.sent_again({Terminated: signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(BaseException):  # reported by the first call
        _loaded(pickled)


def call(pickled: bytes, use: Callable[[Any], Result]) -> Result | Failed:
    """`use` of what was pickled, in a worker; whatever it raises is an answer."""
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
        return _failed(error)
    finally:
        _working = False


async def call_several(
    pickled: bytes, use: Callable[[Any], Awaitable[Result]]
) -> Result | Failed:
    """`call` of a coroutine function, beside others."""
    try:
        loaded = _loaded(pickled)
    except (Exception, SystemExit) as error:
        return Failed(f"could not be imported: {shown(error)}", imported=False)
    try:
        return await use(loaded)
    except BaseException as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # it is too late, or the caller has no use for it
        return _failed(error)


def _failed(error: BaseException) -> Failed:
    return Failed(
        f"{error}" if isinstance(error, Rejected) else f"raised {shown(error)}"
    )


def verify(
    pickled: bytes, prompt: str, response: str, row: Mapping[str, Any]
) -> Answer:
    """What a pickled verifier says of one response, in a worker."""

    def judged(verifier: Any) -> Answer:
        score, counts = verifiers.judged(verifier, prompt, response, row)
        names = verifiers.counted(verifier)
        return Answer(number(score), "", counts=counted(counts, names))

    returned = call(pickled, judged)
    if isinstance(returned, Failed):
        return Answer(0.0, returned.why, imported=returned.imported)
    return returned


def counted(counts: Mapping[str, Any], names: Sequence[str]) -> tuple[float, ...]:
    """What user code counts, in the order of its names; `Rejected` as of `number`."""
    return tuple(number(counts[name], called=name) for name in names)


def number(returned: Any, *, called: str = "score") -> float:
    """What was returned, if it is finite also as the float32 that it becomes."""
    why = f"returned {returned!r:.60}, which is not a number"
    if hasattr(returned, "__float__"):
        number = float(returned)
        why = f"returned {number}"
        with contextlib.suppress(OverflowError):
            struct.pack("<f", number)  # the native "f" would make it infinite
            if math.isfinite(number):
                return number
    raise Rejected(f"{why}, expected a finite number as the {called}")


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
