"""Reads the measures of finished runs from their metrics or summary."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.runs import folder, metrics
from rlhf_jax.runs.metrics import finite
from rlhf_jax.runs.snapshots import resume
from rlhf_jax.sweeps.declaration import Measure


def measured(run: Path, measure: Measure) -> float | None:
    """Reads a measure from the folder of a run.

    Returns:
      The value; None if the run does not have it, or if one of the last values is not
      finite, since a run that diverged has no number.
    """
    if measure.summary is not None:
        value: Any = folder.read_summary(run)
        for key in measure.summary.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return finite(value)
    metric, rows = measure.metric or "", metrics.read(run / "metrics.jsonl")
    last = [finite(row[metric]) for row in rows if metric in row][-measure.last :]
    numbers = [value for value in last if value is not None]
    if not last or len(numbers) < len(last):
        return None
    return sum(numbers) / len(numbers)


def absent(measures: Mapping[str, Measure], *, runs: Sequence[Path]) -> list[str]:
    """Returns a message for each measure that no run has, with similar names.

    There must be at least one run, and all must be finished.
    """
    messages = []
    for name, measure in measures.items():
        if any(measured(run, measure) is not None for run in runs):
            continue
        known = _known(runs[0], of_summary=measure.summary is not None)
        metric = measure.summary or measure.metric or ""
        near = difflib.get_close_matches(metric, known, n=3, cutoff=0.4) or known[:5]
        where = "summary.json" if measure.summary else "metrics.jsonl"
        messages.append(
            f"measure {name}: expected a finite number in {where}, got {metric}, which "
            f"no run has; known are {', '.join(near) or 'none'}"
        )
    return messages


def _known(run: Path, *, of_summary: bool) -> list[str]:
    if of_summary:
        rows = [resume.flat(folder.read_summary(run))]
    else:
        rows = metrics.read(run / "metrics.jsonl")
    return sorted(
        {
            name
            for row in rows
            for name, value in row.items()
            if finite(value) is not None
        }
    )
