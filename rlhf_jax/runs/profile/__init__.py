"""--profile: the steps to trace, the trace, and the times in it.

This module is what every run imports; `profiler` and `trace` are imported on demand.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

import jax

from rlhf_jax.functional.checks import InputError

Masks = tuple[jax.Array, jax.Array]  # segments or mask [B, S], response tokens [B, S]
HOST_SCOPE = "reward"  # annotation of user code on the host


class Window(NamedTuple):
    """Steps of the last stage of a run that are profiled."""

    first: int
    end: int  # exclusive

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses "5:8", which means the steps 5, 6 and 7.

        Raises:
          InputError: the text has another form, or contains no step.
        """
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, flags=re.ASCII)
        if match is None or int(match[1]) >= int(match[2]):
            raise InputError(
                f"--profile: expected FIRST:END with FIRST < END, as 5:8 for the steps "
                f"5, 6 and 7, got {text!r:.40}; give such a pair"
            )
        return cls(int(match[1]), int(match[2]))

    def check(self, num_steps: int) -> None:
        """Checks that a run has these steps; a program without steps has 0.

        Raises:
          InputError: the run has fewer steps.
        """
        if self.end > num_steps:
            expected = f"steps 0 to {num_steps - 1}, which the run has"
            remedy = "profile earlier ones, raise --num-steps, or leave --profile out"
            if not num_steps:
                expected = "a program that trains step by step"
                remedy = "leave --profile out"
            raise InputError(
                f"--profile {self.first}:{self.end}: expected {expected}, got step "
                f"{self.end - 1} as the last; {remedy}"
            )
