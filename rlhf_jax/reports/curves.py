"""Curves of every metric: means over the seeds of a group, with bands."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.reports.grouping import Group
from rlhf_jax.reports.reading import Run
from rlhf_jax.runs.alarms.verdicts import JUDGE, SCORE
from rlhf_jax.runs.metrics import finite
from rlhf_jax.sweeps import statistics

KL = "objective/kl"
FINER = 4
DIGITS = 4  # significant digits of a number on the page

Json = Any


class Table(NamedTuple):
    """The values of a metric in the runs of a group, from the last stage with it."""

    group: int
    stage: str
    metric: str
    steps: list[int]  # K
    values: np.ndarray  # f[n, K] for n seeds; NaN where a seed has no number


def tables(runs: Sequence[Run], groups: Sequence[Group]) -> list[Table]:
    """Returns one table for each metric and group with values of it."""
    of_metrics = {
        (number, metric): Table(number, stage, metric, steps, values)
        for number, group in enumerate(groups)
        for stage in dict.fromkeys(
            row["stage"] for member in group.runs for row in runs[member].metrics
        )
        for metric, (steps, values) in _of_stage(
            [runs[member] for member in group.runs], stage=stage
        ).items()
    }
    return list(of_metrics.values())


def curves(
    of_groups: Sequence[Table], *, points: int, fine: Collection[str] = ()
) -> dict[str, Json]:
    """Returns all curves: {"steps": lists, "metrics": {metric: {group: curve}}}.

        curve   {"stage", "x": number of a list of steps, "n": seeds, "y": means}
                with several seeds also "lo", "hi", the least and the greatest of them,
                and "t", half of the 95% interval of the mean

    Args:
      points: largest number of points of a curve, evenly spread, with both ends. Reward
        and KL have points at the judge's steps too, beside which they are drawn.
      fine: metrics with FINER times as many points.
    """
    together = {
        (table.group, table.stage): {
            table.steps[k] for k in thinned(len(table.steps), points=FINER * points)
        }
        for table in of_groups
        if table.metric == JUDGE
    }
    number_of: dict[tuple[int, ...], int] = {}  # {steps: number}, shared by metrics
    metrics: dict[str, dict[str, Json]] = {}
    for table in of_groups:
        times = FINER if table.metric in fine else 1
        columns = thinned(len(table.steps), points=times * points)
        if table.metric in (SCORE, KL):
            judged = together.get((table.group, table.stage), set())
            at = {k for k, step in enumerate(table.steps) if step in judged}
            columns = sorted(at.union(columns))
        steps = tuple(table.steps[k] for k in columns)
        number = number_of.setdefault(steps, len(number_of))
        curve = {"stage": table.stage, "x": number, "n": len(table.values)}
        of_metric = metrics.setdefault(table.metric, {})
        of_metric[str(table.group)] = curve | _bands(table.values[:, columns])
    return {"steps": list(map(list, number_of)), "metrics": metrics}


def thinned(count: int, *, points: int) -> list[int]:
    """Returns at most `points` indices below `count`, evenly spread, with both ends."""
    if count <= points:
        return list(range(count))
    return sorted({round(k * (count - 1) / (points - 1)) for k in range(points)})


def compact(values: Any) -> list[float | None]:
    """Returns numbers rounded to DIGITS; None for those that are not finite."""
    return [finite(float(f"{value:.{DIGITS}g}")) for value in values]


def _of_stage(
    runs: Sequence[Run], *, stage: str
) -> dict[str, tuple[list[int], np.ndarray]]:
    """{metric: (steps [K], values [n, K])} of one group."""
    cells: dict[str, dict[int, tuple[list[int], list[float]]]] = {}
    for seed, run in enumerate(runs):
        for row in run.metrics:
            if row["stage"] != stage:
                continue
            step = row["step"]
            for name, value in row.items():
                if (number := finite(value)) is not None and name != "step":
                    of_seed = cells.setdefault(name, {}).setdefault(seed, ([], []))
                    of_seed[0].append(step)
                    of_seed[1].append(number)
    of_metrics = {}
    for name, by_seed in cells.items():
        at = np.unique(np.concatenate([steps for steps, _ in by_seed.values()]))
        values = np.full((len(runs), len(at)), np.nan)
        for seed, (steps, numbers) in by_seed.items():
            values[seed, np.searchsorted(at, steps)] = numbers
        of_metrics[name] = (at.tolist(), values)
    return of_metrics


def _bands(values: np.ndarray) -> dict[str, Json]:
    if len(values) == 1:
        return {"y": compact(values[0])}
    with warnings.catch_warnings():
        # Steps without a value, and sums that overflow, would warn.
        warnings.simplefilter("ignore", RuntimeWarning)
        return {
            "y": compact(np.nanmean(values, axis=0)),
            "lo": compact(np.nanmin(values, axis=0)),
            "hi": compact(np.nanmax(values, axis=0)),
            "t": compact(statistics.half_widths(values)),
        }
