"""Runs of a sweep, some at a time.

A run that is done is left alone; one that has begun goes on; one that fails is told,
and the others go on. When the sweep is stopped its runs are, each saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlhf_jax.runs.command_line import Interrupt
from rlhf_jax.sweeps.launchers import Launcher, Process
from rlhf_jax.sweeps.planned import Planned

BETWEEN = 0.1  # seconds between looks at the processes


class Ended(NamedTuple):
    """A run whose process has ended."""

    run: Planned
    status: int  # its exit status, 0 where it is done; -N where signal N ended it
    seconds: float

    @property
    def failed(self) -> bool:
        """It is not done."""
        return self.status != 0

    @property
    def why(self) -> str:
        """The last line that it printed."""
        try:
            text = self.run.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def run_all(
    planned: Sequence[Planned],
    *,
    launcher: Launcher,
    jobs: int,
    tell: Callable[[Ended], None],
) -> list[Ended]:
    """Runs what is not done, `jobs` at a time, in the order given.

    Args:
      launcher: what starts a run.
      tell: called with each run when it has ended.

    Returns:
      Those that have ended, in that order.

    Raises:
      Interrupted: a signal came; the runs under way were stopped and have saved.
    """
    waiting = [run for run in planned if not run.done]
    going: dict[Process, tuple[Planned, float]] = {}
    ended: list[Ended] = []
    with Interrupt() as interrupt:
        try:
            while (waiting or going) and not interrupt.requested:
                while waiting and len(going) < jobs:
                    run = waiting.pop(0)
                    going[launcher.start(run)] = run, time.monotonic()
                time.sleep(BETWEEN)
                for process in [each for each in going if each.poll() is not None]:
                    run, began = going.pop(process)
                    status = process.wait()
                    if status == 0 and not run.done:
                        status = 1  # it ended, but not as a run does
                    ended.append(Ended(run, status, time.monotonic() - began))
                    tell(ended[-1])
        finally:
            for process in going:
                process.terminate()
            for process in going:
                process.wait()
        interrupt.check()
    return ended
