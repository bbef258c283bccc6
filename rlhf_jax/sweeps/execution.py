"""Executes the runs of a sweep, several at a time.

Finished runs are skipped, and runs that have begun are resumed. A failed run is
reported, and the others continue. If the sweep is stopped, its runs save and stop.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf_jax.runs.command_line import Interrupt
from rlhf_jax.sweeps.launchers import Launcher, Process
from rlhf_jax.sweeps.planned import Planned

BETWEEN = 0.1  # seconds between polls of the processes
ERRORS = ("error: ", "stopped: ")  # as `command_line.main` prints them


class Ended(NamedTuple):
    """A run whose process has ended."""

    run: Planned
    status: int  # exit status; -N if signal N ended it
    seconds: float
    printed: str  # the first line of its error, or else the last line that it printed

    @property
    def failed(self) -> bool:
        """Whether the run is unfinished."""
        return not self.run.done

    @property
    def why(self) -> str:
        """The reason why the run is unfinished, as far as it is known."""
        if self.status < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"ended by {names.get(-self.status, -self.status)}"
        if self.status == 0:
            return "ended without summary.json, which a run writes at its end"
        return self.printed


def run_all(
    planned: Sequence[Planned],
    *,
    launcher: Launcher,
    jobs: int,
    tell: Callable[[Ended], None],
) -> list[Ended]:
    """Executes the unfinished runs in order, `jobs` at a time.

    Returns:
      The runs in the order in which they ended; `tell` is called with each as it ends.

    Raises:
      Interrupted: a signal came; the runs under way were stopped and have saved.
    """
    waiting = [run for run in planned if not run.done]
    going: dict[Process, tuple[Planned, float, int]] = {}
    ended: list[Ended] = []
    with Interrupt() as interrupt:
        try:
            while (waiting or going) and not interrupt.requested:
                while waiting and len(going) < jobs:
                    run = waiting.pop(0)
                    size = run.log.stat().st_size if run.log.exists() else 0
                    going[launcher.start(run)] = run, time.monotonic(), size
                time.sleep(BETWEEN)
                for process in [p for p in going if p.poll() is not None]:
                    run, began, size = going.pop(process)
                    seconds = time.monotonic() - began
                    printed = _printed(run.log, after=size)
                    ended.append(Ended(run, process.wait(), seconds, printed))
                    tell(ended[-1])
        finally:
            for process in going:
                process.terminate()
            for process in going:
                process.wait()
            launcher.close()
        interrupt.check()
    return ended


def _printed(log: Path, *, after: int) -> str:
    """The first line of the last error in a log, after the bytes of earlier starts.

    An error of several lines ends with how to go on. Without one, as after a traceback,
    it is the last line that is not empty.
    """
    try:
        with log.open("rb") as file:
            file.seek(after)
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line for line in reversed(lines) if line.strip()]
    errors = (line for line in lines if line.startswith(ERRORS))
    return next(errors, next(iter(lines), ""))
