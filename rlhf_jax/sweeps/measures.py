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
    last = _last(run, measure)
    numbers = [value for value in last if value is not None]
    if not last or len(numbers) < len(last):
        return None
    return sum(numbers) / len(numbers)


def _last(run: Path, measure: Measure) -> list[float | None]:
    """The last values of a metric; None where one is not finite."""
    metric, rows = measure.metric or "", metrics.read(run / "metrics.jsonl")
    return [finite(row[metric]) for row in rows if metric in row][-measure.last :]


def doubts(measures: Mapping[str, Measure], *, runs: Sequence[Path]) -> list[str]:
    """Returns notes on finished runs that are not counted, or are means of fewer rows.

    A measure that no run has is left to `absent`.
    """
    notes = []
    for name, measure in measures.items():
        without = [run for run in runs if measured(run, measure) is None]
        if without and len(without) < len(runs):
            notes.append(
                f"{name}: {len(without)} of {len(runs)} runs have no finite number and "
                f"are not counted, {without[0]} first"
            )
        if measure.summary is None and measure.last > 1:
            counts = [len(_last(run, measure)) for run in runs]
            fewer = [count for count in counts if 0 < count < measure.last]
            if fewer:
                notes.append(
                    f"{name}: {len(fewer)} of {len(runs)} runs have fewer than "
                    f"{measure.last} rows with {measure.metric}, the least "
                    f"{min(fewer)}; their mean is over all of these"
                )
    return notes


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
