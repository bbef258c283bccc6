"""The main loop of a worker process, which serves calls of one user object.

`workers` starts the processes, for verifiers (`pool`), environments and samplers. This
module loads no JAX.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
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
from typing import Any, NamedTuple

from rlhf_jax.roles.rewards import verifiers
from rlhf_jax.roles.rewards.verifiers import Judged, Verifier
from rlhf_jax.runs import stops

GRACE_SECONDS = 2.0  # time for a worker to end by itself


class Kind(enum.Enum):
    """The kind of a worker's message (kind, number of the call, value)."""

    READY = enum.auto()  # the object has been imported
    BEGUN = enum.auto()
    RESULT = enum.auto()
    ERROR = enum.auto()  # the call could not be unpickled


class Rejected(Exception):
    """The user's object returned something invalid: "returned None, ..."."""


class Terminated(BaseException):
    """This worker must end; unwinding the stack runs the verifier's own cleanup."""


class Failed(NamedTuple):
    """Why a call in a worker has no result."""

    why: str  # "raised KeyError: 'gold'"
    imported: bool = True  # False if the object could not be imported
    timed_out: bool = False
    status: int | None = None  # exit status of the process, if it ended by itself
    where: str = ""  # for messages: "prompt 'Hi' (row 3) and response 'Yo'"


def late(seconds: float) -> Failed:
    """Why a call that exceeds its time limit has no result."""
    return Failed(f"took longer than {seconds:g} s", timed_out=True)


class Spawned(SpawnProcess):
    """A spawned process that does not import the main script of its parent.

    Workers are spawned, never forked: a fork of a process with JAX's threads could wait
    forever for a lock that one of them held. The script would load JAX and the
    libraries of its models once per worker.
    """

    def start(self) -> None:
        """Starts the process."""
        with _without_a_script():
            super().start()


_STARTING = threading.Lock()


@contextlib.contextmanager
def _without_a_script() -> Iterator[None]:
    # `multiprocessing` reads here which script a process should import.
    with _STARTING:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script


_working = False


def serve(pickled: bytes, link: Connection, several: bool) -> None:
    """Serves calls until the parent or a signal ends this process.

    Args:
      pickled: the user object, the first argument of every function.
      link: delivers (number, pickled function and arguments, timeout in seconds).
      several: functions are coroutine functions, and calls run concurrently.
    """
    loaded = _prepared(pickled)
    try:
        link.send((Kind.READY, 0, None))
        if several:
            asyncio.run(_serve_several(loaded, link))
        while not several:
            number, data, _ = link.recv()  # `workers` ends a call that takes too long
            link.send((Kind.BEGUN, number, None))
            try:
                function, args = pickle.loads(data)
                result = Kind.RESULT, _call(loaded, function, args)
            except Exception as error:
                result = Kind.ERROR, shown(error)
            link.send((result[0], number, result[1]))
    except (EOFError, OSError):
        pass  # the parent has closed the link
    os._exit(1)


async def _serve_several(loaded: Any, link: Connection) -> None:
    """Serves concurrent calls until SIGTERM, which cancels those under way."""
    loop, tasks = asyncio.get_running_loop(), dict[int, asyncio.Task[None]]()

    async def answer(number: int, data: bytes, seconds: float) -> None:
        link.send((Kind.BEGUN, number, None))
        try:
            function, args = pickle.loads(data)
            async with asyncio.timeout(seconds):
                result = Kind.RESULT, await _call_async(loaded, function, args)
        except TimeoutError:
            result = Kind.RESULT, late(seconds)
        except Exception as error:
            result = Kind.ERROR, shown(error)
        with contextlib.suppress(OSError):  # the parent has closed the link
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


def _prepared(pickled: bytes) -> Any:
    """Imports the object before the first call, so that no time limit includes it.

    From here on the worker ends with its parent, however the parent ends.

    Returns:
      The object, or `Failed`, which is then the result of every call.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, _terminate)
    stops.sent_again({Terminated: signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        return pickle.loads(pickled)
    except BaseException as error:  # SystemExit too
        return Failed(f"could not be imported: {shown(error)}", imported=False)


def _call(loaded: Any, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Returns `function(loaded, *args)`, or `Failed` if it raised."""
    global _working
    if isinstance(loaded, Failed):
        return loaded
    try:
        _working = True
        return function(loaded, *args)
    except Terminated:
        os._exit(1)
    except BaseException as error:  # SystemExit too; an error need not be picklable
        return _failed(error)
    finally:
        _working = False


async def _call_async(
    loaded: Any, function: Callable[..., Awaitable[Any]], args: Sequence[Any]
) -> Any:
    """Runs `_call` for a coroutine function."""
    if isinstance(loaded, Failed):
        return loaded
    try:
        return await function(loaded, *args)
    except BaseException as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # timed out, or cancelled by the caller
        return _failed(error)


def _failed(error: BaseException) -> Failed:
    return Failed(
        f"{error}" if isinstance(error, Rejected) else f"raised {shown(error)}"
    )


def verify(
    verifier: Verifier, prompt: str, response: str, row: Mapping[str, Any]
) -> Judged:
    """Scores one response, in a worker; `Rejected` unless all numbers are finite."""
    score, counts = verifiers.judged(verifier, prompt, response, row)
    return Judged(number(score), counted(counts, verifiers.counted(verifier)))


def counted(counts: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Returns the user's counts in the order of `names`; `Rejected` as `number`."""
    return {name: number(counts[name], called=name) for name in names}


def number(returned: Any, *, called: str = "score") -> float:
    """Returns the user's number as a float; `Rejected` unless finite in float32."""
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
    """Returns the error's class and message in one line."""
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
    os.kill(os.getpid(), signal.SIGTERM)  # the main thread handles it and cleans up
    time.sleep(GRACE_SECONDS)
    os._exit(1)
