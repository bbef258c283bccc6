"""Numbers of a run that is done, out of its metrics or its summary."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
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
      None where the run has it nowhere, or where it is not finite.
    """
    if measure.summary is not None:
        value: Any = _summary(run)
        for key in measure.summary.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return _number(value)
    metric, rows = measure.metric or "", metrics.read(run / "metrics.jsonl")
    values = [_number(row.get(metric)) for row in rows]
    last = [value for value in values if value is not None][-measure.last :]
    return sum(last) / len(last) if last else None


def check(measures: Mapping[str, Measure], *, runs: Iterable[Path]) -> None:
    """Checks that some run has each measure.

    Args:
      runs: folders of runs that are done, at least one.

    Raises:
      InputError: no run has one of them; names what is like it.
    """
    folders = list(runs)
    for name, measure in measures.items():
        if any(measured(run, measure) is not None for run in folders):
            continue
        there = _known(folders[0], of_summary=measure.summary is not None)
        wanted = measure.summary or measure.metric or ""
        near = difflib.get_close_matches(wanted, there, n=3, cutoff=0.4) or there[:5]
        where = "summary.json" if measure.summary else "metrics.jsonl"
        raise InputError(
            f"measure {name}: expected a number in {where} of a run, got {wanted}, "
            f"which no run has; there are {', '.join(near)}"
        )


def _known(run: Path, *, of_summary: bool) -> list[str]:
    """Names of the numbers of a run."""
    if of_summary:
        return sorted(_leaves(_summary(run), prefix=""))
    rows = metrics.read(run / "metrics.jsonl")
    return sorted(
        {name for row in rows for name in row if _number(row[name]) is not None}
    )


def _leaves(value: Any, *, prefix: str) -> list[str]:
    if isinstance(value, Mapping):
        return [
            leaf
            for key, one in value.items()
            for leaf in _leaves(one, prefix=f"{prefix}.{key}" if prefix else str(key))
        ]
    return [] if _number(value) is None else [prefix]


def _summary(run: Path) -> Any:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def _number(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None
