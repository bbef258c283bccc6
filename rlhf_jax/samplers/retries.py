"""Calls of a sampler that fail and are tried again, each pause twice as long.

A draw is a function of the prompts, the key and the weights, so that asking again is
safe and gives the same responses.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import StopError

Result = TypeVar("Result")
TIMEOUT = 600.0  # seconds of a call
TRIES = 5
SECONDS = 1.0  # before the second try
MOST_SECONDS = 60.0


class TransientError(StopError):
    """A failure after which the same call may succeed."""


class Retries:
    """Tries calls again after a `TransientError`; counts how often."""

    def __init__(self, tries: int = TRIES) -> None:
        """At most `tries` of a call, the first included."""
        checks.positive(tries=tries)
        self.tries, self.count = tries, 0

    def __call__(
        self,
        call: Callable[[], Result],
        *,
        after: type[TransientError] = TransientError,
    ) -> Result:
        """What `call` returns, by the last try at the latest.

        Args:
          after: failures that it is tried again after.

        Raises:
          StopError: all tries failed. Whatever else `call` raises, at once.
        """
        number, pause = 1, SECONDS
        while True:
            number += 1
            try:
                return call()
            except after as error:
                if number > self.tries:
                    why = f"{error} (tried {self.tries} times)"
                    raise StopError(why) from error
                print(
                    f"sampler: try {number} of {self.tries} in {pause:g} s, as the one "
                    f"before failed: {error}",
                    file=sys.stderr,
                )
            self.count += 1
            time.sleep(pause)
            pause = min(2 * pause, MOST_SECONDS)
