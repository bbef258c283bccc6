"""Worker processes that hold one user object and serve calls of it.

    submit ──queue──> process 0   call  call          in_flight calls at a time
                      process 1   call
           <──────────            a result, or why there is none

The object is a verifier (`pool`), an environment or a sampler. Processes are spawned
when calls need them, import the object's module but not the script of this process, and
end with this process. Calls are pure functions, so they can be repeated: a call that a
process has not begun when it dies is sent to another. If a process dies with several
begun calls, each is repeated alone, to find the one that ends its process.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from multiprocessing import connection
from typing import Any

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import StopError
from rlhf_jax.verification import worker
from rlhf_jax.verification.worker import Failed

STARTS = 3  # the pool gives up when this many processes in a row fail to start


@dataclasses.dataclass(eq=False)
class _Call:
    number: int
    data: bytes  # pickled function and arguments
    timeout: float
    then: Callable[[Any], Any]
    future: Future[Any]
    deaths: int = 0  # processes that died after they had begun this call
    deadline: float = float("inf")  # of `time.monotonic`; finite once it has begun


class _Process:
    """A worker process and the calls that were sent to it."""

    def __init__(self, pickled: bytes, *, in_flight: int) -> None:
        self.link, other = multiprocessing.get_context("spawn").Pipe()
        arguments = (pickled, other, in_flight > 1)
        self._worker = worker.Spawned(target=worker.serve, args=arguments, daemon=True)
        self._worker.start()
        other.close()  # so that the link ends when the process does
        self.ready, self.calls = False, dict[int, _Call]()
        self._kill_at = float("inf")

    def end(self) -> None:
        """Sends SIGTERM; `is_gone` kills the process after `GRACE_SECONDS`."""
        self.link.close()
        self._worker.terminate()
        self._kill_at = time.monotonic() + worker.GRACE_SECONDS

    def is_gone(self) -> bool:
        """Whether a process that was asked to end has ended."""
        if time.monotonic() > self._kill_at:
            self._worker.kill()
        return not self._worker.is_alive()

    def status(self) -> int:
        """The exit status of a process whose link has ended."""
        self._worker.join(worker.GRACE_SECONDS)
        if self._worker.is_alive():  # it has closed the link
            self._worker.kill()
            self._worker.join()
        status = self._worker.exitcode
        assert status is not None
        return status


class Workers(contextlib.AbstractContextManager[Any]):
    """Processes that serve calls; a context manager that ends them.

    The first call starts the first process.
    """

    def __init__(
        self,
        pickled: bytes,
        *,
        of: str,
        num_workers: int | None = None,
        in_flight: int = 1,
    ) -> None:
        """Makes the pool without starting a process.

        Args:
          pickled: the user object, from `user_objects.pickled`.
          of: describes the processes in messages, such as "of the environment".
          num_workers: number of processes; None is one per processor.
          in_flight: concurrent calls per process; above 1, calls are coroutines.
        """
        if num_workers is None:
            num_workers = os.cpu_count() or 1
        checks.at_least_one(num_workers=num_workers)
        self._pickled, self._of = pickled, of
        self._num_workers, self._in_flight = num_workers, in_flight
        self._lock = threading.Lock()
        self._waiting: collections.deque[_Call] = collections.deque()
        self._cancelled: list[int] = []
        self._processes: list[_Process] = []
        self._ending: list[_Process] = []
        self._wake, self._waker = multiprocessing.Pipe(duplex=False)
        self._thread: threading.Thread | None = None
        self._stopping, self._numbers, self._failed_starts = False, 0, 0
        self._broken: StopError | None = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float,
        then: Callable[[Any], Any] = lambda result: result,
    ) -> Future[Any]:
        """Starts a call and returns at once.

        Args:
          function: called with the user object and `args`; a coroutine function if
            `in_flight` is above 1.
          timeout: seconds, from when a process begins the call.
          then: called in this process with the function's result, or with `Failed`.

        Returns:
          A future of what `then` returns, by default its argument, or raises.
          Cancelling the future ends a running call.

        Raises:
          StopError: the call cannot be pickled, or no process starts.
        """
        try:
            data = pickle.dumps((function, args))
        except Exception as error:  # the arguments' own `__reduce__` may raise anything
            raise self._error(f"{type(error).__name__}: {error}") from error
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._numbers += 1
            call = _Call(self._numbers, data, timeout, then, Future())
            self._waiting.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
        call.future.add_done_callback(lambda future: self._done(future, call.number))
        self._waker.send_bytes(b"+")
        return call.future

    def close(self) -> None:
        """Ends the processes and cancels all calls."""
        with self._lock:
            self._stopping, thread = True, self._thread
        if thread is not None:
            self._waker.send_bytes(b"+")
            thread.join()
            self._thread = None

    def _done(self, future: Future[Any], number: int) -> None:
        if future.cancelled() and not self._stopping:
            with self._lock:
                self._cancelled.append(number)
            self._waker.send_bytes(b"+")

    def _run(self) -> None:
        """Sends calls and receives results, in a thread of its own."""
        try:
            while not self._stopping:
                self._drop_cancelled()
                self._hand_out()
                self._wait()
                self._end_late()
        finally:
            with self._lock:
                left = [*self._waiting]
            for process in self._processes:
                left += process.calls.values()
                self._end(process)
            for call in left:
                call.future.cancel()
            while not all(process.is_gone() for process in self._ending):
                time.sleep(0.01)

    def _wait(self) -> None:
        """Waits for a message, a caller or the next deadline; receives messages."""
        deadlines = [
            call.deadline for p in self._processes for call in p.calls.values()
        ]
        left = max(0.0, min(deadlines, default=float("inf")) - time.monotonic())
        if self._ending:
            left = min(left, 0.1)
        links: dict[Any, _Process] = {p.link: p for p in self._processes}
        timeout = None if left == float("inf") else left
        for ready in connection.wait([self._wake, *links], timeout):
            if ready is self._wake:
                self._wake.recv_bytes()
            else:
                self._receive(links[ready])
        self._ending = [process for process in self._ending if not process.is_gone()]

    def _receive(self, process: _Process) -> None:
        try:
            kind, number, value = process.link.recv()
        except (EOFError, OSError):
            self._lost(process)
            return
        if kind is worker.Kind.READY:
            process.ready, self._failed_starts = True, 0
            return
        call = process.calls.get(number)
        if call is None:
            return  # cancelled meanwhile
        if kind is worker.Kind.BEGUN:
            # A worker with concurrent calls times out by itself, unless it hangs.
            grace = worker.GRACE_SECONDS if self._in_flight > 1 else 0.0
            call.deadline = time.monotonic() + call.timeout + grace
            return
        del process.calls[number]
        broken = kind is worker.Kind.ERROR
        _set(call, self._error(value) if broken else value)

    def _lost(self, process: _Process) -> None:
        """Fails or repeats the calls of a process that has ended by itself."""
        status = process.status()
        if not process.ready:
            self._failed_starts += 1
        begun = [
            call for call in process.calls.values() if call.deadline < float("inf")
        ]
        for call in begun:
            call.deaths += 1
            if len(begun) == 1 or call.deaths > 1:
                del process.calls[call.number]
                why = f"ended its process (status {status})"
                _set(call, Failed(why, status=status))
        self._end(process)
        if self._failed_starts >= STARTS:
            self._give_up(f"{STARTS} in a row ended as they started (status {status})")

    def _end_late(self) -> None:
        now = time.monotonic()
        for process in [*self._processes]:
            late = [call for call in process.calls.values() if call.deadline < now]
            for call in late:
                del process.calls[call.number]
                _set(call, worker.late(call.timeout))
            if late:
                for call in process.calls.values():
                    call.deaths += call.deadline < float("inf")
                self._end(process)

    def _end(self, process: _Process) -> None:
        """Ends a process and puts its remaining calls back into the queue."""
        self._processes.remove(process)
        process.end()
        self._ending.append(process)
        for call in process.calls.values():
            call.deadline = float("inf")
        with self._lock:
            self._waiting.extendleft(reversed(process.calls.values()))

    def _drop_cancelled(self) -> None:
        with self._lock:
            numbers, self._cancelled = {*self._cancelled}, []
            left = [call for call in self._waiting if call.number not in numbers]
            self._waiting = collections.deque(left)
        for process in [*self._processes]:
            for number in numbers & process.calls.keys():
                del process.calls[number]
                if self._in_flight == 1:
                    self._end(process)  # a plain call cannot be interrupted
                else:
                    self._send(process, (number, None, 0.0))

    def _hand_out(self) -> None:
        """Sends calls to idle processes, else to new ones, else to the least busy."""
        while self._waiting:
            free = [process for process in self._processes if self._takes(process)]
            process = min(free, key=lambda p: len(p.calls), default=None)
            if process is None or process.calls:
                if len(self._processes) < self._num_workers:
                    process = _Process(self._pickled, in_flight=self._in_flight)
                    self._processes.append(process)
                elif process is None:
                    return
            with self._lock:
                call = self._waiting.popleft()
            process.calls[call.number] = call
            self._send(process, (call.number, call.data, call.timeout))

    def _takes(self, process: _Process) -> bool:
        calls = [*process.calls.values(), self._waiting[0]]
        alone = any(call.deaths for call in calls)
        return len(calls) <= (1 if alone else self._in_flight)

    def _send(self, process: _Process, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # it has ended; `_receive` handles that
            process.link.send(message)

    def _give_up(self, why: str) -> None:
        broken = self._error(
            f"{why}, expected them to wait for calls; see what ended them, such as a "
            f"lack of memory, and resume the run"
        )
        with self._lock:
            self._broken = broken
            left, self._waiting = self._waiting, collections.deque()
        for call in left:
            _set(call, broken)

    def _error(self, why: str) -> StopError:
        return StopError(f"the processes {self._of} do not work: {why}")


def _set(call: _Call, value: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        try:
            if isinstance(value, StopError):
                raise value
            result = call.then(value)
        except Exception as error:  # of any type, or the caller waits forever
            call.future.set_exception(error)
        else:
            call.future.set_result(result)
