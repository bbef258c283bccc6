"""A time limit on a user's code, once a signal asks the run to stop.

    with Deadline(seconds=20.0) as deadline:
        for step in range(num_steps):
            ...
            with deadline.limit(save):
                scores = reward(rollout)

A signal lets the step finish first. A reward that hangs never finishes it, and while
the main thread stands in C code no signal handler of Python's runs there. So a thread
of its own is told of the signal by the system. After the time limit it saves in the
main thread's place and ends the process. Where the main thread keeps Python's global
lock, as `re` does, the handler of a timer stops it there, so that the thread can run.

C code that keeps that lock and never looks for signals holds up both: such a process
only ends by SIGKILL, and goes on from its newest snapshot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

from rlhf_jax.functional import checks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TICK = 0.5  # seconds of the process's own time
_CLOSED = 0  # what is written where a signal's number would be


class Deadline:
    """Ends the process when a signal finds it in code that does not return in time.

    A context manager of the main thread's, around the loop.
    """

    def __init__(self, seconds: float) -> None:
        """Nothing is watched yet.

        Args:
          seconds: from the signal until `save` is called.

        Raises:
          InputError: it is no time.
        """
        checks.positive(stop_timeout=seconds)
        self.seconds = seconds
        self._changed = threading.Condition()
        self._save: Callable[[int], str] | None = None  # while in `limit`
        self._inside = False  # the main thread, without the lock of `_changed`
        self._over = threading.Event()
        self._until: float | None = None  # of the monotonic clock, once a signal came

    def on_signal(self) -> None:
        """For the handler of the signal, where it runs."""
        self._start()
        signal.setitimer(signal.ITIMER_VIRTUAL, TICK, TICK)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undone:  # unless all of it succeeds
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
        """Around code that may hang.

        Args:
          save: signal -> what to tell the user; called from another thread, once, while
            the main thread is in here, which it never leaves then.
        """
        _tell(self._write)  # again, as the code of the last time may have changed it
        with self._changed:
            self._save = save
            self._changed.notify_all()
        try:
            self._inside = True
            yield
        finally:
            self._inside = False  # a tick that holds the lock would wait for itself
            with self._changed:  # not while it is being saved
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
    except BaseException as error:  # whatever it is, this process is to end
        status = 1
        message = (
            f"stopped: expected to save, got {type(error).__name__}: {error}; "
            f"the snapshots before stay, and --resume goes on from the newest"
        )
    # Neither `print`, whose lock the main thread may hold, nor an orderly exit, which
    # would wait for it.
    os.write(2, f"{message}\n".encode())
    os._exit(status)


def _tell(fd: int) -> int:
    """Has the system write the number of each signal there; where it did before."""
    return signal.set_wakeup_fd(fd, warn_on_full_buffer=False)


def _forget() -> None:
    # A copy of this process has signals of its own.
    if threading.current_thread() is threading.main_thread():
        _tell(-1)


if hasattr(os, "register_at_fork"):  # on POSIX systems
    os.register_at_fork(after_in_child=_forget)
