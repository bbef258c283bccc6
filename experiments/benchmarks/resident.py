"""Inputs of the sides of `benchmarks.logprobs`, and measurement of a step.

Each side is a process. This file uses only the standard library and NumPy, so that the
Python of any framework can run it. Linux only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def inputs(*, rows: int, columns: int, width: int, words: int) -> Arrays:
    """hidden f32[B, S, D], head f32[V, D], tokens i32[B, S], weights f32[2, B, S]."""
    rng = np.random.default_rng(0)
    return {
        "hidden": rng.normal(size=(rows, columns, width)).astype(np.float32),
        "head": rng.normal(0, 0.05, (words, width)).astype(np.float32),
        "tokens": rng.integers(0, words, (rows, columns)).astype(np.int32),
        "weights": rng.normal(size=(2, rows, columns)).astype(np.float32),
    }


def measure(step: Callable[[], list[Any]], *, repeats: int) -> dict[str, Any]:
    """Runs `step` 1 + `repeats` times; its results must be ready when it returns.

    Returns:
      seconds, of the fastest repeat; mib, the peak resident memory above that before
      the first run; numbers, the 2-norm of each result.
    """
    # 5 resets the high-water mark to the current resident memory.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _mib("VmRSS")
    results = step()
    norms = [float(np.linalg.norm(np.ravel(np.asarray(x)))) for x in results]
    del results
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        results = step()
        seconds.append(time.perf_counter() - start)
        del results
    return {
        "seconds": min(seconds),
        "mib": _mib("VmHWM") - before,
        "numbers": norms,
    }


def _mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {name}; run this on Linux")
