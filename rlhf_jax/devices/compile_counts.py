"""How often each program is compiled: a run whose shapes change compiles in its loop.

JAX tells every listener of a compilation and of a program that it reads from disk
instead; both count, as both are a new shape. A program is known by its function's name.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

from jax import monitoring

EVENT = "/jax/core/compile/backend_compile_duration"
Counts = collections.Counter[str]
_counts: Counts = collections.Counter()


def so_far() -> Counts:
    """{program: compilations} of this process since this was first called."""
    _listen()
    return _counts.copy()


def since(before: Counts) -> dict[str, int]:
    """{program: compilations} since `before`, of `so_far`; the most first."""
    return dict((so_far() - before).most_common())


@functools.cache
def _listen() -> None:
    monitoring.register_event_duration_secs_listener(_count)


def _count(event: str, duration_secs: float, **about: Any) -> None:
    del duration_secs
    if event == EVENT:
        name = str(about.get("fun_name", "unnamed"))
        _counts[name.removeprefix("jit(").removesuffix(")")] += 1
