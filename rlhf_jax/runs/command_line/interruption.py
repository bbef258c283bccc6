"""A signal becomes a clean stop between two steps of a run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

from rlhf_jax.runs.folder import CONFIG
from rlhf_jax.runs.run_config import RunConfig


class Interrupted(Exception):
    """The run was asked to stop, and has saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class Interrupt:
    """Turns SIGTERM and Ctrl-C into a request; a second Ctrl-C stops at once.

    with cli.Interrupt() as interrupt:
        for step in range(start, num_steps):
            ...
            if interrupt.requested or (step + 1) % config.snapshot_every == 0:
                record.flush()
                snapshots.save(step + 1, arrays=..., meta=...)
            interrupt.check()
    """

    def __init__(self, *, on_request: Callable[[], None] | None = None) -> None:
        """Nothing was requested yet; `on_request` is called at each signal."""
        self._signum: int | None = None
        self._on_request = on_request

    @property
    def requested(self) -> bool:
        """True once a signal has come: save, then `check`."""
        return self._signum is not None

    def check(self) -> None:
        """Raises Interrupted if a stop was requested; call it after saving."""
        if self.requested:
            self.stop()

    def stop(self) -> NoReturn:
        """Raises Interrupted, of the signal that came here or to another process."""
        raise Interrupted(signal.SIGTERM if self._signum is None else self._signum)

    def __enter__(self) -> Self:
        self._previous = {
            signum: signal.signal(signum, self._on_signal)
            for signum in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._signum = signum
        if self._on_request is not None:
            self._on_request()
        # Not `print`: the step may be inside one, whose buffer is not reentrant.
        os.write(2, b"\nstopping after this step; Ctrl-C (again) stops at once\n")


def go_on(config: RunConfig) -> str:
    """How to resume a run that stops, for a message."""
    recorded = config.out / CONFIG
    if not recorded.exists():
        return "start again, as nothing was written yet"
    script = Path(sys.argv[0])
    command = f"python {script}"
    if script.name == "rlhf-jax" or script.parts[-2:] == ("train", "main.py"):
        command = " ".join(("rlhf-jax", *sys.argv[1:2]))  # and the trainer's name
    return f"go on with\n  {command} --config {recorded} --resume"
