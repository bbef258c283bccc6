"""A slow verifier, like one that runs code or calls a server."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Slow:
    """Waits, then scores a response by its length, so that groups differ."""

    seconds: float

    def __call__(self, prompt: str, response: str, row: Mapping[str, Any]) -> float:
        """Sleeps, which uses no processor, and returns the score."""
        del prompt, row
        time.sleep(self.seconds)
        return float(len(response) % 7)
