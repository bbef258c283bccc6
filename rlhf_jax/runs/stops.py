"""Stops by signals: within a time limit, and never dropped.

`Deadline` limits the time of user code, once a signal asks the run to stop:

    with Deadline(seconds=20.0) as deadline:
        for step in range(num_steps):
            ...
            with deadline.limit(save):
                scores = reward(rollout)

After a signal the run first finishes its step. A reward that hangs never returns, and
Python runs no signal handler while the main thread is in C code. The system therefore
also notifies a separate thread of the signal. After the time limit that thread saves in
place of the main thread and ends the process. If the main thread holds Python's global
lock, as `re` does, a timer's handler suspends it so that the other thread can run.

C code that holds the lock and never checks for signals blocks both threads. Such a
process ends only by SIGKILL, and resumes from its newest snapshot.

`sent_again` repeats a signal whose exception Python has dropped. A signal's handler
runs wherever the main thread is. If it raises inside a finalizer, or a callback of the
garbage collector (JAX has one), Python only reports the exception.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TICK = 0.5  # seconds of CPU time between two checks
LATER = 0.05  # seconds until a signal is repeated, which no finalizer should take
_CLOSED = 0  # written to the pipe in place of a signal's number


class Deadline:
    """Ends the process if code does not return within a time limit after a signal.

    A context manager around the loop, for the main thread.
    """

    def __init__(self, seconds: float) -> None:
        """Stores the time limit; watching begins when the context is entered.

        Args:
          seconds: time from the signal until `save` is called.

        Raises:
          InputError: `seconds` is not positive.
        """
        # Not at the top of the file: processes of verifiers do without JAX.
        from rlhf_jax.functional import checks

        checks.positive(stop_timeout=seconds)
        self.seconds = seconds
        self._changed = threading.Condition()
        self._save: Callable[[int], str] | None = None  # set inside `limit`
        self._inside = False  # whether the main thread is in `limit`, without the lock
        self._over = threading.Event()
        self._until: float | None = None  # monotonic time, once a signal came

    def on_signal(self) -> None:
        """Starts the time limit; to be called by the signal's handler."""
        self._start()
        signal.setitimer(signal.ITIMER_VIRTUAL, TICK, TICK)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undone:  # if a later line fails
            self._read, self._write = os.pipe()
            undone.callback(os.close, self._read)
            undone.callback(os.close, self._write)
            os.set_blocking(self._write, False)
            self._handler = signal.signal(signal.SIGVTALRM, self._on_tick)
            undone.callback(signal.signal, signal.SIGVTALRM, self._handler)
            self._previous = _tell(self._write)
            undone.callback(_tell, self._previous)
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
            undone.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, self._handler)
        _tell(self._previous)
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        os.write(self._write, bytes([_CLOSED]))
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    @contextlib.contextmanager
    def limit(self, save: Callable[[int], str]) -> Iterator[None]:
        """Encloses code that may hang.

        Args:
          save: signal -> message to the user; called at most once, from another thread,
            while the main thread is inside. The main thread then never leaves.
        """
        _tell(self._write)  # again, because user code may have replaced it
        with self._changed:
            self._save = save
            self._changed.notify_all()
        try:
            self._inside = True
            yield
        finally:
            self._inside = False  # else a tick could suspend this thread with the lock
            with self._changed:  # waits here while the state is being saved
                self._save = None

    def _start(self) -> float:
        if self._until is None:
            self._until = time.monotonic() + self.seconds
        return self._until

    def _on_tick(self, signum: int, frame: FrameType | None) -> None:
        overdue = self._until is not None and time.monotonic() > self._until
        if overdue and self._inside:
            threading.Event().wait()  # until the process ends

    def _watch(self) -> None:
        signum = -1
        while signum not in SIGNALS:
            (signum,) = os.read(self._read, 1)
            if signum == _CLOSED:
                return
        if self._over.wait(max(0.0, self._start() - time.monotonic())):
            return
        with self._changed:
            while self._save is None and not self._over.is_set():
                self._changed.wait()
            if self._save is not None:
                _end(signum, self._save)


def _end(signum: int, save: Callable[[int], str]) -> None:
    status = 128 + signum
    try:
        message = save(signum)
    except BaseException as error:  # the process must end in any case
        status = 1
        message = (
            f"stopped: expected to save, got {type(error).__name__}: {error}; "
            f"earlier snapshots are kept, and --resume goes on from the newest"
        )
    # Not `print`, whose lock the main thread may hold, nor an orderly exit, which would
    # wait for the main thread.
    os.write(2, f"{message}\n".encode())
    os._exit(status)


def _tell(fd: int) -> int:
    """Has the system write each signal's number to `fd`; returns the previous one."""
    return signal.set_wakeup_fd(fd, warn_on_full_buffer=False)


def _forget() -> None:
    # A forked child has signals of its own.
    if threading.current_thread() is threading.main_thread():
        _tell(-1)


if hasattr(os, "register_at_fork"):  # POSIX systems
    os.register_at_fork(after_in_child=_forget)


def sent_again(
    signals: Mapping[type[BaseException], signal.Signals],
) -> Callable[[Any], Any]:
    """Installs a hook that sends a signal again if Python drops its exception.

    The signal is sent after a delay, since its handler would raise at the same place
    otherwise. An exception that was not dropped sends nothing, so that no handler
    interrupts the cleanup.

    Args:
      signals: {exception that the handler raises: signal}, subclasses first.

    Returns:
      The former `sys.unraisablehook`.
    """
    before = sys.unraisablehook

    def hook(error: Any, /) -> None:
        for kind, signum in signals.items():
            if issubclass(error.exc_type, kind):
                again = threading.Timer(LATER, os.kill, (os.getpid(), signum))
                again.daemon = True
                again.start()
                return
        before(error)

    sys.unraisablehook = hook
    return before
