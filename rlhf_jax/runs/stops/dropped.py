"""Repeats signals whose exception Python has dropped.

A signal's handler runs wherever the main thread is. If it raises inside a finalizer, or
a callback of the garbage collector (JAX has one), Python only reports the exception.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

LATER = 0.05  # seconds, which no finalizer should take


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
