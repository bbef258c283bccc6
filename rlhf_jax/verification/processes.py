"""A pool of worker processes that hold one object of the user's, and how they end.

    pickled ──start──> processes ──schedule──> a result, or why there is none

The object is a verifier (`pool`) or an environment. Processes are spawned with the
first call, import its module and nothing of this process, and one that hangs or dies in
a call is replaced. `pebble` gives up the pool of which one ends between two calls.
"""

from __future__ import annotations

import os
import pickle
import types
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal, NamedTuple

import pebble

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.verification import worker

OnFailure = Literal["zero", "stop"]


class Ended(NamedTuple):
    """What became of a process that returned nothing."""

    why: str
    timed_out: bool = False


def check_options(*, timeout: float, on_failure: OnFailure) -> None:
    """InputError unless they can be chosen."""
    checks.positive(timeout=timeout)
    if on_failure not in ("zero", "stop"):
        raise InputError(
            f"on_failure: expected 'zero' or 'stop', got {on_failure!r}; choose one"
        )


def start(pickled: bytes, *, num_workers: int | None) -> pebble.ProcessPool:
    """Processes that hold what was pickled; none runs before the first call.

    Args:
      num_workers: processes; None is one a processor.
    """
    if num_workers is None:
        num_workers = os.cpu_count() or 1
    checks.positive(num_workers=num_workers)
    if num_workers != int(num_workers):
        raise InputError(
            f"num_workers: expected a whole number, got {num_workers}; choose one"
        )
    return pebble.ProcessPool(
        max_workers=num_workers,
        initializer=worker.prepare,
        initargs=(pickled,),
        context=worker.Context(),
    )


def schedule(
    pool: pebble.ProcessPool,
    function: Callable[..., Any],
    *,
    args: tuple[Any, ...],
    timeout: float,
    of: str,
) -> Future[Any]:
    """Starts a call and returns at once.

    Args:
      timeout: seconds of the call, from when a process takes it.
      of: whose processes they are, for messages, as "of the environment".

    Returns:
      What becomes the function's result, or one of the errors of `ended` and `broken`.

    Raises:
      StopError: the pool has been given up.
    """
    try:
        return pool.schedule(function, args=args, timeout=timeout)
    except RuntimeError as error:
        raise broken(error, of=of) from error


def broken(error: BaseException, *, of: str) -> StopError:
    """The error for a pool that does not work, or for what cannot be sent to it.

    Args:
      of: as that of `schedule`.
    """
    told = f"the processes {of} do not work: {type(error).__name__}: {error}"
    if isinstance(error, (BrokenProcessPool, RuntimeError)):
        told += (
            "; expected them to live between calls, and one was killed, or ended as it"
            " started: see what ended it, such as a lack of memory, and resume the run"
        )
    return StopError(told)


def ended(error: BaseException, *, timeout: float) -> Ended | None:
    """Why a call's process was ended, from what its future raised; None if it was not.

    Args:
      timeout: seconds that the call had.
    """
    if isinstance(error, TimeoutError):
        return Ended(f"took longer than {timeout:g} s", timed_out=True)
    if isinstance(error, pebble.ProcessExpired):
        status = 0 if error.exitcode == worker.QUIETLY else error.exitcode
        return Ended(f"ended its process (status {status})")
    return None


def pickled(held: Any, *, kind: str) -> bytes:
    """An object as its processes get it.

    Args:
      kind: what messages call it, as "verifier".

    Raises:
      InputError: it cannot be sent to another process.
    """
    article = "an" if kind[0] in "aeiou" else "a"
    expected = (
        f"expected {article} {kind} that other processes can import: a function, or an "
        "instance of a class, at the top of a module"
    )
    try:
        found = pickle.dumps(held)
    except Exception as error:  # whatever its own state raises
        raise InputError(f"{expected}; got {held!r:.80}: {error}") from error
    of = held if isinstance(held, types.FunctionType) else type(held)
    if of.__module__ == "__main__":
        raise InputError(
            f"{expected}; got {held!r:.80} of the script that was started; move it "
            f"to a module beside it"
        )
    return found
