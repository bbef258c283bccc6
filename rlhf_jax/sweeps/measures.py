"""Numbers of a run that is done, out of its metrics or its summary."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import metrics
from rlhf_jax.sweeps.declaration import Measure


def measured(run: Path, measure: Measure) -> float | None:
    """The number of a run.

    Args:
      run: its folder.

    Returns:
      None where the run has it nowhere, or where one of its last values is not finite:
      a run that diverged has no number.

    Raises:
      InputError: a file of the run cannot be read.
    """
    if measure.summary is not None:
        value: Any = _summary(run)
        for key in measure.summary.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return _number(value)
    metric, rows = measure.metric or "", _rows(run)
    last = [_number(row[metric]) for row in rows if metric in row][-measure.last :]
    numbers = [value for value in last if value is not None]
    if not last or len(numbers) < len(last):
        return None
    return sum(numbers) / len(numbers)


def absent(measures: Mapping[str, Measure], *, runs: Sequence[Path]) -> list[str]:
    """What to tell of each measure that no run has, with those that are like it.

    Args:
      runs: folders of runs that are done, at least one.
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
            f"no run has; there are {', '.join(near) or 'none'}"
        )
    return messages


def _known(run: Path, *, of_summary: bool) -> list[str]:
    """Names of the numbers of a run."""
    if of_summary:
        return sorted(_leaves(_summary(run), prefix=""))
    return sorted(
        {name for row in _rows(run) for name in row if _number(row[name]) is not None}
    )


def _leaves(value: Any, *, prefix: str) -> list[str]:
    if isinstance(value, Mapping):
        return [
            leaf
            for key, one in value.items()
            for leaf in _leaves(one, prefix=f"{prefix}.{key}" if prefix else str(key))
        ]
    return [] if _number(value) is None else [prefix]


def _rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; none where there is no such file."""
    path = run / "metrics.jsonl"
    return metrics.read(path) if path.exists() else []


def _summary(run: Path) -> Any:
    path = run / "summary.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: expected the summary of a run, got: {error}; remove the folder "
            f"of that run, and start the sweep again"
        ) from error


def _number(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None
