"""Stops that Python has dropped: what a signal's handler raised where nobody catches.

A handler runs wherever the main thread is. What it raises inside a finalizer, or a
callback of the garbage collector (JAX has one), Python reports and forgets.
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
    """Has Python send the signal of an exception once more where it dropped that.

    Not at once: the handler would raise at the same place. Where an exception was not
    dropped nothing is sent, so that no handler disturbs what clears away.

    Args:
      signals: by what their handlers raise, subclasses first.

    Returns:
      `sys.unraisablehook` as it was.
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
