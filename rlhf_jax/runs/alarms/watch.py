"""The alarms of one stage, from when each began until it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlhf_jax.runs.alarms.history import Row

Check = Callable[[Sequence[Row]], dict[str, str]]


class Alarm(NamedTuple):
    """One thing that asks for a look, from when it began until it is over."""

    name: str
    step: int  # at which it began
    message: str  # what was seen then, with numbers, and what to do


class Watch:
    """The alarms of one stage, from its rows in order, and so of a resumed one too."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._rows: list[Row] = []
        self._active: list[Alarm] = []
        self.raised: list[Alarm] = []  # every one, when it began

    def see(self, step: int, row: Row) -> list[Alarm]:
        """Takes the row of a step; those that are active now."""
        self._rows.append(row)
        before = {alarm.name: alarm for alarm in self._active}
        self._active = [
            before.get(name, Alarm(name, step, message))
            for name, message in self._check(self._rows).items()
        ]
        self.raised += [alarm for alarm in self._active if alarm.name not in before]
        return self._active


def begun(active: Sequence[Alarm], *, step: int) -> list[Alarm]:
    """Those that began at this step, to be told once."""
    return [alarm for alarm in active if alarm.step == step]
